"""Alpaca rows: instruction, input, output, with optional `system` and `history`; with `chosen` and
`rejected` they are preference pairs."""

from __future__ import annotations

from sharpen.data.importers import Importer, Rows
from sharpen.types import Dialog, Json, Message, Preference

KNOWN = ("instruction", "input", "output", "system", "history", "chosen", "rejected")


def convert(row: Json, where: str, side: None) -> Rows:
    messages = [Message("system", row["system"])] if row.get("system") else []
    for said, answered in row.get("history") or []:
        messages += [Message("user", said), Message("assistant", answered)]
    request = "\n\n".join(t for t in (row["instruction"], row.get("input")) if t)
    messages.append(Message("user", request))
    rest = {k: v for k, v in row.items() if k not in KNOWN}
    if "chosen" in row:
        chosen, rejected = ((Message("assistant", row[key]),) for key in ("chosen", "rejected"))
        yield Preference(tuple(messages), chosen, rejected, metadata=rest)
    else:
        yield Dialog((*messages, Message("assistant", row["output"])), metadata=rest)


def detect(row: Json) -> bool:
    answered = "output" in row or "chosen" in row
    return answered and "**Available Tools**" not in row["instruction"] and "gold" not in row


IMPORTERS = (Importer("alpaca", detect, convert),)
