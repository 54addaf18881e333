"""Rows on disk ↔ nouns, in the OpenAI/HF message format.

On disk: `{"messages": […], "tools": […]}`, or `prompt/chosen/rejected` for preferences, which other
trainers read too. Arguments are dicts inside and on disk, JSON strings only where a server wants
them. Unknown keys of a row are kept in its metadata, never dropped.
"""

from __future__ import annotations

import json
from typing import Any

from sharpen import types
from sharpen.types import Dialog, Json, Message, Preference, RowError, Task, ToolCall, ToolSpec

ROLES = types.ROLES
SIDES, SCORES = ("prompt", "chosen", "rejected"), ("chosen_score", "rejected_score")
EMPTY = (None, "", (), {})


def dialog_from_row(row: Json, where: str = "") -> Dialog:
    """A row → a Dialog, or a RowError that says which message is wrong and how."""
    return Dialog(
        messages_from_wire(row.get("messages"), where),
        task_type=text_field(row, "task_type", where),
        **common_fields(row, where, "messages", "task_type"),
    )


def dialog_to_row(dialog: Dialog) -> Json:
    return filled(dialog, "messages", "tools", "id", "task_type", "metadata")


def preference_from_row(row: Json, where: str = "") -> Preference:
    sides: Json = {key: messages_from_wire(row.get(key), where, key) for key in SIDES}
    if not all(message.trained for key in SIDES[1:] for message in sides[key]):
        raise RowError(where, "weight: what is chosen or rejected is compared whole, not left out")
    scores: Json = {key: number_field(row, key, where) for key in SCORES}
    return Preference(**sides, **scores, **common_fields(row, where, *SIDES, *SCORES))


def preference_to_row(pair: Preference) -> Json:
    return filled(pair, *SIDES, "tools", *SCORES, "id", "metadata")


def task_from_row(row: Json, where: str = "") -> Task:
    if not isinstance(row.get("instruction"), str):
        raise RowError(where, "instruction: expected text")
    return Task(
        instruction=row["instruction"],
        gold=expect(row.get("gold", {}), dict, "an object", where, "gold"),
        kind=text_field(row, "kind", where),
        difficulty=text_field(row, "difficulty", where),
        context=messages_from_wire(row["context"], where, "context") if row.get("context") else (),
        **common_fields(row, where, "instruction", "gold", "kind", "difficulty", "context"),
    )


def task_to_row(task: Task) -> Json:
    tools = [tool_to_wire(tool) for tool in task.tools]
    row = {"id": task.id, "instruction": task.instruction, "tools": tools, "gold": task.gold}
    return row | filled(task, "kind", "difficulty", "metadata", "context")


def common_fields(row: Json, where: str, *known: str) -> Json:
    """What every noun has: tools, an id, and metadata with each field that has no other place."""
    metadata = expect(row.get("metadata") or {}, dict, "an object", where, "metadata")
    named = ("tools", "id", "metadata", *known)
    return {
        "tools": tools_from_wire(row.get("tools"), where),
        "id": text_field(row, "id", where),
        "metadata": metadata | {key: value for key, value in row.items() if key not in named},
    }


def filled(noun: Any, *names: str) -> Json:
    """Those fields of a noun that are not empty; messages and tools in the chat format."""
    row = {}
    for name in names:
        value = getattr(noun, name)
        if isinstance(value, tuple) and value:
            to_wire = tool_to_wire if name == "tools" else message_to_wire
            row[name] = [to_wire(item) for item in value]
        elif value not in EMPTY:
            row[name] = value
    return row


def messages_from_wire(value: Any, where: str, key: str = "messages") -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise RowError(where, f"{key}: expected a non-empty list of messages")
    return tuple(message_from_wire(m, where, f"{key}[{i}]") for i, m in enumerate(value))


def message_from_wire(value: Any, where: str = "", at: str = "message") -> Message:
    """One chat message. Its content may be text, null, or a list of text parts."""
    if not isinstance(value, dict):
        raise RowError(where, f"{at}: expected an object, found {type(value).__name__}")
    role = value.get("role")
    if role not in ROLES:
        raise RowError(where, f"{at}.role: expected one of {', '.join(ROLES)}, found {role!r}")
    if calls := value.get("tool_calls") or ():
        expect(calls, list, "a list", where, at, ".tool_calls")
        if role != "assistant":
            reason = f"only an assistant message can call tools, this one is {role!r}"
            raise RowError(where, f"{at}: {reason}")
    content = value.get("content")
    if not isinstance(content, str):
        content = content_from_wire(content, where, f"{at}.content")
    weight = value.get("weight")  # as in OpenAI's files: 0 is not trained
    if weight is not None and not (weight in (0, 1) and role == "assistant"):
        reason = f"expected 0 or 1 on an assistant message, found {weight!r} on {role!r}"
        raise RowError(where, f"{at}.weight: {reason}")
    if not (calls or weight == 0 or "name" in value or "tool_call_id" in value):
        return Message(role, content)  # most messages, at a third of the time
    return Message(
        role,
        content,
        tuple(call_from_wire(c, where, f"{at}.tool_calls[{i}]") for i, c in enumerate(calls)),
        name=text_field(value, "name", where),
        tool_call_id=text_field(value, "tool_call_id", where),
        trained=weight != 0,
    )


def content_from_wire(value: Any, where: str, at: str) -> str:
    if value is None:
        return ""
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        texts = [part.get("text") for part in value]
        if all(isinstance(text, str) for text in texts):
            return "".join(texts)
    raise RowError(where, f"{at}: expected text, found {type(value).__name__}")


def call_from_wire(value: Any, where: str = "", at: str = "tool_call") -> ToolCall:
    """`{"function": {"name", "arguments"}}` or the bare `{"name", "arguments"}`; arguments as an
    object or its JSON text."""
    function = named_function(value, where, at)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parse_text(arguments or "{}", where, f"{at}.arguments")
    elif arguments is None:
        arguments = {}
    call_id = value.get("id") or ""
    if not (isinstance(arguments, dict) and isinstance(call_id, str)):
        expect(arguments, dict, "an object", where, at, ".arguments")
        expect(call_id, str, "text", where, at, ".id")
    return ToolCall(function["name"], arguments, call_id)


def message_to_wire(message: Message, arguments_as_text: bool = False) -> Json:
    """A Message → the chat format. A server wants arguments as JSON text, all others an object."""
    wire: Json = {"role": message.role, "content": message.content}
    calls = []
    for call in message.tool_calls:
        given: Any = call.arguments
        given = json.dumps(given, ensure_ascii=False) if arguments_as_text else given
        function = {"name": call.name, "arguments": given}
        calls.append(filled(call, "id") | {"type": "function", "function": function})
    wire |= {"tool_calls": calls} if calls else {}
    wire |= {} if message.trained or arguments_as_text else {"weight": 0}
    return wire | filled(message, "name", "tool_call_id")


def tools_from_wire(value: Any, where: str) -> tuple[ToolSpec, ...]:
    if isinstance(value, str):  # some trainers store the list as JSON text: one type a column
        value = parse_text(value or "[]", where, "tools")
    listed = expect([] if value is None else value, list, "a list", where, "tools")
    tools = tuple(tool_from_wire(t, where, f"tools[{i}]") for i, t in enumerate(listed))
    names = [t.name for t in tools]
    if len(set(names)) < len(names):
        repeated = next(n for n in names if names.count(n) > 1)
        raise RowError(where, f"tools: the name {repeated!r} stands twice")
    return tools


def tool_from_wire(value: Any, where: str = "", at: str = "tool") -> ToolSpec:
    function = named_function(value, where, at)
    if not function["name"]:
        raise RowError(where, f"{at}: expected an object with a name")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    text = function.get("description") or ""
    if not (isinstance(parameters, dict) and isinstance(text, str)):
        expect(parameters, dict, "a JSON schema", where, at, ".parameters")
        expect(text, str, "text", where, at, ".description")
    return ToolSpec(function["name"], text, parameters)


def tool_to_wire(tool: ToolSpec) -> Json:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def named_function(value: Any, where: str, at: str) -> Json:
    """What a call or a tool holds under `function`, or holds itself."""
    function = value.get("function", value) if isinstance(value, dict) else value
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(where, f"{at}: expected an object with a name")
    return function


def parse_text(text: str, where: str, at: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(where, f"{at}: not JSON: {error}") from None


def expect(value: Any, kind: type, wanted: str, where: str, *at: str) -> Any:
    if not isinstance(value, kind):
        raise RowError(where, f"{''.join(at)}: expected {wanted}, found {type(value).__name__}")
    return value


def text_field(row: Json, key: str, where: str) -> str:
    """A text that may be missing, or a whole number written as one."""
    value = row.get(key)
    if value is None:
        return ""
    return str(value) if type(value) is int else expect(value, str, "text", where, key)


def number_field(row: Json, key: str, where: str) -> float | None:
    value = row.get(key)
    if value is not None and type(value) not in (int, float):
        raise RowError(where, f"{key}: expected a number, found {type(value).__name__}")
    return value
