"""Imports chat logs: OpenAI, ShareGPT, Alpaca, Hermes and Glaive.

A `chosen` beside a `rejected` makes a pair of a ShareGPT or Alpaca row. `messages_from` and
`chat_fields` also serve the other importers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from sharpen.data.check import ParsedRow
from sharpen.data.importers.calls import call_from
from sharpen.data.importers.common import (
    Importer,
    has,
    merge_turns,
    other_fields,
    parse_literal,
    require,
    to_text,
)
from sharpen.data.importers.tools import tools_from
from sharpen.types import Dialog, Json, Message, Preference, RowError, ToolCall, ToolSpec

_SPEAKERS = {
    "system": "system developer",
    "user": "user human",
    "assistant": "assistant gpt chatgpt",
    "call": "function_call",
    "tool": "tool function observation function_response",
}
_ROLES = {name: role for role, names in _SPEAKERS.items() for name in names.split()}
_HERMES_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.S)
_HERMES_TOOLS = re.compile(r"<tools>\s*([\[{].*?)\s*</tools>", re.S)
_HERMES_RESPONSE = re.compile(r"<tool_response>(.*?)</tool_response>", re.S)
_GLAIVE_SPEAKER = re.compile(r"(?m)^\s*(USER|ASSISTANT|FUNCTION RESPONSE): ?")
_GLAIVE_ARGUMENTS = re.compile(r"""("arguments":\s*)'(.*)'(\s*\})""", re.S)
# Fields that rows of other formats have beside OpenAI's `messages`.
_NOT_OPENAI = {"label", "chosen_response", "Annotator Metadata"}


# Messages and fields of any chat row -------------------------------------------------------------


def messages_from(value: Any, role: Any = None) -> tuple[Message, ...]:
    """Return a list of messages, a single one, or a text by `role`, as messages."""
    if role and isinstance(value, str):
        return (Message(role, value),)
    require(value and isinstance(value, (list, dict)), "no messages")
    values = [value] if isinstance(value, dict) else value
    return tuple(message_from(item) for item in values)


def message_from(value: Json) -> Message:
    """Return a message written as `role` and `content`, or as `from` and `value`."""
    speaker = value.get("role") or value.get("from")
    role: Any = _ROLES.get(speaker)  # type: ignore[arg-type]
    if role is None:
        raise RowError("", f"unknown role {speaker!r}")
    content, calls = _content_from(value.get("content", value.get("value")))
    if role == "call":
        written_calls = parse_literal(content)
        if not isinstance(written_calls, list):
            written_calls = [written_calls]
        return Message("assistant", "", tuple(call_from(call) for call in written_calls))
    if role == "tool":
        name = value.get("name") or ""
        call_id = value.get("tool_call_id") or ""
        return Message("tool", content, name=name, tool_call_id=call_id)
    calls += [call_from(call) for call in value.get("tool_calls") or []]
    if value.get("function_call"):  # the form before `tool_calls`
        calls.append(call_from(value["function_call"]))
    weight = value.get("weight", value.get("loss_weight"))  # OpenAI's and LLaMA-Factory's name
    require(weight in (None, 0, 1), f"weight: expected 0 or 1, found {weight!r}")
    trained = weight != 0 or role != "assistant"
    return Message(role, content, tuple(calls), trained=trained)


def _content_from(value: Any) -> tuple[str, list[ToolCall]]:
    """Return the text and the calls of a text or a list of parts; reasoning gets think tags."""
    if value is None or isinstance(value, str):
        return value or "", []
    text = ""
    calls = []
    for part in value:
        body = part.get("text", part.get("value"))
        kind = part.get("type")
        if kind == "tool_call":
            calls.append(call_from(body))
            continue
        require(isinstance(body, str), f"content part {kind!r} is not text")
        text += f"<think>\n{body}\n</think>\n\n" if kind == "reasoning" else body
    return text, calls


def chat_fields(row: Json, *known: str) -> Json:
    """Return what any chat row may have: tools, an id, and as metadata the fields that have no
    other place."""
    metadata = other_fields(row, "tools", "functions", "id", "metadata", *known)
    return {
        "tools": tools_from(row.get("tools") or row.get("functions")),
        "id": str(row.get("id") or ""),
        "metadata": (row.get("metadata") or {}) | metadata,
    }


def _system_messages(row: Json) -> list[Message]:
    """Return the system message of a row that has a `system` field."""
    return [Message("system", row["system"])] if row.get("system") else []


def _pair_or_dialog(
    row: Json, prompt: tuple[Message, ...], answer: tuple[Message, ...], *known: str
) -> ParsedRow:
    """Return a preference if the row has a `chosen` answer, otherwise a dialog."""
    shared_fields = chat_fields(row, "system", "chosen", "rejected", *known)
    if "chosen" in row:
        chosen = messages_from(row["chosen"], "assistant")
        rejected = messages_from(row["rejected"], "assistant")
        return Preference(prompt, chosen, rejected, **shared_fields)
    return Dialog(prompt + answer, **shared_fields)


# OpenAI, ShareGPT, Alpaca ------------------------------------------------------------------------


@Importer(lambda row: "role" in row["messages"][0] and not _NOT_OPENAI & set(row))
def openai(row: Json) -> Dialog:
    """OpenAI and Hugging Face chat rows: `messages` with `role` and `content`.

    It also reads the older `functions`, and LLaMA-Factory's v1 rows with content in parts.
    """
    shared_fields = chat_fields(row, "messages", "task_type")
    messages = messages_from(row["messages"])
    return Dialog(messages, task_type=row.get("task_type") or "", **shared_fields)


@Importer(lambda row: "value" in row["conversations"][0] and not _is_hermes(row))
def sharegpt(row: Json) -> ParsedRow:
    """ShareGPT rows: `conversations` with `from` and `value`."""
    for turn in row["conversations"]:
        text = turn.get("value", turn.get("content"))
        require(isinstance(text, str), f"turn of {turn.get('from')!r} without text")
    messages = _system_messages(row)
    messages += [message_from(turn) for turn in row["conversations"]]
    return _pair_or_dialog(row, merge_turns(messages), (), "conversations")


def _is_alpaca(row: Json) -> bool:
    has_answer = "output" in row or "chosen" in row
    return has_answer and "**Available Tools**" not in row["instruction"] and "gold" not in row


@Importer(_is_alpaca)
def alpaca(row: Json) -> ParsedRow:
    """Alpaca rows: `instruction`, `input`, `output`, and `history` as pairs of texts."""
    prompt = _system_messages(row)
    for earlier_request, earlier_answer in row.get("history") or []:
        prompt.append(Message("user", earlier_request))
        prompt.append(Message("assistant", earlier_answer))
    request_parts = (row["instruction"], row.get("input"))
    request = "\n\n".join(part for part in request_parts if part)
    prompt.append(Message("user", request))
    answer: tuple[Message, ...] = ()
    if "chosen" not in row:
        answer = (Message("assistant", row["output"]),)
    known = ("instruction", "input", "output", "history")
    return _pair_or_dialog(row, tuple(prompt), answer, *known)


# Hermes ------------------------------------------------------------------------------------------


def _is_hermes(row: Json) -> bool:
    for turn in row.get("conversations") or row["messages"]:
        text = turn.get("value", turn.get("content"))
        if isinstance(text, str) and ("<tools>" in text or "<tool_call>" in text):
            return True
    return False


@Importer(_is_hermes)
def hermes(row: Json) -> Dialog:
    """Hermes function-calling rows: tools, calls and results are text between tags."""
    shared_fields = chat_fields(row, "conversations", "messages")
    messages: list[Message] = []
    open_calls: list[ToolCall] = []
    for turn in messages_from(row.get("conversations") or row["messages"]):
        text = turn.content
        if turn.role == "tool" or (turn.role == "user" and "<tool_response>" in text):
            messages += _hermes_results(text, open_calls)
        elif turn.role == "assistant":
            open_calls = [call_from(body.strip()) for body in _HERMES_CALL.findall(text)]
            text = _HERMES_CALL.sub("", text)
            require("<tool_call>" not in text, "a <tool_call> is not closed")
            messages.append(Message("assistant", text.strip(), tuple(open_calls)))
        else:
            if turn.role == "system" and not shared_fields["tools"]:
                shared_fields["tools"] = _hermes_tools(text)
            messages.append(turn)
    return Dialog(tuple(messages), **shared_fields)


def _hermes_tools(text: str) -> tuple[ToolSpec, ...]:
    """Return the tools of the last filled block: a JSON list, or one JSON object per line."""
    blocks = _HERMES_TOOLS.findall(text)
    if not blocks:
        return ()
    try:
        return tools_from(parse_literal(blocks[-1]))
    except ValueError:
        return tools_from([line for line in blocks[-1].splitlines() if line.strip()])


def _hermes_results(text: str, open_calls: list[ToolCall]) -> Iterator[Message]:
    """Yield one tool message per response, and take the calls that they answer off the list.

    The name of the tool is written in the response, or else it is the name of the call.
    """
    is_named = has("name content")
    for body in _HERMES_RESPONSE.findall(text) or [text]:
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            value = body.strip()
        name = open_calls.pop(0).name if open_calls else ""
        if is_named(value):
            name = str(value["name"])
            value = value["content"]
        yield Message("tool", to_text(value), name=name)


# Glaive ------------------------------------------------------------------------------------------


@Importer(has("system chat"))
def glaive(row: Json) -> Dialog:
    """Glaive v2 rows: one `chat` text with `<functioncall>` inside, and tools in `system`."""
    messages = []
    tool_name = ""
    _, *parts = _GLAIVE_SPEAKER.split(row["chat"])
    for speaker, body in zip(parts[::2], parts[1::2], strict=True):
        text = body.replace("<|endoftext|>", "").strip()
        if speaker == "FUNCTION RESPONSE":
            messages.append(Message("tool", text, name=tool_name))
        elif speaker == "ASSISTANT" and "<functioncall>" in text:
            thought, _, call_text = text.partition("<functioncall>")
            # the arguments are JSON in single quotes: without these the whole is JSON
            call = call_from(_GLAIVE_ARGUMENTS.sub(r"\1\2\3", call_text.strip()))
            messages.append(Message("assistant", thought.strip(), (call,)))
            tool_name = call.name
        else:
            messages.append(Message("user" if speaker == "USER" else "assistant", text))
    return Dialog(merge_turns(messages), tools_from(list(_json_objects_in(row["system"]))))


def _json_objects_in(text: str) -> Iterator[Any]:
    """Yield every JSON object that stands in a text."""
    decoder = json.JSONDecoder()
    start = text.find("{")
    while start >= 0:
        value, end = decoder.raw_decode(text, start)
        yield value
        start = text.find("{", end)
