"""`sharpen data stats`: what a file of dialogs teaches, against the agent-training checklist.

Coverage of one call, several calls, failure with retry and no call at all; tools that are made up;
arguments that do not fit; tools that are described.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from sharpen.data.check import calls_of, known_problem, noun_of, refers
from sharpen.data.reading import read_records
from sharpen.tools import check_call
from sharpen.types import Dialog, Json, Message, RowError, Task, ToolSpec

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
    shares = {name: share(counts[name], rated) for name in PER_ROW}
    shares |= {name: share(counts[name], counts["calls"]) for name in PER_CALL}
    shares["described_tools"] = share(sum(described.values()), len(described))
    return {
        "path": str(path),
        "counts": dict(counts) | {"tools_listed": len(described), "tools_called": len(names)},
        "types": dict(types),
        "shares": {name: round(value, 4) for name, value in shares.items()},
        "checklist": [verdict(name, shares[name]) for name in CHECKLIST],
    }


def share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def verdict(name: str, value: float) -> Json:
    """One line of the checklist: a figure and what it must reach."""
    bound, limit = CHECKLIST[name]
    passed = value >= limit if bound == "least" else value <= limit
    return {"name": name, "value": round(value, 4), "passed": passed, bound: limit}


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
    fields = fields.values() if isinstance(fields, dict) else [None]
    told = all(isinstance(f, dict) and (f.get("description") or "enum" in f) for f in fields)
    return len(tool.description.split()) >= 3 and told
