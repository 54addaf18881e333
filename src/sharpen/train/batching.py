"""Which rows a step trains on, and how they are cut into micro-batches.

The training loops draw their rows with `epoch_order`; the learner cuts a step into micro-batches
with `plan_micro_batches`. Everything here is a pure function of its arguments. A resumed run
computes the order again, so it needs no saved position to see the same rows. `collate` turns the
rows of a micro-batch into tensors.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sharpen.types import Datum

# short names of task types that `task_weights` accepts
_FULL_NAMES = {
    "planning": "multi_step_planning",
    "timing": "timing_decision",
    "retrieval": "tool_retrieval",
    "selection": "tool_selection",
}


# The order of an epoch -------------------------------------------------------------------------


def epoch_order(
    task_types: Sequence[str], seed: int, epoch: int, weights: Mapping[str, float] | None = None
) -> list[int]:
    """Return one epoch's row numbers in random order; `weights` set each task type's share of it.

    A type with fewer rows than its share is repeated, one with more is sampled. Types without a
    weight keep their rows; types with weight 0 are left out.
    """
    generator = random.Random(f"{seed}:{epoch}")
    rows_by_type: dict[str, list[int]] = {}
    for row, task_type in enumerate(task_types):
        rows_by_type.setdefault(_full_name(task_type), []).append(row)
    weight_by_type = {_full_name(name): weight for name, weight in (weights or {}).items()}
    positive_weights = {
        name: weight
        for name, weight in weight_by_type.items()
        if weight > 0 and name in rows_by_type
    }
    if not positive_weights:
        order = list(range(len(task_types)))
        generator.shuffle(order)
        return order

    order = []
    for task_type, rows in rows_by_type.items():
        if task_type not in weight_by_type:
            order += rows
    weight_sum = sum(positive_weights.values())
    fractions = {name: weight / weight_sum for name, weight in positive_weights.items()}
    counts = apportion(fractions, len(task_types) - len(order))
    for task_type, count in counts.items():
        rows = list(rows_by_type[task_type])
        generator.shuffle(rows)
        repeats = math.ceil(count / len(rows))
        order += (rows * repeats)[:count]
    generator.shuffle(order)
    return order


def _full_name(task_type: str) -> str:
    """Return the full name of a task type that may be given by its short name."""
    return _FULL_NAMES.get(task_type, task_type)


def apportion(fractions: Mapping[str, float], total: int) -> dict[str, int]:
    """Split `total` into whole numbers in these proportions, by largest remainder."""
    counts = {name: int(fraction * total) for name, fraction in fractions.items()}

    def remainder_first(name: str) -> tuple[float, str]:
        return counts[name] - fractions[name] * total, name

    missing = total - sum(counts.values())
    by_remainder = sorted(fractions, key=remainder_first)
    for name in by_remainder[:missing]:
        counts[name] += 1
    return counts


# Micro-batches ---------------------------------------------------------------------------------


def plan_micro_batches(
    datums: Sequence[Datum], token_budget: int, packed: bool, parts: int, shares: bool
) -> list[list[int]]:
    """Return the row numbers of each micro-batch; rows that share a prompt stay together.

    `packed`, `parts` and `shares` are as in `micro_batches` and `collate`.
    """
    groups = [[row] for row in range(len(datums))]
    if shares:
        groups = group_by_prompt(datums, token_budget)
    lengths = [group_length(datums, group) for group in groups]
    batches = []
    for group_numbers in micro_batches(lengths, token_budget, packed, parts):
        rows: list[int] = []
        for number in group_numbers:
            rows += groups[number]
        batches.append(rows)
    return batches


def micro_batches(
    lengths: Sequence[int], token_budget: int, packed: bool = False, parts: int = 1
) -> list[list[int]]:
    """Cut items of these lengths into micro-batches of at most `token_budget` tokens, or one item.

    Packed items lie end to end and are dealt out evenly. Padded items are batched with others of
    similar length. The number of micro-batches is a multiple of `parts`, one part per process;
    where there are too few items, some micro-batches are empty.
    """

    def longest_first(item: int) -> tuple[int, int]:
        return -lengths[item], item

    order = sorted(range(len(lengths)), key=longest_first)
    if packed:
        batches = _packed_batches(lengths, order, token_budget)
    else:
        batches = _padded_batches(lengths, order, token_budget)
    while len(batches) % parts:
        largest = max(batches, key=len)
        middle = (len(largest) + 1) // 2
        batches.append(largest[middle:])
        del largest[middle:]
    return batches


def _padded_batches(
    lengths: Sequence[int], order: Sequence[int], token_budget: int
) -> list[list[int]]:
    """Fill one batch after the other, longest items first; all items are padded to the first."""
    batches: list[list[int]] = []
    for item in order:
        if batches:
            batch = batches[-1]
            padded_tokens = lengths[batch[0]] * (len(batch) + 1)
            if padded_tokens <= token_budget:
                batch.append(item)
                continue
        batches.append([item])
    return batches


def _packed_batches(
    lengths: Sequence[int], order: Sequence[int], token_budget: int
) -> list[list[int]]:
    """Fill as few batches as possible, all nearly equally full.

    Each item, longest first, goes into the batch with the fewest tokens. If a batch then exceeds
    the budget, try again with one batch more.
    """
    count = math.ceil(sum(lengths) / token_budget)
    while True:
        batches: list[list[int]] = [[] for _ in range(count)]
        emptiest = [(0, number) for number in range(count)]  # a heap of (tokens, batch number)
        for item in order:
            tokens, number = heapq.heappop(emptiest)
            batches[number].append(item)
            heapq.heappush(emptiest, (tokens + lengths[item], number))
        if all(_fits(batch, lengths, token_budget) for batch in batches):
            return [batch for batch in batches if batch]
        count += 1


def _fits(batch: Sequence[int], lengths: Sequence[int], token_budget: int) -> bool:
    """Whether a packed batch is within the budget, or cannot be made smaller."""
    return len(batch) <= 1 or sum(lengths[item] for item in batch) <= token_budget


# Rows that share a prompt ----------------------------------------------------------------------


@dataclass(slots=True)
class _PromptGroup:
    """Rows with the same prompt, and their number of tokens with the prompt counted once."""

    rows: list[int]
    tokens: int


def group_by_prompt(datums: Sequence[Datum], token_budget: float = math.inf) -> list[list[int]]:
    """Group the rows, by number, that share a prompt; all other rows are groups of one.

    A group is kept if computing its prompt once saves at least an eighth of its tokens, and if it
    fits the budget. The samples of one RL task are such rows.
    """
    groups_by_prompt: dict[bytes, list[_PromptGroup]] = {}
    for row, datum in enumerate(datums):
        prompt = prompt_length(datum)
        groups = groups_by_prompt.setdefault(datum.ids[:prompt].tobytes(), [])
        rest = len(datum.ids) - prompt
        if groups and groups[-1].tokens + rest <= token_budget:
            groups[-1].rows.append(row)
            groups[-1].tokens += rest
        else:
            groups.append(_PromptGroup([row], len(datum.ids)))

    row_groups: list[list[int]] = []
    for groups in groups_by_prompt.values():
        for group in groups:
            saved_tokens = (len(group.rows) - 1) * prompt_length(datums[group.rows[0]])
            all_tokens = saved_tokens + group.tokens
            if 8 * saved_tokens >= all_tokens:
                row_groups.append(group.rows)
            else:
                row_groups += [[row] for row in group.rows]
    return sorted(row_groups)


def group_length(datums: Sequence[Datum], rows: Sequence[int]) -> int:
    """Return the number of tokens of rows that share a prompt, the prompt counted once."""
    repeated = (len(rows) - 1) * prompt_length(datums[rows[0]])
    return sum(len(datums[row].ids) for row in rows) - repeated


def prompt_length(datum: Datum) -> int:
    """Return the number of tokens before the first trained one; 0 if no token is trained."""
    trained = datum.mask[1:]  # the first token is never trained: nothing before it predicts it
    if not trained.any():
        return 0
    return int(trained.argmax()) + 1


def trained_tokens(datum: Datum) -> int:
    """Return the number of tokens that carry loss; the first token of a row cannot."""
    return int(datum.mask[1:].sum())
