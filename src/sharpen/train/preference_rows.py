"""Preferences → training rows: the two sides of each pair as ids with a loss mask. DPO and pair
sampling call it.

A pair that was sampled carries its ids in its metadata, and trains on exactly those as long as the
tokenizer is the one that they were sampled with; any other pair is rendered from its messages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sharpen.render import Renderer
from sharpen.rewards.learned import turn_ends
from sharpen.types import Datum, Dialog, Json, Preference, RowError, SharpenError

PairRow = list[Datum]  # chosen and rejected; for KTO then both sides of another pair
_SIDES = ("chosen", "rejected")
_MAX_NAMED_ROWS = 5  # in a message


def pair_rows(pairs: Sequence[Preference], renderer: Renderer) -> list[PairRow]:
    """Returns chosen and rejected of each pair; only what the assistant says in the answer carries
    loss. A pair's id says where it stands."""
    tokenizer = tokenizer_hash(renderer.tokenizer)
    has_own_ids = [_is_sampled_with(pair, tokenizer) for pair in pairs]
    others = sum(bool(pair.metadata.get("sampled")) for pair in pairs) - sum(has_own_ids)
    if others:
        print(f"{others} pairs were sampled with another tokenizer: their messages are rendered")
    to_render = [pair for pair, own in zip(pairs, has_own_ids, strict=True) if not own]
    rendered = renderer.render(_side_dialogs(to_render))
    rows = []
    for pair, own in zip(pairs, has_own_ids, strict=True):
        if own:
            ids_of_side = pair.metadata["sampled"]
            row = [_ids_from_row(ids_of_side.get(side), pair.id) for side in _SIDES]
        else:
            row = [_keep_answer(next(rendered), pair, side) for side in _SIDES]
        if np.array_equal(row[0].ids, row[1].ids):
            raise RowError(pair.id, "chosen and rejected are the same")
        rows.append(row)
    return rows


def _is_sampled_with(pair: Preference, tokenizer: str) -> bool:
    """Whether a pair carries ids of this tokenizer."""
    sampled = pair.metadata.get("sampled")
    return isinstance(sampled, dict) and sampled.get("tokenizer") == tokenizer


def _side_dialogs(pairs: Sequence[Preference]) -> Iterator[Dialog]:
    for pair in pairs:
        yield Dialog(pair.prompt + pair.chosen, pair.tools, pair.id)
        yield Dialog(pair.prompt + pair.rejected, pair.tools, pair.id)


def _keep_answer(datum: Datum, pair: Preference, side: str) -> Datum:
    """The row without loss on what the assistant said in the prompt."""
    turns_before = sum(message.role == "assistant" for message in pair.prompt)
    ends = turn_ends(datum)
    if len(ends) <= turns_before:
        raise RowError(pair.id, f"{side}: expected a turn of the assistant")
    mask = datum.mask.copy()
    if turns_before:
        mask[: ends[turns_before - 1] + 1] = False
    return replace(datum, mask=mask)


def ids_to_row(datum: Datum) -> Json:
    """Returns the ids of an answer and the spans of its turns, as they lie in a pair's metadata."""
    is_start = datum.mask & ~np.append(False, datum.mask[:-1])
    starts = np.flatnonzero(is_start)
    spans = np.stack([starts, turn_ends(datum) + 1], 1)
    return {"ids": datum.ids.tolist(), "turns": spans.tolist()}


def _ids_from_row(row: Any, where: str) -> Datum:
    """The opposite of `ids_to_row`."""
    try:
        ids = np.array(row["ids"], np.int32)
        mask = np.zeros(len(ids), bool)
        for start, end in row["turns"]:
            if not 0 < start < end <= len(ids):
                raise ValueError
            mask[start:end] = True
        if not mask.any() or ids.min() < 0:
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError):
        raise RowError(where, "metadata.sampled: expected ids and the spans of turns") from None
    return Datum(ids, mask, where)


def tokenizer_hash(tokenizer: Any) -> str:
    """Returns a name for what the ids of a tokenizer mean."""
    words = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def fitting_rows(rows: Sequence[PairRow], max_length: int, source: str) -> list[PairRow]:
    """Returns the pairs within `max_length` tokens; longer ones are named and left out, never
    cut."""
    fitting = []
    too_long = []
    for row in rows:
        if max(len(side.ids) for side in row) <= max_length:
            fitting.append(row)
        else:
            too_long.append(row)
    for row in too_long[:_MAX_NAMED_ROWS]:
        lengths = " and ".join(str(len(side.ids)) for side in row)
        print(f"{row[0].id}: {lengths} tokens, over max_length ({max_length}): left out")
    count = len(too_long)
    if not fitting:
        over = f", {count} over max_length {max_length}" if count else ""
        raise SharpenError(f"{source}: no pair to train on (of {len(rows)}{over})")
    if count > _MAX_NAMED_ROWS:
        print(f"{source}: {count} of {len(rows)} pairs left out, over max_length ({max_length})")
    return fitting


def add_answers_of_other_pairs(rows: Sequence[PairRow], source: str) -> list[PairRow]:
    """Returns each pair with the answers of the pair before it after its own prompt, for KTO."""
    if len(rows) < 2:
        raise SharpenError(f"{source}: kto compares each pair with another; there is only one")
    extended = []
    for number, row in enumerate(rows):
        other_answers = [_after_prompt(row[0], answer) for answer in rows[number - 1]]
        extended.append([*row, *other_answers])
    return extended


def _after_prompt(datum: Datum, other: Datum) -> Datum:
    """The other row's answer after this row's prompt."""
    start = int(datum.mask.argmax())
    other_start = int(other.mask.argmax())
    ids = np.concatenate([datum.ids[:start], other.ids[other_start:]])
    mask = np.concatenate([datum.mask[:start], other.mask[other_start:]])
    return Datum(ids, mask, datum.id)
