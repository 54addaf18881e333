"""Hermes function-calling rows: tools in the system prompt between `<tools>` tags, calls and
results as text between `<tool_call>` and `<tool_response>` tags."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from sharpen.data.importers import Importer, Rows
from sharpen.data.importers.shapes import as_text, call_from, literal, tools_from
from sharpen.data.importers.sharegpt import ROLES
from sharpen.types import Dialog, Json, Message, RowError, ToolCall, ToolSpec

TOOLS = re.compile(r"<tools>(.*?)</tools>", re.S)
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.S)
RESPONSE = re.compile(r"<tool_response>(.*?)</tool_response>", re.S)


def listed(text: str, where: str) -> tuple[ToolSpec, ...]:
    """The last non-empty tools block: a JSON list, or one JSON object a line."""
    blocks = [b.strip() for b in TOOLS.findall(text) if b.strip().startswith(("[", "{"))]
    if not blocks:
        return ()
    try:
        return tools_from(literal(blocks[-1]), where)
    except ValueError:
        return tools_from([line for line in blocks[-1].splitlines() if line.strip()], where)


def assistant(text: str, where: str) -> Message:
    calls = tuple(call_from(body.strip(), where) for body in CALL.findall(text))
    if "<tool_call>" in CALL.sub("", text):
        raise RowError(where, "a <tool_call> is not closed")
    return Message("assistant", CALL.sub("", text).strip(), calls)


def results(text: str, pending: list[ToolCall]) -> Iterator[Message]:
    """One tool message a response; the name is written inside it, else it is the call's."""
    for body in RESPONSE.findall(text) or [text]:
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            value = body.strip()
        named = isinstance(value, dict) and {"name", "content"} <= set(value)
        name = value["name"] if named else pending[0].name if pending else ""
        pending[:1] = []
        yield Message("tool", as_text(value["content"] if named else value), name=str(name))


def convert(row: Json, where: str, side: None) -> Rows:
    tools = tools_from(row.get("tools"), where)
    messages: list[Message] = []
    pending: list[ToolCall] = []
    for turn in row.get("conversations") or row["messages"]:
        role = ROLES.get(turn.get("from") or turn.get("role"))
        text = turn.get("value", turn.get("content"))
        if role == "system":
            tools = tools or listed(text, where)
            messages.append(Message("system", text))
        elif role == "assistant":
            messages.append(assistant(text, where))
            pending = list(messages[-1].tool_calls)
        elif role == "tool" or (role == "user" and "<tool_response>" in text):
            messages += results(text, pending)
        elif role == "user":
            messages.append(Message("user", text))
        else:
            raise RowError(where, f"unknown speaker {turn.get('from') or turn.get('role')!r}")
    known = ("conversations", "messages", "tools", "id")
    rest = {k: v for k, v in row.items() if k not in known}
    yield Dialog(tuple(messages), tools, id=str(row.get("id") or ""), metadata=rest)


def detect(row: Json) -> bool:
    texts = [t.get("value", t.get("content")) for t in row.get("conversations") or row["messages"]]
    return any("<tools>" in t or "<tool_call>" in t for t in texts if isinstance(t, str))


IMPORTERS = (Importer("hermes", detect, convert),)
