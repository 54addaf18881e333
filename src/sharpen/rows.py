"""Rows on disk and on the wire ↔ the nouns of `types`: the only code that knows the OpenAI/HF
message format.

On disk: `{"messages": […], "tools": […]}`, or `prompt/chosen/rejected` for preferences, which other
trainers read too. Arguments are dicts inside and on disk, JSON strings only where a server wants
them. Unknown keys of a row are kept in its metadata, never dropped.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sharpen.types import (
    ROLES,
    Dialog,
    Json,
    Message,
    Preference,
    RowError,
    Task,
    ToolCall,
    ToolSpec,
)


def dialog_from_row(row: Json, where: str = "") -> Dialog:
    """A row → a Dialog, or a RowError that says which message is wrong and how."""
    messages = messages_from_wire(row.get("messages"), where)
    known = ("messages", "tools", "id", "task_type", "metadata")
    return Dialog(
        messages,
        tools_from_wire(row.get("tools"), where),
        id=text_field(row, "id", where),
        task_type=text_field(row, "task_type", where),
        metadata=extra_fields(row, known, where),
    )


def dialog_to_row(dialog: Dialog) -> Json:
    row: Json = {"messages": [message_to_wire(m) for m in dialog.messages]}
    if dialog.tools:
        row["tools"] = [tool_to_wire(t) for t in dialog.tools]
    return row | named_fields(dialog, "id", "task_type", "metadata")


def preference_from_row(row: Json, where: str = "") -> Preference:
    known = (
        "prompt",
        "chosen",
        "rejected",
        "tools",
        "id",
        "chosen_score",
        "rejected_score",
        "metadata",
    )
    return Preference(
        *(messages_from_wire(row.get(key), where, key) for key in ("prompt", "chosen", "rejected")),
        tools=tools_from_wire(row.get("tools"), where),
        id=text_field(row, "id", where),
        chosen_score=number_field(row, "chosen_score", where),
        rejected_score=number_field(row, "rejected_score", where),
        metadata=extra_fields(row, known, where),
    )


def preference_to_row(pair: Preference) -> Json:
    row: Json = {
        key: [message_to_wire(m) for m in getattr(pair, key)]
        for key in ("prompt", "chosen", "rejected")
    }
    if pair.tools:
        row["tools"] = [tool_to_wire(t) for t in pair.tools]
    scores = {
        k: getattr(pair, k)
        for k in ("chosen_score", "rejected_score")
        if getattr(pair, k) is not None
    }
    return row | scores | named_fields(pair, "id", "metadata")


def task_from_row(row: Json, where: str = "") -> Task:
    instruction = row.get("instruction")
    if not isinstance(instruction, str):
        raise RowError(where, "instruction: expected text")
    gold = row.get("gold", {})
    if not isinstance(gold, dict):
        raise RowError(where, f"gold: expected an object, found {type(gold).__name__}")
    known = ("id", "instruction", "tools", "gold", "kind", "difficulty", "context", "metadata")
    return Task(
        id=text_field(row, "id", where),
        instruction=instruction,
        tools=tools_from_wire(row.get("tools"), where),
        gold=gold,
        kind=text_field(row, "kind", where),
        difficulty=text_field(row, "difficulty", where),
        context=messages_from_wire(row["context"], where, "context") if row.get("context") else (),
        metadata=extra_fields(row, known, where),
    )


def task_to_row(task: Task) -> Json:
    row: Json = {
        "id": task.id,
        "instruction": task.instruction,
        "tools": [tool_to_wire(t) for t in task.tools],
    }
    row |= {"gold": task.gold} | named_fields(task, "kind", "difficulty", "metadata")
    if task.context:
        row["context"] = [message_to_wire(m) for m in task.context]
    return row


def messages_from_wire(value: Any, where: str, key: str = "messages") -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise RowError(where, f"{key}: expected a non-empty list of messages")
    return tuple(message_from_wire(m, where, f"{key}[{i}]") for i, m in enumerate(value))


def message_from_wire(value: Any, where: str = "", at: str = "message") -> Message:
    """One chat message. Content may be text, null, or a list of text parts; anything else is an
    error."""
    if not isinstance(value, dict):
        raise RowError(where, f"{at}: expected an object, found {type(value).__name__}")
    role = value.get("role")
    if role not in ROLES:
        raise RowError(where, f"{at}.role: expected one of {', '.join(ROLES)}, found {role!r}")
    calls = value.get("tool_calls") or []
    if not isinstance(calls, list):
        raise RowError(where, f"{at}.tool_calls: expected a list, found {type(calls).__name__}")
    if calls and role != "assistant":
        raise RowError(
            where, f"{at}: only an assistant message can call tools, this one is {role!r}"
        )
    content = value.get("content")
    if not isinstance(content, str):
        content = content_from_wire(content, where, f"{at}.content")
    if not (calls or "name" in value or "tool_call_id" in value):
        return Message(role, content)  # most messages, at a third of the time
    return Message(
        role,
        content,
        tuple(call_from_wire(c, where, f"{at}.tool_calls[{i}]") for i, c in enumerate(calls)),
        name=text_field(value, "name", where),
        tool_call_id=text_field(value, "tool_call_id", where),
    )


def content_from_wire(value: Any, where: str, at: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(
        isinstance(p, dict) and isinstance(p.get("text"), str) for p in value
    ):
        return "".join(part["text"] for part in value)
    raise RowError(where, f"{at}: expected text, found {type(value).__name__}")


def call_from_wire(value: Any, where: str = "", at: str = "tool_call") -> ToolCall:
    """`{"function": {"name", "arguments"}}` or the bare `{"name", "arguments"}`; arguments as an
    object or its JSON text."""
    function = value.get("function", value) if isinstance(value, dict) else value
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(where, f"{at}: expected an object with a name")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise RowError(where, f"{at}.arguments: not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise RowError(
            where, f"{at}.arguments: expected an object, found {type(arguments).__name__}"
        )
    call_id = value.get("id") or ""
    if not isinstance(call_id, str):
        raise RowError(where, f"{at}.id: expected text, found {type(call_id).__name__}")
    return ToolCall(function["name"], arguments, call_id)


def message_to_wire(message: Message, arguments_as_text: bool = False) -> Json:
    """A Message → the chat format. A server wants arguments as JSON text; files and templates want
    them as an object."""
    wire: Json = {"role": message.role, "content": message.content}
    if message.tool_calls:
        wire["tool_calls"] = [
            ({"id": c.id} if c.id else {})
            | {
                "type": "function",
                "function": {
                    "name": c.name,
                    "arguments": json.dumps(c.arguments, ensure_ascii=False)
                    if arguments_as_text
                    else c.arguments,
                },
            }
            for c in message.tool_calls
        ]
    return wire | named_fields(message, "name", "tool_call_id")


def tools_from_wire(value: Any, where: str) -> tuple[ToolSpec, ...]:
    if isinstance(
        value, str
    ):  # some trainers store the list as JSON text, because columns must have one type
        try:
            value = json.loads(value or "[]")
        except (ValueError, RecursionError) as error:
            raise RowError(where, f"tools: not JSON: {error}") from None
    if value is None:
        return ()
    if not isinstance(value, list):
        raise RowError(where, f"tools: expected a list, found {type(value).__name__}")
    tools = tuple(tool_from_wire(t, where, f"tools[{i}]") for i, t in enumerate(value))
    names = [t.name for t in tools]
    if len(set(names)) < len(names):
        repeated = next(n for n in names if names.count(n) > 1)
        raise RowError(where, f"tools: the name {repeated!r} stands twice")
    return tools


def tool_from_wire(value: Any, where: str = "", at: str = "tool") -> ToolSpec:
    function = value.get("function", value) if isinstance(value, dict) else value
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not function["name"]
    ):
        raise RowError(where, f"{at}: expected an object with a name")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise RowError(
            where, f"{at}.parameters: expected a JSON schema, found {type(parameters).__name__}"
        )
    description = function.get("description") or ""
    if not isinstance(description, str):
        raise RowError(
            where, f"{at}.description: expected text, found {type(description).__name__}"
        )
    return ToolSpec(function["name"], description, parameters)


def tool_to_wire(tool: ToolSpec) -> Json:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def text_field(row: Json, key: str, where: str) -> str:
    value = row.get(key)
    if value is None:
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise RowError(where, f"{key}: expected text, found {type(value).__name__}")
    return value


def number_field(row: Json, key: str, where: str) -> float | None:
    value = row.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise RowError(where, f"{key}: expected a number, found {type(value).__name__}")
    return value


def extra_fields(row: Json, known: Sequence[str], where: str) -> Json:
    """The row's metadata and every field that has no place of its own."""
    metadata = row.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise RowError(where, f"metadata: expected an object, found {type(metadata).__name__}")
    return metadata | {key: value for key, value in row.items() if key not in known}


def named_fields(noun: Any, *names: str) -> Json:
    """Those fields of a noun that are not empty."""
    return {name: getattr(noun, name) for name in names if getattr(noun, name)}
