"""OpenAI and Hugging Face chat rows: `messages` with `tools` or the older `functions`.

Also LLaMA-Factory's v1 rows, whose content is a list of parts (`text`, `reasoning`, `tool_call`
with a `value`).
"""

from __future__ import annotations

from typing import Any

from sharpen.data.importers import Importer, Rows
from sharpen.data.importers.shapes import call_from, tools_from
from sharpen.types import Dialog, Json, Message, RowError, ToolCall

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
KNOWN = ("messages", "tools", "functions", "id", "task_type", "metadata")


def message(value: Any, where: str) -> Message:
    role = ROLES.get(value.get("role"))
    if role is None:
        raise RowError(where, f"unknown role {value.get('role')!r}")
    content, calls = content_of(value.get("content"), where)
    if role == "tool":
        names = (value.get(key) or "" for key in ("name", "tool_call_id"))
        return Message("tool", content, (), (), *names)
    calls += [call_from(call, where) for call in value.get("tool_calls") or []]
    if value.get("function_call"):
        calls.append(call_from(value["function_call"], where))
    return Message(role, content, tuple(calls))  # type: ignore[arg-type]


def content_of(value: Any, where: str) -> tuple[str, list[ToolCall]]:
    """Text or a list of parts → the text and the calls in it; reasoning goes between think tags."""
    if value is None or isinstance(value, str):
        return value or "", []
    text, calls = "", []
    for part in value:
        body = part.get("text", part.get("value"))
        if part.get("type") == "tool_call":
            calls.append(call_from(body, where))
        elif not isinstance(body, str):
            raise RowError(where, f"content part {part.get('type')!r} is not text")
        else:
            reasoning = part.get("type") == "reasoning"
            text += f"<think>\n{body}\n</think>\n\n" if reasoning else body
    return text, calls


def messages(value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise RowError(where, "no messages")
    return tuple(message(m, where) for m in value)


def convert(row: Json, where: str, side: None) -> Rows:
    tools = tools_from(row.get("tools") or row.get("functions"), where)
    rest = {k: v for k, v in row.items() if k not in KNOWN}
    yield Dialog(
        messages(row["messages"], where),
        tools,
        id=str(row.get("id") or ""),
        task_type=row.get("task_type") or "",
        metadata=(row.get("metadata") or {}) | rest,
    )


def detect(row: Json) -> bool:
    first = row["messages"][0]
    return "role" in first and not {"label", "chosen_response", "Annotator Metadata"} & set(row)


IMPORTERS = (Importer("openai", detect, convert),)
