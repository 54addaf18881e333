"""Imported rows as tasks that can be scored: what a benchmark has to change in, or refuse of, the
rows of its format. `evals/benchmarks.py` names the function of each benchmark.

Each function takes what was imported, the raw record and its file, and yields tasks, or `RowError`s
that say why a record is none.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from sharpen.config import one_line
from sharpen.data.importers.common import find_side_file
from sharpen.data.importers.intercode_databases import rows_of, scripts
from sharpen.rewards.calls import CallReward
from sharpen.rewards.gold_answers import exact_calls
from sharpen.types import (
    Dialog,
    Json,
    RowError,
    StopReason,
    Task,
    ToolSpec,
    Trajectory,
    Turn,
)


def as_imported(task: Any, raw: Json, path: Path) -> Iterable[Task]:
    """The imported task itself."""
    if not isinstance(task, Task):
        raise RowError("", "a recorded dialog, not a task")
    return (task,)


def bfcl_task(task: Task, raw: Json, path: Path) -> Iterator[Task]:
    """Executable rows' calls become possible answers; Java's and JavaScript's are source text."""
    if task.kind in ("rest", "multi_turn"):
        raise RowError(task.id, f"{task.kind} rows need the services that they call")
    gold = dict(task.gold)
    if gold.get("calls") and "match" not in gold:
        gold["calls"] = [c | {"arguments": _allowed_values(c["arguments"])} for c in gold["calls"]]
        gold["match"] = "allowed"
    language = re.search(r"javascript|java", str(task.metadata.get("category")))
    if language:
        gold["language"] = language[0]
        tools = tuple(_with_text_arguments(tool, language[0]) for tool in task.tools)
        metadata = task.metadata | {"functions": raw["function"]}
        task = replace(task, tools=tools, metadata=metadata)
    task = replace(task, gold=gold)
    if gold.get("calls"):
        _check_gold(task)
    yield task


def _check_gold(task: Task) -> None:
    """Refuse a row whose own answer is wrong by the rules that score it."""
    turns = tuple(Turn(message) for message in exact_calls(task))
    trajectory = Trajectory(task.id, turns, StopReason.ANSWERED)
    if not CallReward().score(task, trajectory).is_solved:
        raise RowError(task.id, "the rules of BFCL refuse the answer of the row")


def _allowed_values(value: Any) -> Any:
    """A value as BFCL lists allowed ones: an object's values are such lists themselves."""
    if isinstance(value, dict):
        return {key: [_allowed_values(inner)] for key, inner in value.items()}
    if isinstance(value, list):
        return [_allowed_values(inner) if isinstance(inner, dict) else inner for inner in value]
    return value


def _with_text_arguments(tool: ToolSpec, language: str) -> ToolSpec:
    """A tool whose every argument is text in the language."""
    properties = {}
    for name, field in (tool.parameters.get("properties") or {}).items():
        description = f"{field.get('description', '')} ({language} source)".strip()
        properties[name] = {"type": "string", "description": description}
    return replace(tool, parameters=tool.parameters | {"properties": properties})


def decision_task(task: Any, raw: Json, path: Path) -> Iterator[Task]:
    """Gold's decision alone; its words are kept in the metadata."""
    (task,) = as_imported(task, raw, path)
    metadata = task.metadata | {"answer": task.gold.get("answer")}
    yield replace(task, gold={"decision": task.gold["decision"]}, metadata=metadata)


def known_calls(task: Any, raw: Json, path: Path) -> Iterator[Task]:
    """Tasks whose gold calls are all of tools on offer."""
    (task,) = as_imported(task, raw, path)
    offered = {tool.name for tool in task.tools}
    unknown = [call["name"] for call in task.gold["calls"] if call["name"] not in offered]
    if unknown:
        raise RowError(task.id, f"gold calls {unknown[0]!r}, which is not on offer")
    yield task


def dialog_calls(dialog: Dialog, raw: Json, path: Path) -> Iterator[Task | RowError]:
    """Every message with calls that follows the user's words is a task."""
    for place, message in enumerate(dialog.messages):
        if not message.tool_calls:
            continue
        *context, request = dialog.messages[:place]
        row_id = f"{dialog.id}-{place}"
        if request.role != "user":
            yield RowError(row_id, "a call that does not follow words of the user")
            continue
        calls = [{"name": c.name, "arguments": c.arguments} for c in message.tool_calls]
        task = Task(row_id, request.content, dialog.tools, {"calls": calls}, "calls")
        yield replace(task, context=tuple(context))


def graph_task(task: Task, raw: Json, path: Path) -> Iterator[Task]:
    """The plan is written, so the tools are listed in the request and not offered."""
    listed = ""
    if "tool" in task.gold["nodes"][0]:
        lines = [f"- {tool.name}: {tool.description}" for tool in task.tools]
        listed = "\n\nTools:\n" + "\n".join(lines)
    yield replace(task, instruction=task.instruction + listed, tools=())


def tested_code(task: Task, raw: Json, path: Path) -> Iterator[Task]:
    """The request names the tests, except where its signature says enough."""
    tests = "\n".join(task.gold["tests"])
    shown = "" if task.gold.get("entry_point") else f"\n\nIt has to pass:\n{tests}"
    yield replace(task, instruction=task.instruction + shown)


def sqlite_task(task: Task, raw: Json, path: Path) -> Iterator[Task]:
    """The question with its tables; gold is what the reference query finds."""
    database = task.gold["database"]
    query = task.gold["sql"]
    script_of = scripts(find_side_file(path, "databases.sql"))
    if database not in script_of:
        raise RowError(task.id, f"databases.sql has no {database!r}")
    try:
        result = rows_of(script_of[database], query)
    except sqlite3.Error as error:
        reason = f"SQLite does not run the reference query: {one_line(error)}"
        raise RowError(task.id, reason) from None
    tables = task.metadata.get("tables") or {}
    listed = "\n".join(f"{table}({', '.join(columns)})" for table, columns in tables.items())
    gold = {"sql": query, "result": result, "schema": script_of[database]}
    yield replace(task, instruction=f"Tables:\n{listed}\n\n{task.instruction}", gold=gold)


def service_task(task: Task, raw: Json, path: Path) -> tuple[Task]:
    """Tasks that the assistant's actions decide; a user's own tools are not here."""
    actions = task.gold.get("actions") or []
    if any(action.get("requestor") == "user" for action in actions):
        raise RowError(task.id, "the user needs tools of its own, which are not here")
    gold: Json = {key: task.gold.get(key) or [] for key in ("outputs", "communicate_info")}
    gold["actions"] = [{"name": a["name"], "arguments": a["arguments"]} for a in actions]
    return (Task(task.id, task.instruction, (), gold, "tau", context=task.context),)
