"""When to act: IN3 (is a task too vague, and what is missing) and When2Call (call, ask, answer, or
say that it cannot be done). Gold is `{"decision": …}`."""

from __future__ import annotations

from sharpen.data.importers import Importer, Rows, has
from sharpen.data.importers.openai import messages
from sharpen.data.importers.shapes import tools_from
from sharpen.types import Json, Preference, RowError, Task

DECISIONS = {
    "direct": "answer",
    "tool_call": "call",
    "request_for_info": "ask",
    "cannot_answer": "refuse",
}


def convert_in3(row: Json, where: str, side: None) -> Rows:
    if not isinstance(row["vague"], bool):
        raise RowError(where, f"vague: expected true or false, found {row['vague']!r}")
    gold = {"decision": "ask" if row["vague"] else "act", "missing": row["missing_details"]}
    metadata = {"category": row["category"], "thought": row["thought"]}
    yield Task("", row["task"], (), gold, "timing", metadata=metadata)


def convert_when2call(row: Json, where: str, side: None) -> Rows:
    tools = tools_from(row["tools"], where)
    if "chosen_response" in row:
        pair = (messages([row[key]], where) for key in ("chosen_response", "rejected_response"))
        yield Preference(messages(row["messages"], where), *pair, tools=tools)
        return
    correct = row["correct_answer"]
    if correct not in DECISIONS:
        raise RowError(where, f"correct_answer: unknown {correct!r}")
    gold = {"decision": DECISIONS[correct], "answer": row["answers"][correct]}
    metadata = {k: v for k, v in row.items() if k not in ("question", "tools", "uuid")}
    yield Task(str(row.get("uuid", "")), row["question"], tools, gold, "timing", metadata=metadata)


def detect_when2call(row: Json) -> bool:
    return has("correct_answer", "answers", "tools")(row) or has("chosen_response")(row)


IMPORTERS = (
    Importer("in3", has("task", "vague", "missing_details"), convert_in3),
    Importer("when2call", detect_when2call, convert_when2call),
)
