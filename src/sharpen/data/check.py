"""Checks that every row can be read and every call fits its tool, and measures what rows teach.

`sharpen data check` and `sharpen data stats` call it, and so do the importers. The rows are in the
project's own format: dialogs, preference pairs, tasks and tools.
"""

from __future__ import annotations

import marshal
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from sharpen.calls import reports_failure
from sharpen.data.reading import Record, read_records
from sharpen.rows import dialog_from_row, preference_from_row, task_from_row, tool_from_wire
from sharpen.tools import check_call, schema_problem
from sharpen.types import Dialog, Json, Message, Preference, RowError, Task, ToolCall, ToolSpec

ParsedRow = Dialog | Preference | Task

# A string argument that stands for the result of an earlier call.
_REFERENCE = re.compile(r"\$.+\$|API_call_\d+")

# `_CHECKLIST` bounds shares of these counts: the first per row, the others per call.
_ROW_COUNTS = ("single_call", "several_calls", "parallel", "failure", "retry", "no_call")
_CALL_COUNTS = ("unlisted_calls", "bad_arguments")
_CHECKLIST = {
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
    """Counts of one checked file: rows, bad rows, calls, kinds of rows, and why rows are bad."""

    path: str
    rows: int = 0
    bad: int = 0
    calls: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)


def parse_record(record: Record) -> ParsedRow | ToolSpec:
    """Return what a row holds, by the fields that it has. Raises RowError for anything else."""
    row = record.value
    where = record.where
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


# Checking ----------------------------------------------------------------------------------------


def check_rows(path: Path, report: CheckReport) -> Iterator[tuple[Record, list[str]]]:
    """Yield every row of a file with its problems, and count them in `report`."""
    for record in read_records(path):
        problems: list[str] = []
        try:
            item = parse_record(record)
            report.kinds[type(item).__name__.lower()] += 1
            problems.extend(structure_problems(item))
            problems.extend(tool_problems(item, report))
        except RowError as error:
            problems.append(error.reason)
        except RecursionError:
            problems.append("nested too deeply")
        report.rows += 1
        if problems:
            report.bad += 1
        yield record, problems


def structure_problems(item: ParsedRow | ToolSpec) -> list[str]:
    """Return what is wrong with a row apart from schemas and arguments."""
    if isinstance(item, Dialog):
        return _turn_problems(item.messages)
    if isinstance(item, Preference):
        problems = _turn_problems(item.prompt + item.chosen)
        problems += _turn_problems(item.prompt + item.rejected)
        if item.chosen == item.rejected:
            problems.append("chosen and rejected are the same")
        return problems
    if isinstance(item, Task) and not item.instruction.strip():
        return ["the instruction is empty"]
    return []


def _turn_problems(messages: Sequence[Message]) -> list[str]:
    """Every tool result needs a call, and an assistant must say or call something."""
    problems: list[str] = []
    open_calls: list[ToolCall] = []
    for index, message in enumerate(messages):
        if message.role == "assistant":
            open_calls = list(message.tool_calls)
            if not message.content and not message.tool_calls:
                problems.append(f"messages[{index}]: the assistant says nothing and calls nothing")
        elif message.role == "tool":
            call_index = _answered_call(message, open_calls)
            if call_index is None:
                problems.append(f"messages[{index}]: a tool result without a call")
            else:
                del open_calls[call_index]
    if not any(message.role == "assistant" for message in messages):
        problems.append("no assistant turn")
    return problems


def _answered_call(result: Message, open_calls: Sequence[ToolCall]) -> int | None:
    """Return the index of the call that a tool result answers, or None."""
    if not open_calls:
        return None
    call_ids = [call.id for call in open_calls]
    if result.tool_call_id in call_ids:
        return call_ids.index(result.tool_call_id)
    if result.tool_call_id and any(call_ids):
        return None
    return 0  # without ids, results come in the order of the calls


def tool_problems(item: ParsedRow | ToolSpec, report: CheckReport) -> Iterator[str]:
    """Yield unusable schemas, calls of tools that are not listed, and arguments that do not fit."""
    listed_tools = [item] if isinstance(item, ToolSpec) else item.tools
    tools = {tool.name: tool for tool in listed_tools}
    for tool in listed_tools:
        problem = _schema_problem(tool.parameters)
        if problem:
            yield f"tool {tool.name!r}: {problem}"
    for call in calls_of(item):
        report.calls += 1
        if call.name not in tools:
            absent = "is not listed" if tools else "is called, but the row lists no tools"
            yield f"tool {call.name!r} {absent}"
        elif not _has_reference(call.arguments):
            for problem in check_call(call, tools[call.name]):
                yield f"call of {call.name!r}: {problem}"


def calls_of(item: ParsedRow | ToolSpec) -> Iterator[ToolCall]:
    """Yield the calls that a row teaches: trained ones of a dialog, both sides', or gold ones."""
    if isinstance(item, Task):
        yield from _gold_calls(item)
    elif isinstance(item, Dialog):
        yield from _trained_calls(item.messages)
    elif isinstance(item, Preference):
        yield from _trained_calls(item.chosen + item.rejected)


def _trained_calls(messages: Sequence[Message]) -> Iterator[ToolCall]:
    for message in messages:
        if message.trained:
            yield from message.tool_calls


def _gold_calls(task: Task) -> Iterator[ToolCall]:
    calls = task.gold.get("calls")
    if not isinstance(calls, list):
        return
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise RowError("", "gold.calls: expected objects with a name")
        arguments = call.get("arguments")
        if not isinstance(arguments, dict):
            raise RowError("", "gold.calls: arguments: expected an object")
        if task.gold.get("match") == "allowed":
            arguments = _first_allowed_values(arguments)
        yield ToolCall(call["name"], arguments)


def _first_allowed_values(allowed: Json) -> Json:
    """Return one call out of lists of allowed values; an argument that may be absent ("") is."""
    arguments = {}
    for name, values in allowed.items():
        value = values[0] if isinstance(values, list) and values else values
        if value != "":
            arguments[name] = value
    return arguments


def _has_reference(value: Any) -> bool:
    """Does an argument stand for the result of an earlier call? Then its type is not known yet."""
    if isinstance(value, str):
        return bool(_REFERENCE.search(value))
    if isinstance(value, dict):
        return any(_has_reference(item) for item in value.values())
    if isinstance(value, list):
        return any(_has_reference(item) for item in value)
    return False


def _schema_problem(parameters: Json) -> str | None:
    try:
        return _dumped_schema_problem(marshal.dumps(parameters))
    except ValueError:
        return "nested too deeply"


@lru_cache(20_000)  # rows repeat their tools
def _dumped_schema_problem(dumped_schema: bytes) -> str | None:
    return schema_problem(marshal.loads(dumped_schema))


# Measuring ---------------------------------------------------------------------------------------


def measure(path: Path) -> Json:
    """Return the counts and shares of one file, and which lines of the checklist it passes."""
    counts: Counter[str] = Counter()
    types: Counter[str] = Counter()
    called_names: set[str] = set()
    described: dict[str, bool] = {}
    for record in read_records(path):
        counts["rows"] += 1
        try:
            item = parse_record(record)
            counts[type(item).__name__.lower()] += 1
            if isinstance(item, ToolSpec):
                continue
            types[_type_of(item)] += 1
            for tool in item.tools:
                described[tool.name] = _is_described(tool)
            _count_calls(item, counts, called_names)
        except (RowError, RecursionError):
            counts["unreadable"] += 1
    shares = _shares(counts, described)
    return {
        "path": str(path),
        "counts": dict(counts)
        | {"tools_listed": len(described), "tools_called": len(called_names)},
        "types": dict(types),
        "shares": {name: round(value, 4) for name, value in shares.items()},
        "checklist": _apply_checklist(shares),
    }


def _type_of(item: ParsedRow) -> str:
    """The task type of a dialog or the kind of a task, "-" where a row has none."""
    name = ""
    if isinstance(item, Dialog):
        name = item.task_type
    elif isinstance(item, Task):
        name = item.kind
    return name or "-"


def _shares(counts: Counter[str], described: dict[str, bool]) -> dict[str, float]:
    row_count = max(counts["dialog"] + counts["preference"] + counts["task"], 1)
    call_count = max(counts["calls"], 1)
    shares = {name: counts[name] / row_count for name in _ROW_COUNTS}
    shares |= {name: counts[name] / call_count for name in _CALL_COUNTS}
    shares["described_tools"] = sum(described.values()) / max(len(described), 1)
    return shares


def _apply_checklist(shares: dict[str, float]) -> list[Json]:
    lines = []
    for name, (bound, limit) in _CHECKLIST.items():
        share = shares[name]
        passed = share >= limit if bound == "least" else share <= limit
        line = {"name": name, "value": round(share, 4), "passed": passed, bound: limit}
        lines.append(line)
    return lines


def _count_calls(item: ParsedRow, counts: Counter[str], called_names: set[str]) -> None:
    """Count a row's calls, its failed tool results and its retries.

    `+= int(…)` also counts a zero: a name that is counted at all is in the report.
    """
    tools = {tool.name: tool for tool in item.tools}
    calls = list(calls_of(item))
    for call in calls:
        counts["calls"] += 1
        called_names.add(call.name)
        if call.name not in tools:
            counts["unlisted_calls"] += 1
        elif not _has_reference(call.arguments):
            tool = tools[call.name]
            problems = _schema_problem(tool.parameters) or check_call(call, tool)
            counts["bad_arguments"] += int(bool(problems))
    if not calls:
        counts["no_call"] += 1
    elif len(calls) == 1:
        counts["single_call"] += 1
    else:
        counts["several_calls"] += 1
    if isinstance(item, Task):
        return
    messages = item.messages if isinstance(item, Dialog) else item.chosen
    counts["turns"] += len(messages)
    counts["parallel"] += int(any(len(message.tool_calls) > 1 for message in messages))
    failures = [index for index, message in enumerate(messages) if reports_failure(message)]
    counts["failure"] += int(bool(failures))
    retried = False
    if failures:
        retried = any(message.tool_calls for message in messages[failures[0] :])
    counts["retry"] += int(retried)


def _is_described(tool: ToolSpec) -> bool:
    """Can the tool be chosen by its text: does it and each of its parameters have a description?"""
    properties = tool.parameters.get("properties", {})
    if not isinstance(properties, dict):
        return False
    for schema in properties.values():
        if not isinstance(schema, dict):
            return False
        if not schema.get("description") and "enum" not in schema:
            return False
    return len(tool.description.split()) >= 3
