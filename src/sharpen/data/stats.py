"""`sharpen data stats`: what a file of dialogs teaches, against the agent-training checklist.

Coverage of one call, several calls, failure with retry and no call at all; tools that are made up;
arguments that do not fit; tools that are described.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpen.data.check import calls_of, known_problem, noun_of, refers
from sharpen.data.importers.reading import read_records
from sharpen.tools import check_call
from sharpen.types import Dialog, Json, Message, RowError, Task, ToolSpec


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of the checklist: a figure and what it must reach."""

    name: str
    least: float | None = None
    most: float | None = None

    def passed(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (
            self.most is None or value <= self.most
        )


CHECKLIST = (
    Rule("single_call", least=0.10),
    Rule("several_calls", least=0.10),
    Rule("failure", least=0.02),
    Rule("retry", least=0.01),
    Rule("no_call", least=0.05),
    Rule("unlisted_calls", most=0.0),
    Rule("bad_arguments", most=0.0),
    Rule("described_tools", least=0.95),
)


def measure(path: Path) -> Json:
    """Counts, shares and the checklist's verdicts of one file."""
    counts: Counter[str] = Counter()
    types: Counter[str] = Counter()
    names: set[str] = set()
    described: dict[str, bool] = {}
    for record in read_records(path):
        counts["rows"] += 1
        try:
            if record.problem or not isinstance(record.value, dict):
                raise RowError(record.where, record.problem or "not an object")
            noun = noun_of(record.value, record.where)
            counts[type(noun).__name__.lower()] += 1
            if isinstance(noun, ToolSpec):
                continue
            types[getattr(noun, "task_type", "") or getattr(noun, "kind", "") or "-"] += 1
            described |= {tool.name: is_described(tool) for tool in noun.tools}
            count_calls(noun, counts, names)
        except (RowError, RecursionError):
            counts["unreadable"] += 1
    rated = counts["dialog"] + counts["preference"] + counts["task"]
    shares = {
        name: counts[name] / rated if rated else 0.0
        for name in ("single_call", "several_calls", "parallel", "failure", "retry", "no_call")
    }
    calls = counts["calls"]
    shares["unlisted_calls"] = counts["unlisted_calls"] / calls if calls else 0.0
    shares["bad_arguments"] = counts["bad_arguments"] / calls if calls else 0.0
    shares["described_tools"] = sum(described.values()) / len(described) if described else 0.0
    verdicts = [
        {"name": r.name, "value": round(shares[r.name], 4), "passed": r.passed(shares[r.name])}
        | ({"least": r.least} if r.least is not None else {"most": r.most})
        for r in CHECKLIST
    ]
    return {
        "path": str(path),
        "counts": dict(counts) | {"tools_listed": len(described), "tools_called": len(names)},
        "types": dict(types),
        "shares": {name: round(value, 4) for name, value in shares.items()},
        "checklist": verdicts,
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


def failed(message: Message) -> bool:
    """Does a tool's answer say that the call failed?"""
    text = message.content.lstrip()
    if message.role != "tool" or not text:
        return False
    if text[0] != "{":
        return text[:5].lower() == "error" or text.startswith("Traceback")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    status = str(value.get("status", "")).lower()
    wrong = value.get("error") or value.get("exception") or status in ("error", "failed", "failure")
    return bool(wrong) or value.get("success") is False


def is_described(tool: ToolSpec) -> bool:
    """Clear enough to choose by: a description of the tool and of each parameter."""
    fields = tool.parameters.get("properties", {})
    told = all(
        isinstance(f, dict) and (f.get("description") or "enum" in f) for f in fields.values()
    )
    return len(tool.description.split()) >= 3 and told
