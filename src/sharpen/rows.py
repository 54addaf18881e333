"""Rows on disk ↔ Dialog, Preference and Task, in the OpenAI/Hugging Face message format.

A dialog is `{"messages": […], "tools": […]}`, a preference `{"prompt", "chosen", "rejected"}`, so
that other trainers can read the files too. Arguments are dicts inside and on disk; only a server
wants them as JSON text. Unknown keys of a row are kept in its metadata. "Wire" is the chat format
of one message, call or tool. Called by the importers, the trainers, the policies and the rewards.
"""

from __future__ import annotations

import json
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

_CONTINUATIONS = ("chosen", "rejected")
_SIDES = ("prompt", *_CONTINUATIONS)
_SCORES = ("chosen_score", "rejected_score")
_EMPTY_VALUES = (None, "", (), {})


# Rows ---------------------------------------------------------------------------------------------


def dialog_from_row(row: Json, where: str = "") -> Dialog:
    """Read a Dialog, or raise a RowError that says which message is wrong and how."""
    return Dialog(
        messages_from_wire(row.get("messages"), where),
        task_type=_read_text(row, "task_type", where),
        **_read_common_fields(row, where, "messages", "task_type"),
    )


def dialog_to_row(dialog: Dialog) -> Json:
    """Returns the row of a Dialog, without empty fields."""
    return _fields_to_row(dialog, "messages", "tools", "id", "task_type", "metadata")


def preference_from_row(row: Json, where: str = "") -> Preference:
    """Read a Preference, or raise a RowError that says what is wrong."""
    sides: Json = {key: messages_from_wire(row.get(key), where, key) for key in _SIDES}
    for key in _CONTINUATIONS:
        if not all(message.trained for message in sides[key]):
            reason = "a chosen or rejected message cannot have weight 0, leave the weight out"
            raise RowError(where, f"weight: {reason}")
    scores: Json = {key: number_field(row, key, where) for key in _SCORES}
    common_fields = _read_common_fields(row, where, *_SIDES, *_SCORES)
    return Preference(**sides, **scores, **common_fields)


def preference_to_row(pair: Preference) -> Json:
    """Returns the row of a Preference, without empty fields."""
    return _fields_to_row(pair, *_SIDES, "tools", *_SCORES, "id", "metadata")


def task_from_row(row: Json, where: str = "") -> Task:
    """Read a Task, or raise a RowError that says what is wrong."""
    if not isinstance(row.get("instruction"), str):
        raise RowError(where, "instruction: expected text")
    gold = _expect(row.get("gold", {}), dict, "an object", where, "gold")
    kind = _read_text(row, "kind", where)
    difficulty = _read_text(row, "difficulty", where)
    context: tuple[Message, ...] = ()
    if row.get("context"):
        context = messages_from_wire(row["context"], where, "context")
    return Task(
        instruction=row["instruction"],
        gold=gold,
        kind=kind,
        difficulty=difficulty,
        context=context,
        **_read_common_fields(row, where, "instruction", "gold", "kind", "difficulty", "context"),
    )


def task_to_row(task: Task) -> Json:
    """Returns the row of a Task; id, instruction, tools and gold are always there."""
    row: Json = {
        "id": task.id,
        "instruction": task.instruction,
        "tools": [tool_to_wire(tool) for tool in task.tools],
        "gold": task.gold,
    }
    return row | _fields_to_row(task, "kind", "difficulty", "metadata", "context")


def _read_common_fields(row: Json, where: str, *known: str) -> Json:
    """Read what every row has: tools, an id, and metadata with every key that is not `known`."""
    metadata = _expect(row.get("metadata") or {}, dict, "an object", where, "metadata")
    named = ("tools", "id", "metadata", *known)
    unknown = {key: value for key, value in row.items() if key not in named}
    return {
        "tools": tools_from_wire(row.get("tools"), where),
        "id": _read_text(row, "id", where),
        "metadata": metadata | unknown,
    }


def _fields_to_row(source: Any, *names: str) -> Json:
    """Returns the fields that are not empty; messages and tools in the chat format."""
    row: Json = {}
    for name in names:
        value = getattr(source, name)
        if isinstance(value, tuple) and value:
            to_wire = tool_to_wire if name == "tools" else message_to_wire
            row[name] = [to_wire(item) for item in value]
        elif value not in _EMPTY_VALUES:
            row[name] = value
    return row


# Messages -----------------------------------------------------------------------------------------


def messages_from_wire(value: Any, where: str, key: str = "messages") -> tuple[Message, ...]:
    """Read a non-empty list of chat messages; `key` is its place in the row."""
    if not isinstance(value, list) or not value:
        raise RowError(where, f"{key}: expected a non-empty list of messages")
    return tuple(message_from_wire(m, where, f"{key}[{i}]") for i, m in enumerate(value))


def message_from_wire(value: Any, where: str = "", at: str = "message") -> Message:
    """Read one chat message. Its content may be text, null, or a list of text parts."""
    if not isinstance(value, dict):
        raise RowError(where, f"{at}: expected an object, found {type(value).__name__}")
    role = value.get("role")
    if role not in ROLES:
        raise RowError(where, f"{at}.role: expected one of {', '.join(ROLES)}, found {role!r}")
    calls = value.get("tool_calls") or ()
    if calls:
        _expect(calls, list, "a list", where, at, ".tool_calls")
        if role != "assistant":
            reason = f"only an assistant message can call tools, this one is {role!r}"
            raise RowError(where, f"{at}: {reason}")
    content = value.get("content")
    if not isinstance(content, str):
        content = _content_from_wire(content, where, f"{at}.content")
    weight = value.get("weight")  # as in OpenAI's files: a message with weight 0 is not trained
    if weight is not None and not (weight in (0, 1) and role == "assistant"):
        reason = f"expected 0 or 1 on an assistant message, found {weight!r} on {role!r}"
        raise RowError(where, f"{at}.weight: {reason}")
    if not (calls or weight == 0 or "name" in value or "tool_call_id" in value):
        return Message(role, content)  # most messages; this shortcut takes a third of the time
    return Message(
        role,
        content,
        tuple(call_from_wire(c, where, f"{at}.tool_calls[{i}]") for i, c in enumerate(calls)),
        name=_read_text(value, "name", where),
        tool_call_id=_read_text(value, "tool_call_id", where),
        trained=weight != 0,
    )


def _content_from_wire(value: Any, where: str, at: str) -> str:
    if value is None:
        return ""
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        texts = [part.get("text") for part in value]
        if all(isinstance(text, str) for text in texts):
            return "".join(texts)
    raise RowError(where, f"{at}: expected text, found {type(value).__name__}")


def message_to_wire(message: Message, arguments_as_text: bool = False) -> Json:
    """Returns a message in the chat format.

    With `arguments_as_text` it is as a server wants it: arguments as JSON text, and no weight.
    """
    wire: Json = {"role": message.role, "content": message.content}
    if message.tool_calls:
        wire["tool_calls"] = [_call_to_wire(c, arguments_as_text) for c in message.tool_calls]
    if not message.trained and not arguments_as_text:
        wire["weight"] = 0
    return wire | _fields_to_row(message, "name", "tool_call_id")


# Calls --------------------------------------------------------------------------------------------


def call_from_wire(value: Any, where: str = "", at: str = "tool_call") -> ToolCall:
    """Read a call: `{"function": {"name", "arguments"}}`, or the bare `{"name", "arguments"}`.

    Arguments are an object or its JSON text.
    """
    function = _read_function(value, where, at)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parse_text(arguments or "{}", where, f"{at}.arguments")
    elif arguments is None:
        arguments = {}
    call_id = value.get("id") or ""
    _expect(arguments, dict, "an object", where, at, ".arguments")
    _expect(call_id, str, "text", where, at, ".id")
    return ToolCall(function["name"], arguments, call_id)


def _call_to_wire(call: ToolCall, arguments_as_text: bool) -> Json:
    arguments: Any = call.arguments
    if arguments_as_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return _fields_to_row(call, "id") | {"type": "function", "function": function}


# Tools --------------------------------------------------------------------------------------------


def tools_from_wire(value: Any, where: str) -> tuple[ToolSpec, ...]:
    """Read a list of tools, which may be missing. Every name may appear once."""
    if isinstance(value, str):
        # Some trainers store the list as JSON text, so that the column has one type.
        value = parse_text(value or "[]", where, "tools")
    items = _expect([] if value is None else value, list, "a list", where, "tools")
    tools = tuple(tool_from_wire(item, where, f"tools[{i}]") for i, item in enumerate(items))
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        reason = f"the name {repeated!r} stands twice, but every tool needs its own"
        raise RowError(where, f"tools: {reason}")
    return tools


def tool_from_wire(value: Any, where: str = "", at: str = "tool") -> ToolSpec:
    """Read a tool: `{"function": {"name", "description", "parameters"}}`, or the bare object."""
    function = _read_function(value, where, at)
    if not function["name"]:
        raise RowError(where, f"{at}: expected an object with a name")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    description = function.get("description") or ""
    _expect(parameters, dict, "a JSON schema", where, at, ".parameters")
    _expect(description, str, "text", where, at, ".description")
    return ToolSpec(function["name"], description, parameters)


def tool_to_wire(tool: ToolSpec) -> Json:
    """Returns a tool in the chat format."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _read_function(value: Any, where: str, at: str) -> Json:
    """Returns what a call or a tool holds under `function`, or the object itself."""
    function = value.get("function", value) if isinstance(value, dict) else value
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(where, f"{at}: expected an object with a name")
    return function


# Single values ------------------------------------------------------------------------------------


def parse_text(text: str, where: str, at: str) -> Any:
    """Parse JSON text that stands at `at` in a row."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(where, f"{at}: not JSON: {error}") from None


def number_field(row: Json, key: str, where: str) -> float | None:
    """Read a number that may be missing."""
    value = row.get(key)
    if value is not None and type(value) not in (int, float):
        raise RowError(where, f"{key}: expected a number, found {type(value).__name__}")
    return value


def _read_text(row: Json, key: str, where: str) -> str:
    """Read text that may be missing, or a whole number that becomes text."""
    value = row.get(key)
    if value is None:
        return ""
    if type(value) is int:
        return str(value)
    return _expect(value, str, "text", where, key)


def _expect(value: Any, expected_type: type, description: str, where: str, *place: str) -> Any:
    """Returns a value of the expected type; otherwise raises a RowError.

    The pieces of `place` are joined only for the error, as this runs for every row.
    """
    if not isinstance(value, expected_type):
        found = type(value).__name__
        raise RowError(where, f"{''.join(place)}: expected {description}, found {found}")
    return value
