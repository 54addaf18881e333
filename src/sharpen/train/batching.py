"""Which rows a step takes and how they are cut into micro-batches: pure functions of seed and step.

Because the order is computed and not consumed, a resumed run needs no saved position to see the
same rows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sharpen.types import Datum

SHORT_NAMES = {
    "planning": "multi_step_planning",
    "timing": "timing_decision",
    "retrieval": "tool_retrieval",
    "selection": "tool_selection",
}


def epoch_order(
    task_types: Sequence[str], seed: int, epoch: int, weights: Mapping[str, float] | None = None
) -> list[int]:
    """One epoch's rows in random order; with weights, each task type fills its share of the epoch.

    A type with fewer rows than its share is repeated, one with more is sampled; rows of types
    without a weight keep their own share of the rows.
    """
    chance = random.Random(f"{seed}:{epoch}")
    by_type: dict[str, list[int]] = {}
    for index, name in enumerate(task_types):
        by_type.setdefault(SHORT_NAMES.get(name, name), []).append(index)
    wanted = {SHORT_NAMES.get(name, name): weight for name, weight in (weights or {}).items()}
    named = {name: weight for name, weight in wanted.items() if weight > 0 and name in by_type}
    if not named:
        order = list(range(len(task_types)))
        chance.shuffle(order)
        return order
    others = [i for name, rows in by_type.items() if name not in wanted for i in rows]
    room = len(task_types) - len(others)
    order = list(others)
    for name, share in shares({n: w / sum(named.values()) for n, w in named.items()}, room).items():
        rows = by_type[name][:]
        chance.shuffle(rows)
        order += (rows * math.ceil(share / len(rows)))[:share]
    chance.shuffle(order)
    return order


def shares(fractions: Mapping[str, float], total: int) -> dict[str, int]:
    """Whole numbers in these proportions that add up to `total` (largest remainder)."""
    counts = {name: int(fraction * total) for name, fraction in fractions.items()}
    rest = sorted(fractions, key=lambda n: (counts[n] - fractions[n] * total, n))
    for name in rest[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


def micro_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Rows of like length together, each micro-batch at most `token_budget` padded tokens (or one
    row)."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        last = batches[-1] if batches else []
        if last and lengths[last[0]] * (len(last) + 1) <= token_budget:
            last.append(index)
        else:
            batches.append([index])
    return batches


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Right-padded rows. No attention mask: under a causal mask padding behind a row cannot reach
    it."""

    tokens_B_T: Any
    at_N: Any  # flat positions whose next token is trained
    targets_N: Any
    row_N: Any  # which row of the batch each trained token belongs to
    weight_N: Any


def collate(datums: Sequence[Datum], device: str) -> Batch:
    import torch

    width = max(len(d.ids) for d in datums)
    tokens_B_T = np.zeros((len(datums), width), np.int64)
    for row, datum in enumerate(datums):
        tokens_B_T[row, : len(datum.ids)] = datum.ids
    # the first token of a row has nothing before it that could predict it
    rows = [np.flatnonzero(d.mask[1:]) for d in datums]
    at_N = np.concatenate([row * width + found for row, found in enumerate(rows)])
    row_N = np.repeat(np.arange(len(datums)), [len(found) for found in rows])
    weight_N = np.array([d.weight for d in datums], np.float32)[row_N]
    moved = (torch.from_numpy(a).to(device) for a in (tokens_B_T, at_N, row_N, weight_N))
    tokens, at, row, weight = moved
    return Batch(tokens, at, tokens.flatten()[at + 1], row, weight)


def trained_tokens(datum: Datum) -> int:
    return int(datum.mask[1:].sum())
