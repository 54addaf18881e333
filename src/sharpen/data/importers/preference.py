"""Preferences: TRL pairs, plain or conversational, with or without the prompt written out; KTO
verdicts; Themis (TARA) pairs with the tool traces that tell them apart."""

from __future__ import annotations

from typing import Any

from sharpen.data.importers import has, importer
from sharpen.data.importers.chat import fields, messages
from sharpen.types import Dialog, Json, Message, Preference, RowError

SCORES = {"chosen_score": "score_chosen", "rejected_score": "score_rejected"}
PAIRS = (("chosen", "rejected"), ("chosen_messages", "rejected_messages"))
KNOWN = ("prompt", *SCORES, *SCORES.values(), *PAIRS[0], *PAIRS[1])


def said(value: Any, role: Any) -> tuple[Message, ...]:
    """A text by `role`, one message, or a list of them."""
    if isinstance(value, str):
        return (Message(role, value),)
    return messages([value] if isinstance(value, dict) else value)


def is_preference(row: Json) -> bool:
    other = {"instruction", "conversations"}
    return any(set(pair) <= set(row) for pair in PAIRS) and not other & set(row)


@importer(is_preference)
def preference(row: Json, where: str, side: None) -> Preference:
    keys = next((pair for pair in PAIRS if pair[0] in row), PAIRS[0])
    chosen, rejected = (said(row[key], "assistant") for key in keys)
    prompt = said(row["prompt"], "user") if row.get("prompt") else ()
    if not prompt:  # both sides hold the whole dialog: what they share is the prompt
        both = list(zip(chosen, rejected, strict=False))
        shared = next((i for i, (a, b) in enumerate(both) if a != b), len(both))
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if not prompt or not chosen or not rejected:
        raise RowError(where, "chosen and rejected need a prompt and different continuations")
    scores = {key: row.get(key, row.get(other)) for key, other in SCORES.items()}
    return Preference(prompt, chosen, rejected, **scores, **fields(row, *KNOWN))


@importer(lambda row: isinstance(row["label"], bool) and {"messages", "completion"} & set(row))
def kto(row: Json, where: str, side: None) -> Dialog:
    """An unpaired verdict is a dialog whose `metadata.label` says whether it is good."""
    if not isinstance(row["label"], bool):
        raise RowError(where, f"label: expected true or false, found {row['label']!r}")
    if "messages" in row:
        dialog = messages(row["messages"])
    else:
        dialog = said(row["prompt"], "user") + said(row["completion"], "assistant")
    return Dialog(dialog, **fields(row, "messages", "prompt", "completion"))


@importer(has("pos_answer", "neg_answer"))
def themis(row: Json, where: str, side: None) -> Preference:
    sides = {"chosen": row["pos_answer"], "rejected": row["neg_answer"]}
    kept = [(name, key) for name in sides for key in ("actions", "score_agent")]
    traces: Json = {f"{name}_{key}": sides[name].get(key) for name, key in kept}
    prompt = (Message("user", row["question"]),)
    chosen, rejected = ((Message("assistant", answer["answer"]),) for answer in sides.values())
    good, bad = (float(answer["score"]) for answer in sides.values())
    return Preference(prompt, chosen, rejected, (), row["id"], good, bad, metadata=traces)
