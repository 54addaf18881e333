"""ToolRL rows: tools listed in the instruction, the dialog so far as tagged text, and one answer
with `<think>`, `<tool_call>` (a JSON object a line) and `<response>`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from sharpen.data.importers import Importer
from sharpen.data.importers.shapes import as_text, call_from, joined, literal, parameters, unique
from sharpen.types import Dialog, Json, Message, RowError, ToolCall, ToolSpec

TOOL = re.compile(r"^\d+\. Name: (.+?)\nDescription: (.*?)\nParameters: (\{.*?\})$", re.M | re.S)
PART = re.compile(r"<(user|think|tool_call|obs|response)>(.*?)</\1>", re.S)


def calls_in(text: str, where: str) -> tuple[ToolCall, ...]:
    return tuple(call_from(line, where) for line in text.strip().splitlines() if line.strip())


def results(text: str, calls: tuple[ToolCall, ...]) -> Iterator[Message]:
    """One message a call where the observation has one part for each, else one for all."""
    try:
        value = literal(text)
    except ValueError:
        value = text
    if isinstance(value, list) and len(value) == len(calls):
        for call, part in zip(calls, value, strict=True):
            body = part.get("results", part) if isinstance(part, dict) else part
            yield Message("tool", as_text(body), name=call.name)
    else:
        yield Message("tool", text.strip(), name=calls[0].name if calls else "")


def turns(text: str, where: str) -> Iterator[Message]:
    calls: tuple[ToolCall, ...] = ()
    for tag, body in PART.findall(text):
        if tag == "user":
            yield Message("user", body.strip())
        elif tag == "think":
            yield Message("assistant", f"<think>\n{body.strip()}\n</think>")
        elif tag == "response":
            yield Message("assistant", body.strip())
        elif tag == "tool_call":
            calls = calls_in(body, where)
            yield Message("assistant", "", calls)
        else:
            yield from results(body, calls)


def convert(row: Json, where: str, side: Any) -> Iterator[Dialog]:
    head = row["instruction"].split("**Steps for Each Turn**")[0]
    tools = [
        ToolSpec(name.strip(), text.strip(), parameters(literal(fields)))
        for name, text, fields in TOOL.findall(head)
    ]
    answer = row["output"].strip()
    for tag in ("tool_call", "response"):  # some answers stop before the closing tag
        answer += f"</{tag}>" if answer.rfind(f"<{tag}>") > answer.rfind(f"</{tag}>") else ""
    said = list(turns(answer, where))
    if not any(m.tool_calls or "<think>" not in m.content for m in said):
        raise RowError(where, "the answer holds neither a call nor a response")
    system = Message("system", row["instruction"].split("\n", 1)[0])
    yield Dialog((system, *joined([*turns(row["input"], where), *said])), unique(tools, where))


def detect(row: Any) -> bool:
    return "**Available Tools**" in row["instruction"] and "output" in row


IMPORTERS = (Importer("toolrl", "tagged tool dialogs", detect, convert),)
