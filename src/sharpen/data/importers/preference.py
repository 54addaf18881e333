"""TRL preference and KTO rows, plain or conversational, with or without the prompt written out."""

from __future__ import annotations

from typing import Any

from sharpen.data.importers import Importer, Rows
from sharpen.data.importers.openai import messages as chat
from sharpen.data.importers.shapes import tools_from
from sharpen.types import Dialog, Json, Message, Preference, RowError

SCORES = {"chosen_score": "score_chosen", "rejected_score": "score_rejected"}


def said(value: Any, role: Any, where: str) -> tuple[Message, ...]:
    """A text by `role`, one message, or a list of them."""
    if isinstance(value, str):
        return (Message(role, value),)
    return chat([value] if isinstance(value, dict) else value, where)


def convert(row: Json, where: str, side: None) -> Rows:
    chosen = said(row.get("chosen", row.get("chosen_messages")), "assistant", where)
    rejected = said(row.get("rejected", row.get("rejected_messages")), "assistant", where)
    prompt = said(row["prompt"], "user", where) if row.get("prompt") else ()
    if not prompt:  # both sides hold the whole dialog: what they share is the prompt
        pairs = zip(chosen, rejected, strict=False)
        shared = next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(map(len, (chosen, rejected)))
        )
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if not prompt or not chosen or not rejected:
        raise RowError(where, "chosen and rejected need a prompt and different continuations")
    known = {"prompt", "tools", "id", "metadata", *SCORES, *SCORES.values()}
    known |= {"chosen", "rejected", "chosen_messages", "rejected_messages"}
    yield Preference(
        prompt,
        chosen,
        rejected,
        tools_from(row.get("tools"), where),
        id=str(row.get("id") or ""),
        metadata=(row.get("metadata") or {}) | {k: v for k, v in row.items() if k not in known},
        **{key: row.get(key, row.get(other)) for key, other in SCORES.items()},
    )


def convert_kto(row: Json, where: str, side: None) -> Rows:
    """An unpaired verdict is a dialog whose `metadata.label` says whether it is good."""
    if not isinstance(row["label"], bool):
        raise RowError(where, f"label: expected true or false, found {row['label']!r}")
    if "messages" in row:
        messages = chat(row["messages"], where)
    else:
        prompt = said(row["prompt"], "user", where)
        messages = prompt + said(row["completion"], "assistant", where)
    known = ("messages", "prompt", "completion", "tools")
    metadata = {k: v for k, v in row.items() if k not in known}
    yield Dialog(messages, tools_from(row.get("tools"), where), metadata=metadata)


def detect(row: Json) -> bool:
    paired = {"chosen", "rejected"} <= set(row) or {"chosen_messages", "rejected_messages"} <= set(
        row
    )
    return paired and not {"instruction", "conversations"} & set(row)


def detect_kto(row: Json) -> bool:
    return isinstance(row["label"], bool) and ("messages" in row or "completion" in row)


IMPORTERS = (Importer("preference", detect, convert), Importer("kto", detect_kto, convert_kto))
