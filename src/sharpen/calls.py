"""The text form of tool calls: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

The only place that writes and reads it. Called by the renderer, the policies and the rewards.
"""

from __future__ import annotations

import json
import re
from typing import Any

from sharpen.types import Message, RowError, ToolCall, UnparsedToolCall

OPEN_CALL = "<tool_call>"
CLOSE_CALL = "</tool_call>"
_MAX_BROKEN = 1000  # each broken call costs a scan of the text; after so many, the rest stays text
_BLANK = re.compile(r"\s*")
_FAILURE_STATUSES = ("error", "failed", "failure")


def compact_json(value: Any) -> str:
    """Returns JSON without spaces: a sixth fewer tokens to read and to sample."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def assistant_text(message: Message, where: str) -> str:
    """Returns content and calls as the assistant writes them; a broken call stays as it was."""
    call_texts: list[str] = []
    try:
        for call in message.tool_calls:
            call_texts.append(compact_json({"name": call.name, "arguments": call.arguments}))
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(where, f"tool call arguments are not JSON: {error}") from None
    call_texts += [broken.raw for broken in message.unparsed]
    lines = [f"{OPEN_CALL}{text}{CLOSE_CALL}" for text in call_texts]
    if message.content:
        lines.insert(0, message.content)
    return "\n".join(lines)


def parse_message(text: str) -> Message:
    """Split assistant text into content and calls. A broken call is kept as an unparsed one."""
    calls: list[ToolCall] = []
    unparsed: list[UnparsedToolCall] = []
    content: list[str] = []
    position = 0
    while len(unparsed) < _MAX_BROKEN:
        start = text.find(OPEN_CALL, position)
        if start < 0:
            break
        before = text[position:start]
        is_first = not calls and not unparsed
        # `assistant_text` writes one line break before the first call; the rest is content.
        content.append(before.removesuffix("\n") if is_first else before.strip("\n"))
        call, position = _parse_call(text, start + len(OPEN_CALL))
        if isinstance(call, ToolCall):
            calls.append(call)
        else:
            unparsed.append(call)
    rest = text[position:]
    if calls or unparsed:
        rest = rest.strip("\n")
    content.append(rest)
    joined = "\n".join(piece for piece in content if piece)
    return Message("assistant", joined, tuple(calls), tuple(unparsed))


def _parse_call(text: str, start: int) -> tuple[ToolCall | UnparsedToolCall, int]:
    """Returns the call whose JSON begins at `start`, and the position after its closing tag."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, _skip_blank(text, start))
        end = _skip_blank(text, end)
        if text.startswith(CLOSE_CALL, end):
            call = _as_call(value)
            if isinstance(call, ToolCall):
                return call, end + len(CLOSE_CALL)
            reason = call
        else:
            reason = f"no {CLOSE_CALL} behind the JSON"
    except RecursionError:
        reason = "too deep"
    except json.JSONDecodeError as error:
        reason = f"not JSON: {error.msg}"
    except ValueError:  # Python refuses integers of more than 4,300 digits
        reason = "not JSON: number too long"
    # The broken text ends at its closing tag, or where the next call opens: that one still counts.
    next_open = text.find(OPEN_CALL, start)
    end = next_open if next_open >= 0 else len(text)
    close = text.find(CLOSE_CALL, start, end)
    if close < 0:
        return UnparsedToolCall(text[start:end], reason), end
    return UnparsedToolCall(text[start:close], reason), close + len(CLOSE_CALL)


def _as_call(value: Any) -> ToolCall | str:
    """Turn `{"name": …, "arguments": {…}}` into a call, or return what is wrong with it."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return "no name"
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):  # some models write the object as JSON text
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return "arguments are text that is not JSON"
    if not isinstance(arguments, dict):
        return f"arguments are {type(arguments).__name__}, not an object"
    return ToolCall(value["name"], arguments)


def reports_failure(message: Message) -> bool:
    """Returns whether a tool message says that its call failed."""
    if message.role != "tool":
        return False
    text = message.content.lstrip()
    if not text.startswith("{"):
        return text.lower().startswith(("error", "traceback"))
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if value.get("error") or value.get("exception"):
        return True
    status = str(value.get("status", "")).lower()
    return status in _FAILURE_STATUSES or value.get("success") is False


def _skip_blank(text: str, position: int) -> int:
    match = _BLANK.match(text, position)
    return match.end() if match else position
