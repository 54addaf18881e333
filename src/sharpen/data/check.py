"""`sharpen data check` and `stats`: is every row readable, does every call fit its tool, and what
do the rows teach? Rows are the project's own: dialogs, preference pairs, tasks, tools."""

from __future__ import annotations

import marshal
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from sharpen.calls import failed
from sharpen.data.reading import Record, read_records
from sharpen.rows import dialog_from_row, preference_from_row, task_from_row, tool_from_wire
from sharpen.tools import check_call, schema_problem
from sharpen.types import Dialog, Json, Message, Preference, RowError, Task, ToolCall, ToolSpec

Noun = Dialog | Preference | Task
REFERENCE = re.compile(r"\$.+\$|API_call_\d+")  # an argument that stands for an earlier result
PER_ROW = ("single_call", "several_calls", "parallel", "failure", "retry", "no_call")
PER_CALL = ("unlisted_calls", "bad_arguments")
CHECKLIST = {
    "single_call": ("least", 0.10),
    "several_calls": ("least", 0.10),
    "failure": ("least", 0.02),
    "retry": ("least", 0.01),
    "no_call": ("least", 0.05),
    "unlisted_calls": ("most", 0.0),
    "bad_arguments": ("most", 0.0),
    "described_tools": ("least", 0.95),
}


@dataclass
class CheckReport:
    path: str
    rows: int = 0
    bad: int = 0
    calls: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)


def noun_of(record: Record) -> Noun | ToolSpec:
    """What a row is, or a RowError."""
    row, where = record.value, record.where
    if record.problem:
        raise RowError(where, record.problem)
    if not isinstance(row, dict):
        raise RowError(where, f"expected an object, found {type(row).__name__}")
    if "messages" in row:
        return dialog_from_row(row, where)
    if "chosen" in row or "rejected" in row:
        return preference_from_row(row, where)
    if "instruction" in row:
        return task_from_row(row, where)
    if "function" in row or "parameters" in row:
        return tool_from_wire(row, where)
    raise RowError(where, "neither messages, chosen and rejected, instruction, nor a function")


def check_rows(path: Path, report: CheckReport) -> Iterator[tuple[Record, list[str]]]:
    """Every row of a file with its complaints, counted into `report`."""
    for record in read_records(path):
        problems = []
        try:
            noun = noun_of(record)
            report.kinds[type(noun).__name__.lower()] += 1
            problems += structure(noun)
            problems += faults(noun, report)
        except RowError as error:
            problems.append(error.reason)
        except RecursionError:
            problems.append("nested too deeply")
        report.rows += 1
        report.bad += bool(problems)
        yield record, problems


def structure(noun: Any) -> list[str]:
    """What is wrong with a row apart from schemas."""
    if isinstance(noun, Dialog):
        return turn_problems(noun.messages)
    if isinstance(noun, Preference):
        same = ["chosen and rejected are the same"] if noun.chosen == noun.rejected else []
        both = (noun.prompt + side for side in (noun.chosen, noun.rejected))
        return [problem for side in both for problem in turn_problems(side)] + same
    empty = isinstance(noun, Task) and not noun.instruction.strip()
    return ["the instruction is empty"] if empty else []


def turn_problems(messages: tuple[Message, ...]) -> list[str]:
    """Tool results need a call, and an assistant must say or call something."""
    problems, open_calls = [], []
    for index, message in enumerate(messages):
        if message.role == "assistant":
            open_calls = list(message.tool_calls)
            if not message.content and not message.tool_calls:
                problems.append(f"messages[{index}]: the assistant says nothing and calls nothing")
        elif message.role == "tool":
            wanted = message.tool_call_id
            ids = [call.id for call in open_calls]
            at = ids.index(wanted) if wanted in ids else -1 if wanted and any(ids) else 0
            if at < 0 or not open_calls:
                problems.append(f"messages[{index}]: a tool result without a call")
            else:
                del open_calls[at]
    if not any(m.role == "assistant" for m in messages):
        problems.append("no assistant turn")
    return problems


def faults(noun: Any, report: CheckReport) -> Iterator[str]:
    """Unusable schemas, calls to tools that are not listed, arguments that do not fit."""
    listed = [noun] if isinstance(noun, ToolSpec) else noun.tools
    tools = {tool.name: tool for tool in listed}
    for tool in listed:
        if problem := known_problem(tool.parameters):
            yield f"tool {tool.name!r}: {problem}"
    for call in calls_of(noun):
        report.calls += 1
        if call.name not in tools:
            absent = "is not listed" if tools else "is called, but the row lists no tools"
            yield f"tool {call.name!r} {absent}"
        elif not refers(call.arguments):
            for problem in check_call(call, tools[call.name]):
                yield f"call of {call.name!r}: {problem}"


def calls_of(noun: Any) -> Iterator[ToolCall]:
    if isinstance(noun, Task):
        calls = noun.gold.get("calls")
        for call in calls if isinstance(calls, list) else ():
            if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                raise RowError("", "gold.calls: expected objects with a name")
            if not isinstance(given := call.get("arguments"), dict):
                raise RowError("", "gold.calls: arguments: expected an object")
            if noun.gold.get("match") == "allowed":  # the first value stands for all, "" for none
                given = {k: v[0] if isinstance(v, list) and v else v for k, v in given.items()}
                given = {k: v for k, v in given.items() if v != ""}
            yield ToolCall(call["name"], given)
    elif not isinstance(noun, ToolSpec):
        for message in noun.messages if isinstance(noun, Dialog) else noun.chosen + noun.rejected:
            yield from message.tool_calls if message.trained else ()


def refers(value: Any) -> bool:
    """Does an argument stand for what an earlier call returned? Its type is not known yet."""
    if isinstance(value, str):
        return bool(REFERENCE.search(value))
    inner = value.values() if isinstance(value, dict) else value
    return isinstance(value, (dict, list)) and any(refers(item) for item in inner)


def known_problem(parameters: Json) -> str | None:
    try:
        return dumped_problem(marshal.dumps(parameters))
    except ValueError:
        return "nested too deeply"


@lru_cache(20_000)  # rows repeat their tools
def dumped_problem(schema: bytes) -> str | None:
    return schema_problem(marshal.loads(schema))


def measure(path: Path) -> Json:
    """Counts, shares and the checklist's verdicts of one file."""
    counts: Counter[str] = Counter()
    types: Counter[str] = Counter()
    names: set[str] = set()
    described: dict[str, bool] = {}
    for record in read_records(path):
        counts["rows"] += 1
        try:
            noun = noun_of(record)
            counts[type(noun).__name__.lower()] += 1
            if isinstance(noun, ToolSpec):
                continue
            types[getattr(noun, "task_type", "") or getattr(noun, "kind", "") or "-"] += 1
            described |= {tool.name: is_described(tool) for tool in noun.tools}
            count_calls(noun, counts, names)
        except (RowError, RecursionError):
            counts["unreadable"] += 1
    rated = counts["dialog"] + counts["preference"] + counts["task"]
    shares = {name: counts[name] / max(rated, 1) for name in PER_ROW}
    shares |= {name: counts[name] / max(counts["calls"], 1) for name in PER_CALL}
    shares["described_tools"] = sum(described.values()) / max(len(described), 1)
    checklist = []
    for name, (bound, limit) in CHECKLIST.items():
        passed = shares[name] >= limit if bound == "least" else shares[name] <= limit
        line = {"name": name, "value": round(shares[name], 4), "passed": passed, bound: limit}
        checklist.append(line)
    return {
        "path": str(path),
        "counts": dict(counts) | {"tools_listed": len(described), "tools_called": len(names)},
        "types": dict(types),
        "shares": {name: round(value, 4) for name, value in shares.items()},
        "checklist": checklist,
    }


def count_calls(noun: Any, counts: Counter[str], names: set[str]) -> None:
    tools = {tool.name: tool for tool in noun.tools}
    calls = list(calls_of(noun))
    for call in calls:
        counts["calls"] += 1
        names.add(call.name)
        if call.name not in tools:
            counts["unlisted_calls"] += 1
        elif not refers(call.arguments):
            wrong = known_problem(tools[call.name].parameters) or check_call(call, tools[call.name])
            counts["bad_arguments"] += bool(wrong)
    counts["no_call" if not calls else "single_call" if len(calls) == 1 else "several_calls"] += 1
    if isinstance(noun, Task):
        return
    messages = noun.messages if isinstance(noun, Dialog) else noun.chosen
    counts["turns"] += len(messages)
    counts["parallel"] += any(len(m.tool_calls) > 1 for m in messages)
    wrong = [index for index, m in enumerate(messages) if failed(m)]
    counts["failure"] += bool(wrong)
    counts["retry"] += bool(wrong) and any(m.tool_calls for m in messages[wrong[0] :])


def is_described(tool: ToolSpec) -> bool:
    """Clear enough to choose by: a description of the tool and of each parameter."""
    fields = tool.parameters.get("properties", {})
    fields = fields.values() if isinstance(fields, dict) else [None]
    told = all(isinstance(f, dict) and (f.get("description") or "enum" in f) for f in fields)
    return len(tool.description.split()) >= 3 and told
