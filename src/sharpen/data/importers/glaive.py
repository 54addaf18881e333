"""Glaive function-calling v2: a `system` text with function JSON, and one `chat` text of USER,
ASSISTANT and FUNCTION RESPONSE turns with `<functioncall>` inside."""

from __future__ import annotations

import json
import re

from sharpen.data.importers import Importer, Rows, has
from sharpen.data.importers.shapes import call_from, joined, tools_from
from sharpen.types import Dialog, Json, Message, RowError

TURN = re.compile(r"^\s*(USER|ASSISTANT|FUNCTION RESPONSE): ?", re.M)
CALL = re.compile(r"<functioncall>\s*(.*)", re.S)
ARGUMENTS = re.compile(r"""("arguments":\s*)'(.*)'(\s*\})""", re.S)


def functions(text: str) -> list[Json]:
    """Every JSON object that stands in the text, one after another."""
    decoder, found, at = json.JSONDecoder(), [], text.find("{")
    while at >= 0:
        value, end = decoder.raw_decode(text, at)
        found.append(value)
        at = text.find("{", end)
    return found


def convert(row: Json, where: str, side: None) -> Rows:
    messages, name = [], ""
    parts = TURN.split(row["chat"])
    for speaker, body in zip(parts[1::2], parts[2::2], strict=True):
        text = body.replace("<|endoftext|>", "").strip()
        if speaker == "USER":
            messages.append(Message("user", text))
        elif speaker == "FUNCTION RESPONSE":
            messages.append(Message("tool", text, name=name))
        elif match := CALL.search(text):
            # the arguments are JSON inside single quotes, so the whole is not JSON until unquoted
            call = call_from(ARGUMENTS.sub(r"\1\2\3", match[1].strip()), where)
            messages.append(Message("assistant", text[: match.start()].strip(), (call,)))
            name = call.name
        else:
            messages.append(Message("assistant", text))
    if not messages:
        raise RowError(where, "chat: no USER or ASSISTANT turn")
    tools = tools_from(functions(row["system"]), where)
    yield Dialog(joined(messages), tools, metadata={})


IMPORTERS = (Importer("glaive", has("system", "chat"), convert),)
