"""The text form of tool calls, `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: written and
read here only; and what an answer says of its call."""

from __future__ import annotations

import json
import re
from typing import Any

from sharpen.types import Message, RowError, ToolCall, UnparsedToolCall

OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
MAX_BROKEN = 1000  # each costs a scan of the text before it; what follows them stays text
BLANK = re.compile(r"\s*")


def compact_json(value: Any) -> str:
    """JSON without blanks: a sixth fewer tokens to read and to sample."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def assistant_text(message: Message, where: str) -> str:
    """Content and calls as the assistant writes them; a broken call is written as it was."""
    try:
        calls = [{"name": c.name, "arguments": c.arguments} for c in message.tool_calls]
        written = list(map(compact_json, calls))
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(where, f"tool call arguments are not JSON: {error}") from None
    written += [bad.raw for bad in message.unparsed]
    lines = [f"{OPEN_CALL}{text}{CLOSE_CALL}" for text in written]
    return "\n".join([message.content, *lines] if message.content else lines)


def parse_message(text: str) -> Message:
    """Assistant text → content and calls. A call that is broken is kept as what it is."""
    calls: list[ToolCall] = []
    unparsed: list[UnparsedToolCall] = []
    content: list[str] = []
    position = 0
    while (start := text.find(OPEN_CALL, position)) >= 0 and len(unparsed) < MAX_BROKEN:
        before = text[position:start]
        content.append(before.strip("\n") if calls or unparsed else before.removesuffix("\n"))
        call, position = parse_call(text, start + len(OPEN_CALL))
        (calls if isinstance(call, ToolCall) else unparsed).append(call)  # type: ignore[arg-type]
    rest = text[position:]
    content.append(rest if not calls and not unparsed else rest.strip("\n"))
    return Message("assistant", "\n".join(c for c in content if c), tuple(calls), tuple(unparsed))


def parse_call(text: str, start: int) -> tuple[ToolCall | UnparsedToolCall, int]:
    """The call whose text begins at `start`, and where what follows it begins."""
    try:
        begin = skip_blank(text, start)
        value, end = json.JSONDecoder().raw_decode(text, begin)
        end = skip_blank(text, end)
        if not text.startswith(CLOSE_CALL, end):
            reason = f"no {CLOSE_CALL} behind the JSON"
        elif isinstance(call := as_call(value), ToolCall):
            return call, end + len(CLOSE_CALL)
        else:
            reason = call
    except (ValueError, RecursionError) as error:  # ValueError alone: a number of 5,000 digits
        deep = isinstance(error, RecursionError)
        reason = "too deep" if deep else f"not JSON: {getattr(error, 'msg', 'number too long')}"
    other = text.find(OPEN_CALL, start)
    end = other if other >= 0 else len(text)
    close = text.find(CLOSE_CALL, start, end)
    if close < 0:  # never closed: the next call, if any, still counts
        return UnparsedToolCall(text[start:end], reason), end
    return UnparsedToolCall(text[start:close], reason), close + len(CLOSE_CALL)


def as_call(value: Any) -> ToolCall | str:
    """`{"name": …, "arguments": {…}}` → a call, or what is wrong with it."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return "no name"
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):  # some models quote the object once more
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return "arguments are text that is not JSON"
    if not isinstance(arguments, dict):
        return f"arguments are {type(arguments).__name__}, not an object"
    return ToolCall(value["name"], arguments)


def failed(message: Message) -> bool:
    """Does a tool's answer say that the call failed?"""
    text = message.content.lstrip()
    if message.role != "tool" or not text.startswith("{"):
        return message.role == "tool" and text.lower().startswith(("error", "traceback"))
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    status = str(value.get("status", "")).lower()
    wrong = value.get("error") or value.get("exception") or status in ("error", "failed", "failure")
    return bool(wrong) or value.get("success") is False


def skip_blank(text: str, position: int) -> int:
    found = BLANK.match(text, position)
    return found.end() if found else position
