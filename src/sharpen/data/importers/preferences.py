"""Imports preference data: pairs of answers (DPO, UltraFeedback, Themis) and single verdicts (KTO).

Pairs in ShareGPT or Alpaca rows are read in `chat`, those of When2Call in `question_tasks`.
"""

from __future__ import annotations

from sharpen.data.importers.chat import chat_fields, messages_from
from sharpen.data.importers.common import Importer, has, require
from sharpen.types import Dialog, Json, Preference

_PAIR_FIELDS = (("chosen", "rejected"), ("chosen_messages", "rejected_messages"))
_SCORE_FIELDS = {"chosen_score": "score_chosen", "rejected_score": "score_rejected"}
_THEMIS_TRACES = ("actions", "score_agent")


def _is_preference(row: Json) -> bool:
    if "instruction" in row or "conversations" in row:
        return False
    return any(set(pair) <= set(row) for pair in _PAIR_FIELDS)


@Importer(_is_preference)
def preference(row: Json) -> Preference:
    """Pairs as TRL and UltraFeedback write them: `chosen` and `rejected`, with or without a
    `prompt`."""
    chosen_field, rejected_field = _PAIR_FIELDS[0]
    other_chosen_field, other_rejected_field = _PAIR_FIELDS[1]
    if chosen_field not in row and other_chosen_field in row:
        chosen_field = other_chosen_field
        rejected_field = other_rejected_field
    chosen = messages_from(row[chosen_field], "assistant")
    rejected = messages_from(row[rejected_field], "assistant")
    if row.get("prompt"):
        prompt = messages_from(row["prompt"], "user")
    else:  # both sides hold the whole dialog: what they share is the prompt
        shared = 0
        while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
            shared += 1
        prompt = chosen[:shared]
        chosen = chosen[shared:]
        rejected = rejected[shared:]
    complete = prompt and chosen and rejected
    require(complete, "chosen and rejected need a prompt and different continuations")
    scores = {}
    for field, other_name in _SCORE_FIELDS.items():
        scores[field] = row.get(field, row.get(other_name))
    known = (*_SCORE_FIELDS, *_SCORE_FIELDS.values(), *_PAIR_FIELDS[0], *_PAIR_FIELDS[1])
    return Preference(prompt, chosen, rejected, **scores, **chat_fields(row, "prompt", *known))


@Importer(lambda row: isinstance(row["label"], bool) and {"messages", "completion"} & set(row))
def kto(row: Json) -> Dialog:
    """KTO rows: a dialog whose `label`, kept in the metadata, says whether it is good."""
    label = row["label"]
    require(isinstance(label, bool), f"label: expected true or false, found {label!r}")
    if "messages" in row:
        messages = messages_from(row["messages"])
    else:
        messages = messages_from(row["prompt"], "user")
        messages += messages_from(row["completion"], "assistant")
    return Dialog(messages, **chat_fields(row, "messages", "prompt", "completion"))


@Importer(has("pos_answer neg_answer"))
def themis(row: Json) -> Preference:
    """Themis/TARA rows: `pos_answer` and `neg_answer`, whose tool traces become metadata."""
    chosen = row["pos_answer"]
    rejected = row["neg_answer"]
    metadata = {}
    for name in _THEMIS_TRACES:
        metadata[f"chosen_{name}"] = chosen.get(name)
    for name in _THEMIS_TRACES:
        metadata[f"rejected_{name}"] = rejected.get(name)
    return Preference(
        chosen=messages_from(chosen["answer"], "assistant"),
        rejected=messages_from(rejected["answer"], "assistant"),
        chosen_score=float(chosen["score"]),
        rejected_score=float(rejected["score"]),
        prompt=messages_from(row["question"], "user"),
        id=row["id"],
        metadata=metadata,
    )
