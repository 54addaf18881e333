"""Turns rows (`Datum`s) into the tensors of one micro-batch; called by the learner.

The tokens of a micro-batch are laid out in one of three ways:

- padded: one row per line, right-padded to the longest. No attention mask is needed: under causal
  attention a row's tokens cannot see the padding that comes after them.
- packed: all rows end to end in a single line; the attention keeps them apart.
- shared prompts: a single line that starts with each prompt that several rows share, once. The
  rest of every row follows, and rows that share nothing come last. This saves computing the prompt
  for each row.

A layout says for every row where each of its tokens lies in the flattened token array. Everything
else follows from that: which place predicts a trained token, which place is the token itself, and
to which row and weight it belongs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sharpen.train.batching import group_by_prompt, prompt_length
from sharpen.types import Datum

if TYPE_CHECKING:
    import torch

_LINE_MULTIPLE = 256  # a packed line is a multiple of this: fewer shapes, aligned matrices


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The tensors of one micro-batch: B lines of T tokens, N trained tokens in the order of the
    rows. Places are positions in the flattened [B * T] tokens."""

    tokens_B_T: torch.Tensor
    # The place whose hidden state predicts each trained token. The last token of a shared prompt
    # predicts the first token of several rows, so a place may occur more than once.
    predictor_place_N: torch.Tensor
    trained_place_N: torch.Tensor  # the place of each trained token itself
    targets_N: torch.Tensor  # the ids of the trained tokens
    row_N: torch.Tensor  # the row of the micro-batch that each trained token belongs to
    weight_N: torch.Tensor  # the weight of each trained token in the loss
    extra: dict[str, Any]  # further arguments of the decoder; empty for the padded layout
    columns: dict[str, torch.Tensor]  # the datums' columns, one value per trained token


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """Where the tokens of each row lie."""

    shape: tuple[int, int]  # of the token array: lines, tokens per line
    places_by_row: list[np.ndarray]  # for each row, the place of each of its tokens
    # For a single line: the lengths of its segments (shared prompts, then the rests of the rows in
    # the order in which they lie) and how many rows share each prompt. None: padded.
    segment_lengths: list[int] | None = None
    prompt_shared_by: Sequence[int] = ()


def collate(
    datums: Sequence[Datum], device: str, packed: bool = False, shares: bool = False
) -> Batch:
    """Build the micro-batch of these rows on `device`.

    `packed`: put the rows end to end. `shares`: put a prompt that several rows share only once,
    before them; this needs a single line too.
    """
    layout = _choose_layout(datums, packed, shares)
    flat_tokens = np.zeros(layout.shape[0] * layout.shape[1], np.int64)
    for datum, places in zip(datums, layout.places_by_row, strict=True):
        flat_tokens[places] = datum.ids

    # lists with one array per row, each with one entry per trained token of the row
    predictor_places = []
    trained_places = []
    row_numbers = []
    weights = []
    for row, datum in enumerate(datums):
        # The mask says of a token whether it is trained itself; the token before it makes the
        # prediction. The first token of a row has none before it and is never trained. So
        # `mask[1:]`, indexed from 0, marks the tokens whose next token is trained.
        predictor_offsets = np.flatnonzero(datum.mask[1:])
        places = layout.places_by_row[row]
        count = len(predictor_offsets)
        predictor_places.append(places[predictor_offsets])
        trained_places.append(places[predictor_offsets + 1])
        row_numbers.append(np.full(count, row))
        # a datum's weight is one number for all its trained tokens, or one per trained token
        weights.append(np.broadcast_to(datum.weight, count))
    trained_place_N = np.concatenate(trained_places)

    return Batch(
        tokens_B_T=_to_device(flat_tokens.reshape(layout.shape), device),
        predictor_place_N=_to_device(np.concatenate(predictor_places), device),
        trained_place_N=_to_device(trained_place_N, device),
        targets_N=_to_device(flat_tokens[trained_place_N], device),
        row_N=_to_device(np.concatenate(row_numbers), device),
        weight_N=_to_device(np.concatenate(weights).astype(np.float32), device),
        extra=_attention_arguments(layout, device),
        columns=_collate_columns(datums, device),
    )


def _collate_columns(datums: Sequence[Datum], device: str) -> dict[str, torch.Tensor]:
    """Join each column of the rows; a column already has one value per trained token."""
    columns = {}
    for name in datums[0].columns:
        values_N = np.concatenate([datum.columns[name] for datum in datums])
        columns[name] = _to_device(values_N.astype(np.float32), device)
    return columns


def _to_device(array: np.ndarray, device: str) -> torch.Tensor:
    """Return the array as a tensor on the device, without waiting for the copy."""
    import torch

    return torch.from_numpy(array).to(device, non_blocking=True)


# Layouts ---------------------------------------------------------------------------------------


def _choose_layout(datums: Sequence[Datum], packed: bool, shares: bool) -> _Layout:
    """Choose among padded, packed and shared prompts."""
    prompt_groups: list[list[int]] = []
    if shares:
        prompt_groups = [rows for rows in group_by_prompt(datums) if len(rows) > 1]
    if packed or prompt_groups:
        return _single_line_layout(datums, prompt_groups, packed)
    return _padded_layout(datums)


def _padded_layout(datums: Sequence[Datum]) -> _Layout:
    """One row per line, padded on the right to the longest row."""
    width = max(len(datum.ids) for datum in datums)
    places_by_row = []
    for row, datum in enumerate(datums):
        line_start = row * width
        places_by_row.append(np.arange(line_start, line_start + len(datum.ids)))
    return _Layout((len(datums), width), places_by_row)


def _single_line_layout(
    datums: Sequence[Datum], prompt_groups: Sequence[Sequence[int]], packed: bool
) -> _Layout:
    """All rows in one line: shared prompts first, then what is left of each row.

    `prompt_groups` are the rows of each shared prompt; a row in none of them lies there whole.
    """
    # the shared prompts, one after the other from the start of the line
    prompt_start_by_row = [0] * len(datums)
    prompt_length_by_row = [0] * len(datums)  # of the shared prompt; 0: the row shares none
    prompt_lengths = []
    line_length = 0
    for group in prompt_groups:
        length = prompt_length(datums[group[0]])
        for row in group:
            prompt_start_by_row[row] = line_length
            prompt_length_by_row[row] = length
        prompt_lengths.append(length)
        line_length += length

    # the rests of the rows, in the order in which they follow
    rest_lengths = []
    for datum, length in zip(datums, prompt_length_by_row, strict=True):
        rest_lengths.append(len(datum.ids) - length)
    rest_start_by_row = [0] * len(datums)
    order = _order_of_rests(rest_lengths, prompt_groups)
    for row in order:
        rest_start_by_row[row] = line_length
        line_length += rest_lengths[row]

    # a row's tokens: its shared prompt (empty if it has none), then its rest
    places_by_row = []
    for row in range(len(datums)):
        prompt_start = prompt_start_by_row[row]
        prompt_places = np.arange(prompt_start, prompt_start + prompt_length_by_row[row])
        rest_start = rest_start_by_row[row]
        rest_places = np.arange(rest_start, rest_start + rest_lengths[row])
        places_by_row.append(np.concatenate([prompt_places, rest_places]))

    if packed:
        line_length = -(-line_length // _LINE_MULTIPLE) * _LINE_MULTIPLE  # rounded up
    segment_lengths = prompt_lengths + [rest_lengths[row] for row in order]
    prompt_shared_by = [len(group) for group in prompt_groups]
    return _Layout((1, line_length), places_by_row, segment_lengths, prompt_shared_by)


def _order_of_rests(
    rest_lengths: Sequence[int], prompt_groups: Sequence[Sequence[int]]
) -> list[int]:
    """Return the row numbers in the order in which their rests lie in the line: the rows of each
    shared prompt, then rows without one."""
    order: list[int] = []
    for group in prompt_groups:
        # rests of equal length side by side need fewer calls on a CPU
        order += sorted(group, key=lambda row: rest_lengths[row])
    with_shared_prompt = set(order)
    order += [row for row in range(len(rest_lengths)) if row not in with_shared_prompt]
    return order


def _attention_arguments(layout: _Layout, device: str) -> dict[str, Any]:
    """Return what the attention needs to keep the rows of a single line apart; nothing for padded
    rows, which ordinary causal attention computes."""
    if layout.segment_lengths is None:
        return {}
    from sharpen.models.attention import packed_arguments

    # The position of a token in its own row; padding at the end of the line keeps 0. Rows that
    # share a prompt write the same values there.
    position_ids_T = np.zeros(layout.shape[1], np.int64)
    for places in layout.places_by_row:
        position_ids_T[places] = np.arange(len(places))
    return packed_arguments(layout.segment_lengths, position_ids_T, device, layout.prompt_shared_by)
