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


def shared_trees(datums: Sequence[Datum], token_budget: int) -> list[list[int]]:
    """Rows by number: those together that have one prompt, where computing it once saves an eighth
    of their tokens and all fit into the budget; else each alone."""
    trees: list[list[int]] = []
    growing: dict[bytes, list[int]] = {}
    for number, datum in enumerate(datums):
        prompt = datum.ids[: prompt_length(datum)].tobytes()
        tree = growing.get(prompt, [])
        if not tree or tree_length([datums[i] for i in (*tree, number)]) > token_budget:
            growing[prompt] = tree = []
            trees.append(tree)
        tree.append(number)
    found: list[list[int]] = []
    for tree in trees:
        rows = [datums[i] for i in tree]
        saved = sum(len(row.ids) for row in rows) - tree_length(rows)
        found += [tree] if 7 * saved >= tree_length(rows) else [[number] for number in tree]
    return found


def prompt_length(datum: Datum) -> int:
    """How many tokens lie before the first trained one."""
    return int(datum.mask[1:].argmax()) + 1 if trained_tokens(datum) else 0


def tree_length(rows: Sequence[Datum]) -> int:
    return sum(len(row.ids) for row in rows) - (len(rows) - 1) * prompt_length(rows[0])


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows of tokens: right-padded without a mask (under a causal mask padding behind a row cannot
    reach it), or laid end to end in one line, with `extra` for the attention."""

    tokens_B_T: Any
    at_N: Any  # flat positions that foretell a trained token; the end of a shared prompt, several
    own_N: Any  # flat positions of the trained tokens themselves
    targets_N: Any
    row_N: Any  # which row of the batch each trained token belongs to
    weight_N: Any
    extra: dict[str, Any]
    columns: dict[str, Any]  # the datums' own, one value a trained token


def collate(
    datums: Sequence[Datum], device: str, packed: bool = False, trees: Sequence[int] = ()
) -> Batch:
    """`trees` says how many rows each of the first prompts has, which lies once before them all."""
    import torch

    heads = np.cumsum([0, *trees])[:-1]  # the first row of each tree
    prompts = [prompt_length(datums[head]) for head in heads]
    prompt_R = np.zeros(len(datums), np.int64)
    prompt_R[: sum(trees)] = np.repeat(prompts, trees)
    rest_R = np.array([len(d.ids) for d in datums]) - prompt_R
    begin_R = np.zeros_like(prompt_R)
    if packed or prompts:
        width = sum(prompts) + int(rest_R.sum())
        width = -(-width // ROUND) * ROUND if packed else width
        begin_R[: sum(trees)] = np.repeat(np.cumsum([0, *prompts])[:-1], trees)
        start_R = sum(prompts) + np.cumsum(rest_R) - rest_R
        tokens = np.zeros((1, width), np.int64)
    else:
        width = int(rest_R.max())
        start_R = np.arange(len(datums)) * width
        tokens = np.zeros((len(datums), width), np.int64)
    parts = zip(begin_R, prompt_R, start_R, rest_R, strict=True)
    places = [np.r_[b : b + prompt, s : s + rest] for b, prompt, s, rest in parts]
    for place, datum in zip(places, datums, strict=True):
        tokens.reshape(-1)[place] = datum.ids
    # the first token of a row has nothing before it that could predict it
    rows = [np.flatnonzero(d.mask[1:]) for d in datums]
    at_N = np.concatenate([place[found] for place, found in zip(places, rows, strict=True)])
    own_N = np.concatenate([place[found + 1] for place, found in zip(places, rows, strict=True)])
    row_N = np.repeat(np.arange(len(datums)), [len(found) for found in rows])
    weights = [np.broadcast_to(d.weight, len(f)) for d, f in zip(datums, rows, strict=True)]
    weight_N = np.concatenate(weights).astype(np.float32)
    arrays = (tokens, at_N, own_N, tokens.reshape(-1)[own_N], row_N, weight_N)
    moved: list[Any] = [torch.from_numpy(a).to(device, non_blocking=True) for a in arrays]
    columns: dict[str, Any] = {}
    for name in datums[0].columns:
        found = np.concatenate([d.columns[name] for d in datums]).astype(np.float32)
        columns[name] = torch.from_numpy(found).to(device, non_blocking=True)
    extra: dict[str, Any] = {}
    if packed or prompts:
        from sharpen.models.attention import packed_arguments

        extra = packed_arguments(rest_R.tolist(), width, device, prompts, trees)
    return Batch(*moved, extra=extra, columns=columns)


def trained_tokens(datum: Datum) -> int:
    return int(datum.mask[1:].sum())
