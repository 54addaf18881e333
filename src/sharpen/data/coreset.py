"""Chooses which rows of a set to train on, by loss, diversity, coverage, influence or difficulty.

Losses come from a real model (a `Scorer`) or from the rows themselves, never from a formula.
Vectors come from an `Encoder`, by default hashed features. `train.dataset` calls the selector; the
algorithms below it are pure functions of arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from sharpen.data.features import HashedEncoder, dialog_text, normalize_rows
from sharpen.types import Dialog, Encoder, RowError, Scorer, SharpenError

Row = TypeVar("Row")  # a Dialog, or an object that holds one as `dialog` beside its metadata
_Influence = Callable[[Sequence[Dialog]], Sequence[float]]  # how much each row helps a target set
STRATEGIES = (
    "loss_topk",
    "diversity",
    "hybrid",
    "random",
    "facility_location",
    "gradient",
    "curriculum",
    "curriculum_length",
)
BATCH = 1024  # rows that a model or an encoder is handed at a time
POOL = 2048  # rows among which the next farthest ones are looked for
GROUP = 2048  # rows whose mutual similarities are held at once
_POWER_ITERATIONS = 6  # a rough first principal axis is enough to split a group


class CoresetSelector:
    """Selects rows by a strategy.

    `CoresetSelector("hybrid", 8000, scorer=ModelScorer.load(name)).select(dialogs)`. Rows come in
    the order in which they were picked, so that a shorter coreset is the beginning of a longer
    one. Two kinds of strategies differ: `random` keeps the order of the set, and curricula go from
    easy to hard.
    """

    def __init__(
        self,
        strategy: str,
        target_size: int,
        scorer: Scorer | None = None,
        encoder: Encoder | None = None,
        seed: int = 0,
        influence: _Influence | None = None,
    ):
        if strategy not in STRATEGIES:
            known = ", ".join(STRATEGIES)
            raise SharpenError(f"coreset strategy {strategy!r} is unknown; known are {known}")
        if target_size < 1:
            raise SharpenError(f"coreset target size {target_size}: at least 1 row is needed")
        self.strategy = strategy
        self.target_size = target_size
        self.seed = seed
        self.scorer = scorer
        self.encoder = encoder or HashedEncoder()
        self.influence = influence

    @property
    def ordered(self) -> bool:
        """Whether the order of the rows matters, so that a trainer must not shuffle them."""
        return self.strategy.startswith("curriculum")

    def select(self, rows: Sequence[Row]) -> list[Row]:
        """Return the selected rows."""
        return [rows[index] for index in self.indices(rows)]

    def indices(self, rows: Sequence[Any]) -> list[int]:
        """Return the indices of the selected rows. A set within the target size is kept whole."""
        if not rows:
            raise SharpenError("coreset: the set has no rows")
        if len(rows) <= self.target_size:
            print(f"coreset: all {len(rows)} rows are kept, the target is {self.target_size}")
            if not self.ordered:
                return list(range(len(rows)))
        count = min(self.target_size, len(rows))
        select = getattr(self, f"_select_{self.strategy}")
        return [int(index) for index in select(rows, count)]

    # One method per strategy, named after it -----------------------------------------------------

    def _select_random(self, rows: Sequence[Any], count: int) -> np.ndarray:
        return np.sort(np.random.default_rng(self.seed).permutation(len(rows))[:count])

    def _select_loss_topk(self, rows: Sequence[Any], count: int) -> np.ndarray:
        """The highest losses first."""
        return np.argsort(-self.losses(rows), kind="stable")[:count]

    def _select_diversity(self, rows: Sequence[Any], count: int) -> np.ndarray:
        """Farthest-point traversal: each row is the least like everything picked before it."""
        first = int(np.random.default_rng(self.seed).integers(len(rows)))
        return farthest_points(self.vectors(rows), count, first)

    def _select_hybrid(self, rows: Sequence[Any], count: int) -> np.ndarray:
        """Farthest points by `rank of the loss (1/n to 1) × distance`, from the highest loss on."""
        easiest_first = np.argsort(self.losses(rows), kind="stable")
        rank_N = np.empty(len(rows), np.float32)
        rank_N[easiest_first] = np.arange(1, len(rows) + 1) / len(rows)
        return farthest_points(self.vectors(rows), count, int(rank_N.argmax()), rank_N)

    def _select_facility_location(self, rows: Sequence[Any], count: int) -> np.ndarray:
        """The rows that together are most like all the others."""
        return facility_location(self.vectors(rows), count, self.seed)

    def _select_gradient(self, rows: Sequence[Any], count: int) -> np.ndarray:
        """The rows that help a target set most, the most helpful first."""
        if self.influence is None:
            raise SharpenError("coreset strategy gradient needs influence=GradientInfluence(…)")
        influences = _measure_in_batches(self.influence, [_dialog_of(row) for row in rows])
        checked = _require_finite(influences, rows, "influence")
        return np.argsort(-checked, kind="stable")[:count]

    def _select_curriculum(self, rows: Sequence[Any], count: int) -> np.ndarray:
        """From low to high loss, at even distances of rank: easy and hard rows both stay."""
        return easy_to_hard(self.losses(rows), count)

    def _select_curriculum_length(self, rows: Sequence[Any], count: int) -> np.ndarray:
        """The same by length of the text, which needs no model."""
        lengths = [len(dialog_text(_dialog_of(row))) for row in rows]
        return easy_to_hard(np.array(lengths), count)

    # What strategies measure ---------------------------------------------------------------------

    def losses(self, rows: Sequence[Any]) -> np.ndarray:
        """Return one loss per row: `loss` of its metadata, or else the scorer's."""
        losses = [row.metadata.get("loss") for row in rows]
        unknown = [index for index, loss in enumerate(losses) if loss is None]
        if unknown:
            if self.scorer is None:
                raise RowError(
                    _name_of(rows, unknown[0]),
                    f"no loss, and coreset strategy {self.strategy} has no scorer to measure it; "
                    "give scorer=ModelScorer.load(model)",
                )
            dialogs = [_dialog_of(rows[index]) for index in unknown]
            measured = _measure_in_batches(self.scorer.losses, dialogs)
            for index, loss in zip(unknown, measured, strict=True):
                losses[index] = loss
        return _require_finite(losses, rows, "loss")

    def vectors(self, rows: Sequence[Any]) -> np.ndarray:
        """Return one vector of unit length per row, whatever lengths the encoder returns."""
        texts = [dialog_text(_dialog_of(row)) for row in rows]
        vectors = _measure_in_batches(self.encoder.encode, texts)
        if vectors.ndim != 2 or len(vectors) != len(rows):
            raise SharpenError(f"encoder: {vectors.shape} values for {len(rows)} rows")
        bad_rows = np.flatnonzero(~np.isfinite(vectors).all(1))
        if len(bad_rows):
            where = _name_of(rows, int(bad_rows[0]))
            raise RowError(where, "the encoder's vector is not finite")
        return normalize_rows(vectors)


def _dialog_of(row: Any) -> Dialog:
    return row if isinstance(row, Dialog) else row.dialog


def _name_of(rows: Sequence[Any], index: int) -> str:
    return _dialog_of(rows[index]).id or f"row {index}"


def _measure_in_batches(
    measure: Callable[[Sequence[Any]], Any], items: Sequence[Any]
) -> np.ndarray:
    parts = []
    for start in range(0, len(items), BATCH):
        parts.append(np.asarray(measure(items[start : start + BATCH])))
    return np.concatenate(parts)


def _require_finite(
    values: Sequence[Any] | np.ndarray, rows: Sequence[Any], what: str
) -> np.ndarray:
    if len(values) != len(rows):
        raise SharpenError(f"{what}: {len(values)} values for {len(rows)} rows")
    for index, value in enumerate(values):
        if type(value) is bool or not isinstance(value, Real) or not math.isfinite(value):
            where = _name_of(rows, index)
            raise RowError(where, f"{what} {value!r} is not a finite number")
    return np.asarray(values, np.float64)


# Algorithms --------------------------------------------------------------------------------------
#
# Dimensions of arrays: N rows, D of a vector, P rows of the pool, G rows of a group.


def easy_to_hard(difficulty_N: np.ndarray, count: int) -> np.ndarray:
    """Return `count` indices at even distances of rank, the easiest first."""
    order_N = np.argsort(difficulty_N, kind="stable")
    ranks = (np.arange(count) + 0.5) * len(order_N) / count
    return order_N[ranks.astype(int)]


def farthest_points(
    vectors_N_D: np.ndarray, count: int, first: int, weight_N: np.ndarray | None = None
) -> np.ndarray:
    """Return the greedy order by `weight × (1 - cosine to the nearest selected row)`, exactly.

    A score can only fall when a row is selected. So the next rows are looked for in a pool of the
    highest scores, as long as the best of the pool is not below the best outside. Only then are
    all rows compared with the newly selected ones.
    """
    row_count = len(vectors_N_D)
    if weight_N is None:
        weight_N = np.ones(row_count, np.float32)
    score_N = np.full(row_count, np.inf, np.float32)
    selected = [first]
    new = [first]  # selected rows that `score_N` does not know yet
    while len(selected) < count:
        for start in range(0, row_count, BATCH):
            part = slice(start, start + BATCH)
            closest = (vectors_N_D[part] @ vectors_N_D[new].T).max(1)
            score_N[part] = np.minimum(score_N[part], weight_N[part] * (1 - closest))
        score_N[new] = -np.inf
        outside_count = max(row_count - POOL, 0)
        order_N = np.argpartition(score_N, outside_count)
        best_outside = score_N[order_N[:outside_count]].max(initial=-np.inf)
        pool_P = np.sort(order_N[outside_count:])  # so that of equal rows the first is taken
        pool_vectors_P_D = vectors_N_D[pool_P]
        pool_weight_P = weight_N[pool_P]
        pool_score_P = score_N[pool_P]
        new = []
        while len(selected) + len(new) < count:
            best = pool_score_P.argmax()
            if pool_score_P[best] < best_outside:
                break
            new.append(int(pool_P[best]))
            # not `@`: for a product this small, BLAS needs longer to start its threads
            cosine_P = np.einsum("pd,d->p", pool_vectors_P_D, pool_vectors_P_D[best])
            pool_score_P = np.minimum(pool_score_P, pool_weight_P * (1 - cosine_P))
            pool_score_P[best] = -np.inf
        selected += new
    return np.array(selected)


def facility_location(vectors_N_D: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
    """Return the greedy order for Σ_i max_{j selected} max(0, cosine(i, j)).

    It reaches at least 1 - 1/e of the best value. More than `GROUP` rows are cut into groups of
    similar rows, and rows of different groups count as unlike. Merging the greedy orders of the
    groups by gain is then the greedy order of the whole.
    """
    rng = np.random.default_rng(seed)
    orders = []
    gains = []
    for group_G in _similar_groups(vectors_N_D, np.arange(len(vectors_N_D)), rng):
        similarity_G_G = np.maximum(vectors_N_D[group_G] @ vectors_N_D[group_G].T, 0)
        group_order, group_gains = _greedy_cover(similarity_G_G, count)
        orders.append(group_G[group_order])
        gains.append(group_gains)
    best = np.argsort(-np.concatenate(gains), kind="stable")[:count]
    return np.concatenate(orders)[best]


def _similar_groups(
    vectors_N_D: np.ndarray, rows_G: np.ndarray, rng: np.random.Generator
) -> list[np.ndarray]:
    """Halve along the direction of greatest spread until no group is larger than `GROUP`."""
    if len(rows_G) <= GROUP:
        return [rows_G]
    centred_G_D = vectors_N_D[rows_G] - vectors_N_D[rows_G].mean(0)
    axis_D = rng.standard_normal(centred_G_D.shape[1]).astype(np.float32)
    for _ in range(_POWER_ITERATIONS):
        axis_D = (centred_G_D @ axis_D) @ centred_G_D
        axis_D /= max(float(np.linalg.norm(axis_D)), 1e-12)
    sorted_rows_G = rows_G[np.argsort(centred_G_D @ axis_D, kind="stable")]
    middle = len(sorted_rows_G) // 2
    low = np.sort(sorted_rows_G[:middle])
    high = np.sort(sorted_rows_G[middle:])
    low_groups = _similar_groups(vectors_N_D, low, rng)
    return low_groups + _similar_groups(vectors_N_D, high, rng)


def _greedy_cover(similarity_G_G: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the greedy order and its gains. A pick changes only the gains of rows that it covers
    better than the picks before it."""
    covered_G = np.zeros(len(similarity_G_G), similarity_G_G.dtype)
    gain_G = similarity_G_G.sum(1, dtype=np.float64)
    order = []
    gains = []
    while len(order) < min(count, len(gain_G)):
        best = int(gain_G.argmax())
        order.append(best)
        gains.append(gain_G[best])
        better = np.flatnonzero(similarity_G_G[best] > covered_G)
        old_cover = covered_G[better, None]
        new_cover = similarity_G_G[best][better, None]
        lost_gains = np.clip(similarity_G_G[better], old_cover, new_cover) - old_cover
        gain_G -= lost_gains.sum(0, dtype=np.float64)
        covered_G[better] = new_cover[:, 0]
        gain_G[best] = -np.inf
    return np.array(order), np.array(gains)
