"""Which rows a step takes and how they are cut into micro-batches: pure functions of seed and step.

Because the order is computed and not consumed, a resumed run needs no saved position to see the
same rows.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sharpen.types import Datum

ROUND = 256  # a packed line is a multiple of this long: fewer shapes, aligned matrices
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


def micro_batches(
    lengths: Sequence[int], token_budget: int, packed: bool = False, parts: int = 1
) -> list[list[int]]:
    """Rows cut into micro-batches of at most `token_budget` tokens (or one row), a multiple of
    `parts` of them; where rows are too few, some are empty.

    Packed rows lie end to end and are dealt out evenly; padded ones are put with their like.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches = even_bins(lengths, order, token_budget) if packed else []
    if not packed:
        for index in order:
            last = batches[-1] if batches else []
            if last and lengths[last[0]] * (len(last) + 1) <= token_budget:
                last.append(index)
            else:
                batches.append([index])
    while len(batches) % parts:
        largest = max(batches, key=len)
        middle = (len(largest) + 1) // 2
        batches.append(largest[middle:])
        del largest[middle:]
    return batches


def even_bins(lengths: Sequence[int], order: Sequence[int], budget: int) -> list[list[int]]:
    """As few bins as hold the rows, all nearly equally full: the longest row left goes into the
    emptiest bin."""
    count = math.ceil(sum(lengths) / budget)
    while True:
        bins: list[list[int]] = [[] for _ in range(count)]
        heap = [(0, number) for number in range(count)]
        for index in order:
            full, number = heapq.heappop(heap)
            bins[number].append(index)
            heapq.heappush(heap, (full + lengths[index], number))
        if all(len(b) <= 1 or sum(lengths[i] for i in b) <= budget for b in bins):
            return [b for b in bins if b]
        count += 1


def shared_trees(datums: Sequence[Datum], token_budget: float = math.inf) -> list[list[int]]:
    """Rows by number: those together that have one prompt, where computing it once saves an eighth
    of their tokens and they fit into the budget; else each alone."""
    trees: dict[bytes, list[tuple[int, list[int]]]] = {}
    for number, datum in enumerate(datums):
        prompt, length = prompt_length(datum), len(datum.ids)
        alike = trees.setdefault(datum.ids[:prompt].tobytes(), [])
        if alike and alike[-1][0] + length - prompt <= token_budget:
            before, tree = alike.pop()
            alike.append((before + length - prompt, [*tree, number]))
        else:
            alike.append((length, [number]))
    found: list[list[int]] = []
    for length, tree in (tree for alike in trees.values() for tree in alike):
        saved = (len(tree) - 1) * prompt_length(datums[tree[0]])
        found += [tree] if 7 * saved >= length else [[number] for number in tree]
    return sorted(found)


def prompt_length(datum: Datum) -> int:
    """How many tokens lie before the first trained one."""
    return int(datum.mask[1:].argmax()) + 1 if datum.mask[1:].any() else 0


def tree_length(datums: Sequence[Datum], tree: Sequence[int]) -> int:
    repeated = (len(tree) - 1) * prompt_length(datums[tree[0]])
    return sum(len(datums[i].ids) for i in tree) - repeated


def row_batches(
    datums: Sequence[Datum], token_budget: int, packed: bool, parts: int, shares: bool
) -> list[list[int]]:
    """Micro-batches of rows, those of a shared prompt in one of them."""
    alone = [[number] for number in range(len(datums))]
    trees = shared_trees(datums, token_budget) if shares else alone
    lengths = [tree_length(datums, tree) for tree in trees]
    batches = micro_batches(lengths, token_budget, packed, parts)
    return [[row for number in batch for row in trees[number]] for batch in batches]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows of tokens: right-padded without a mask (under a causal mask padding behind a row cannot
    reach it), or laid end to end in one line, with `extra` for the attention."""

    tokens_B_T: Any
    at_N: Any  # flat positions that foretell a trained token; a shared prompt's end does several
    own_N: Any  # flat positions of the trained tokens themselves
    targets_N: Any
    row_N: Any  # which row of the batch each trained token belongs to
    weight_N: Any
    extra: dict[str, Any]
    columns: dict[str, Any]  # the datums' own, one value a trained token


def collate(
    datums: Sequence[Datum], device: str, packed: bool = False, shares: bool = False
) -> Batch:
    """With `shares`, a prompt of several rows lies once before all rows."""
    import torch

    lengths_R = np.array([len(d.ids) for d in datums])
    trees = [tree for tree in shared_trees(datums) if len(tree) > 1] if shares else []
    prompts = [prompt_length(datums[tree[0]]) for tree in trees]
    before_R, prompt_R = np.zeros((2, len(datums)), np.int64)  # where a row's shared prompt lies
    for tree, end, prompt in zip(trees, np.cumsum(prompts), prompts, strict=True):
        before_R[tree], prompt_R[tree] = end - prompt, prompt
    rest_R, line = lengths_R - prompt_R, packed or bool(trees)
    # rests of one length side by side are fewer calls on a CPU
    order = [i for tree in trees for i in sorted(tree, key=lambda i: rest_R[i])]
    order += [i for i in range(len(datums)) if not prompt_R[i]]
    if line:
        start_R = np.empty_like(rest_R)
        start_R[order] = sum(prompts) + np.cumsum(rest_R[order]) - rest_R[order]
        full = sum(prompts) + int(rest_R.sum())
        tokens = np.zeros((1, -(-full // ROUND) * ROUND if packed else full), np.int64)
    else:
        start_R = np.arange(len(datums)) * max(lengths_R)
        tokens = np.zeros((len(datums), max(lengths_R)), np.int64)
    flat, positions_T = tokens.reshape(-1), np.zeros(tokens.size, np.int64)
    ranges = zip(before_R, before_R + prompt_R, start_R, start_R + rest_R, strict=True)
    places = [np.concatenate([np.arange(a, b), np.arange(c, d)]) for a, b, c, d in ranges]
    for place, datum in zip(places, datums, strict=True):
        flat[place], positions_T[place] = datum.ids, np.arange(len(place))
    # the first token of a row has nothing before it that could predict it
    rows = [np.flatnonzero(d.mask[1:]) for d in datums]
    at_N = np.concatenate([place[found] for place, found in zip(places, rows, strict=True)])
    own_N = np.concatenate([place[found + 1] for place, found in zip(places, rows, strict=True)])
    row_N = np.repeat(np.arange(len(datums)), [len(found) for found in rows])
    weights = [np.broadcast_to(d.weight, len(f)) for d, f in zip(datums, rows, strict=True)]
    weight_N = np.concatenate(weights).astype(np.float32)
    arrays = (tokens, at_N, own_N, flat[own_N], row_N, weight_N)
    moved: list[Any] = [torch.from_numpy(a).to(device, non_blocking=True) for a in arrays]
    columns: dict[str, Any] = {}
    for name in datums[0].columns:
        found = np.concatenate([d.columns[name] for d in datums]).astype(np.float32)
        columns[name] = torch.from_numpy(found).to(device, non_blocking=True)
    extra: dict[str, Any] = {}
    if line:
        from sharpen.models.attention import packed_arguments

        lengths = [*prompts, *rest_R[order].tolist()]
        extra = packed_arguments(lengths, positions_T, device, [len(tree) for tree in trees])
    return Batch(*moved, extra=extra, columns=columns)


def trained_tokens(datum: Datum) -> int:
    return int(datum.mask[1:].sum())
