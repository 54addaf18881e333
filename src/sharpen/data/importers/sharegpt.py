"""ShareGPT rows as LLaMA-Factory writes them: `conversations` of `from`/`value`, with
`function_call` and `observation` turns, tools as JSON text, and pairs as `chosen`/`rejected`.

A few rows of the Glaive demo answer a call that was never made; they are kept apart.
"""

from __future__ import annotations

from sharpen.data.importers import Importer, Rows
from sharpen.data.importers.shapes import call_from, joined, literal, tools_from
from sharpen.types import Dialog, Json, Message, Preference, RowError

ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "function_call": "call",
    "observation": "tool",
    "tool": "tool",
    "function_response": "tool",
}


def turn(value: Json, where: str) -> Message:
    speaker = value.get("from") or value.get("role")
    role, text = ROLES.get(str(speaker)), value.get("value", value.get("content"))
    if role is None or not isinstance(text, str):
        raise RowError(where, f"turn of {speaker!r} with {type(text).__name__}")
    if role != "call":
        return Message(role, text)  # type: ignore[arg-type]
    try:
        found = literal(text)
    except ValueError as error:
        raise RowError(where, f"function_call: {error}") from None
    calls = found if isinstance(found, list) else [found]
    return Message("assistant", "", tuple(call_from(call, where) for call in calls))


def convert(row: Json, where: str, side: None) -> Rows:
    messages = [turn(t, where) for t in row["conversations"]]
    if row.get("system"):
        messages.insert(0, Message("system", row["system"]))
    known = ("conversations", "tools", "system", "chosen", "rejected", "id")
    rest = {k: v for k, v in row.items() if k not in known}
    tools, name = tools_from(row.get("tools"), where), str(row.get("id") or "")
    if "chosen" in row:
        pair = ((turn(row[side], where),) for side in ("chosen", "rejected"))
        yield Preference(joined(messages), *pair, tools=tools, id=name, metadata=rest)
    else:
        yield Dialog(joined(messages), tools, id=name, metadata=rest)


def detect(row: Json) -> bool:
    turns = row["conversations"]
    tagged = any("<tools>" in t["value"] or "<tool_call>" in t["value"] for t in turns)
    return "value" in turns[0] and not tagged


IMPORTERS = (Importer("sharegpt", detect, convert),)
