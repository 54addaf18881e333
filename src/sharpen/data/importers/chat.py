"""Chat rows: OpenAI and Hugging Face messages, ShareGPT, Alpaca, Hermes and Glaive.

`openai` also reads the older `functions` and LLaMA-Factory's v1 rows, whose content is a list of
parts. A `chosen` beside a `rejected` makes a pair of a ShareGPT or Alpaca row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from sharpen.data.importers import Noun, has, importer
from sharpen.data.importers.shapes import as_text, call_from, joined, literal, rest, tools_from
from sharpen.types import Dialog, Json, Message, Preference, RowError, ToolCall, ToolSpec

SPEAKERS = {
    "system": "system developer",
    "user": "user human",
    "assistant": "assistant gpt chatgpt",
    "call": "function_call",
    "tool": "tool function observation function_response",
}
ROLES = {name: role for role, names in SPEAKERS.items() for name in names.split()}
HERMES_TOOLS = re.compile(r"<tools>(.*?)</tools>", re.S)
HERMES_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.S)
HERMES_RESULT = re.compile(r"<tool_response>(.*?)</tool_response>", re.S)
GLAIVE_TURN = re.compile(r"^\s*(USER|ASSISTANT|FUNCTION RESPONSE): ?", re.M)
GLAIVE_CALL = re.compile(r"<functioncall>\s*(.*)", re.S)
GLAIVE_ARGUMENTS = re.compile(r"""("arguments":\s*)'(.*)'(\s*\})""", re.S)


def messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise RowError("", "no messages")
    return tuple(message(m) for m in value)


def message(value: Json) -> Message:
    """`role` and `content`, or `from` and `value`."""
    speaker = value.get("role") or value.get("from")
    role: Any = ROLES.get(speaker)  # type: ignore[arg-type]
    if role is None:
        raise RowError("", f"unknown role {speaker!r}")
    content, calls = content_of(value.get("content", value.get("value")))
    if role == "call":
        found = literal(content)
        calls = [call_from(call) for call in (found if isinstance(found, list) else [found])]
        return Message("assistant", "", tuple(calls))
    if role == "tool":
        names = (value.get(key) or "" for key in ("name", "tool_call_id"))
        return Message("tool", content, (), (), *names)
    calls += [call_from(call) for call in value.get("tool_calls") or []]
    if value.get("function_call"):
        calls.append(call_from(value["function_call"]))
    return Message(role, content, tuple(calls))


def content_of(value: Any) -> tuple[str, list[ToolCall]]:
    """Text or a list of parts → the text and the calls in it; reasoning goes between think tags."""
    if value is None or isinstance(value, str):
        return value or "", []
    text, calls = "", []
    for part in value:
        body = part.get("text", part.get("value"))
        if part.get("type") == "tool_call":
            calls.append(call_from(body))
        elif not isinstance(body, str):
            raise RowError("", f"content part {part.get('type')!r} is not text")
        else:
            reasoning = part.get("type") == "reasoning"
            text += f"<think>\n{body}\n</think>\n\n" if reasoning else body
    return text, calls


def fields(row: Json, *known: str) -> Json:
    """What any chat row may have: tools, an id, and as metadata whatever has no other place."""
    metadata = rest(row, "tools", "functions", "id", "metadata", *known)
    return {
        "tools": tools_from(row.get("tools") or row.get("functions")),
        "id": str(row.get("id") or ""),
        "metadata": (row.get("metadata") or {}) | metadata,
    }


def is_openai(row: Json) -> bool:
    other = {"label", "chosen_response", "Annotator Metadata"}
    return "role" in row["messages"][0] and not other & set(row)


@importer(is_openai)
def openai(row: Json, where: str, side: None) -> Dialog:
    common, kind = fields(row, "messages", "task_type"), row.get("task_type") or ""
    return Dialog(messages(row["messages"]), task_type=kind, **common)


@importer(lambda row: "value" in row["conversations"][0] and not is_hermes(row))
def sharegpt(row: Json, where: str, side: None) -> Noun:
    turns = row["conversations"]
    for turn in turns:
        if not isinstance(turn.get("value", turn.get("content")), str):
            raise RowError(where, f"turn of {turn.get('from')!r} without text")
    first = [Message("system", row["system"])] if row.get("system") else []
    prompt = joined((*first, *map(message, turns)))
    common = fields(row, "conversations", "system", "chosen", "rejected")
    if "chosen" in row:
        chosen, rejected = ((message(row[key]),) for key in ("chosen", "rejected"))
        return Preference(prompt, chosen, rejected, **common)
    return Dialog(prompt, **common)


def is_alpaca(row: Json) -> bool:
    answered = "output" in row or "chosen" in row
    return answered and "**Available Tools**" not in row["instruction"] and "gold" not in row


@importer(is_alpaca)
def alpaca(row: Json, where: str, side: None) -> Noun:
    prompt = [Message("system", row["system"])] if row.get("system") else []
    for said, answered in row.get("history") or []:
        prompt += [Message("user", said), Message("assistant", answered)]
    request = "\n\n".join(t for t in (row["instruction"], row.get("input")) if t)
    prompt.append(Message("user", request))
    known = ("instruction", "input", "output", "system", "history", "chosen", "rejected")
    if "chosen" in row:
        chosen, rejected = ((Message("assistant", row[key]),) for key in ("chosen", "rejected"))
        return Preference(tuple(prompt), chosen, rejected, **fields(row, *known))
    return Dialog((*prompt, Message("assistant", row["output"])), **fields(row, *known))


def is_hermes(row: Json) -> bool:
    texts = [t.get("value", t.get("content")) for t in row.get("conversations") or row["messages"]]
    return any("<tools>" in t or "<tool_call>" in t for t in texts if isinstance(t, str))


@importer(is_hermes)
def hermes(row: Json, where: str, side: None) -> Dialog:
    """Tools, calls and results are text between tags."""
    common = fields(row, "conversations", "messages")
    tools, said = common["tools"], []
    pending: list[ToolCall] = []
    for turn in row.get("conversations") or row["messages"]:
        role: Any = ROLES.get(turn.get("from") or turn.get("role"))
        text = turn.get("value", turn.get("content"))
        if role in (None, "call"):
            raise RowError(where, f"unknown speaker {turn.get('from') or turn.get('role')!r}")
        if role == "tool" or (role == "user" and "<tool_response>" in text):
            said += hermes_results(text, pending)
        elif role == "assistant":
            pending = [call_from(body.strip()) for body in HERMES_CALL.findall(text)]
            text = HERMES_CALL.sub("", text)
            if "<tool_call>" in text:
                raise RowError(where, "a <tool_call> is not closed")
            said.append(Message("assistant", text.strip(), tuple(pending)))
        else:
            tools = tools or (hermes_tools(text) if role == "system" else ())
            said.append(Message(role, text))
    common["tools"] = tools
    return Dialog(tuple(said), **common)


def hermes_tools(text: str) -> tuple[ToolSpec, ...]:
    """The last non-empty tools block: a JSON list, or one JSON object a line."""
    blocks = [b.strip() for b in HERMES_TOOLS.findall(text) if b.strip().startswith(("[", "{"))]
    if not blocks:
        return ()
    try:
        found = literal(blocks[-1])
    except ValueError:
        found = [line for line in blocks[-1].splitlines() if line.strip()]
    return tools_from(found)


def hermes_results(text: str, pending: list[ToolCall]) -> Iterator[Message]:
    """One tool message a response; the name is written inside it, else it is the call's."""
    for body in HERMES_RESULT.findall(text) or [text]:
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            value = body.strip()
        name = pending.pop(0).name if pending else ""
        if isinstance(value, dict) and {"name", "content"} <= set(value):
            name, value = str(value["name"]), value["content"]
        yield Message("tool", as_text(value), name=name)


@importer(has("system", "chat"))
def glaive(row: Json, where: str, side: None) -> Dialog:
    """One `chat` text of turns with `<functioncall>` inside, function JSON in the `system` text."""
    said, name = [], ""
    _, *parts = GLAIVE_TURN.split(row["chat"])
    for speaker, body in zip(parts[::2], parts[1::2], strict=True):
        text = body.replace("<|endoftext|>", "").strip()
        if speaker == "FUNCTION RESPONSE":
            said.append(Message("tool", text, name=name))
        elif speaker == "ASSISTANT" and (match := GLAIVE_CALL.search(text)):
            # the arguments are JSON inside single quotes, so the whole is not JSON until unquoted
            call = call_from(GLAIVE_ARGUMENTS.sub(r"\1\2\3", match[1].strip()))
            said.append(Message("assistant", text[: match.start()].strip(), (call,)))
            name = call.name
        else:
            said.append(Message("user" if speaker == "USER" else "assistant", text))
    return Dialog(joined(said), tools_from(list(objects_in(row["system"]))))


def objects_in(text: str) -> Iterator[Any]:
    """Every JSON object that stands in the text, one after another."""
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        value, end = decoder.raw_decode(text, at)
        yield value
        at = text.find("{", end)
