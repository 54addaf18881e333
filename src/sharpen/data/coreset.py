"""Coresets: which rows of a set to train on, by loss, diversity, coverage, influence or difficulty.
Losses come from a real model (a `Scorer`) or from the rows themselves, never from a formula;
vectors from an `Encoder`, or hashed features. Below the selector are pure functions of arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from sharpen.data.features import HashedEncoder, dialog_text, normalised
from sharpen.types import Dialog, Encoder, RowError, Scorer, SharpenError

Row = TypeVar("Row")
Influence = Callable[[Sequence[Dialog]], Sequence[float]]  # how much a row helps what is wanted
STRATEGIES = ("loss_topk", "diversity", "hybrid", "random", "facility_location", "gradient")
STRATEGIES += ("curriculum", "curriculum_length")
BATCH = 1024  # rows that a model or an encoder is handed at a time
POOL = 2048  # rows among which the next farthest ones are looked for
GROUP = 2048  # rows whose mutual similarities are held at once


class CoresetSelector:
    """`CoresetSelector("hybrid", 8000, scorer=ModelScorer.load(name)).select(dialogs)`. Rows are in
    the order in which they were picked, so that a shorter coreset is a longer one's beginning (not
    for `random`, which keeps the set's order, nor for curricula)."""

    def __init__(
        self,
        strategy: str,
        target_size: int,
        scorer: Scorer | None = None,
        encoder: Encoder | None = None,
        seed: int = 0,
        influence: Influence | None = None,
    ):
        if strategy not in STRATEGIES:
            known = ", ".join(STRATEGIES)
            raise SharpenError(f"coreset strategy {strategy!r} is unknown; known are {known}")
        if target_size < 1:
            raise SharpenError(f"coreset target size {target_size}: at least 1 row is needed")
        self.strategy, self.target_size, self.seed = strategy, target_size, seed
        self.scorer, self.encoder, self.influence = scorer, encoder or HashedEncoder(), influence

    @property
    def ordered(self) -> bool:
        """Whether the order of the rows is the point, so that a trainer must not shuffle them."""
        return self.strategy.startswith("curriculum")

    def select(self, rows: Sequence[Row]) -> list[Row]:
        return [rows[index] for index in self.indices(rows)]

    def indices(self, rows: Sequence[Any]) -> list[int]:
        """The picked rows' places. A set that is not larger than the target is kept whole."""
        if not rows:
            raise SharpenError("coreset: the set has no rows")
        if len(rows) <= self.target_size:
            print(f"coreset: all {len(rows)} rows are kept, the target is {self.target_size}")
            if not self.ordered:
                return list(range(len(rows)))
        count = min(self.target_size, len(rows))
        return [int(index) for index in getattr(self, self.strategy)(rows, count)]

    def random(self, rows: Sequence[Any], count: int) -> np.ndarray:
        return np.sort(np.random.default_rng(self.seed).permutation(len(rows))[:count])

    def loss_topk(self, rows: Sequence[Any], count: int) -> np.ndarray:
        """The highest losses first."""
        return np.argsort(-self.losses(rows), kind="stable")[:count]

    def diversity(self, rows: Sequence[Any], count: int) -> np.ndarray:
        """Farthest-point traversal: each row is the least like everything picked before it."""
        first = int(np.random.default_rng(self.seed).integers(len(rows)))
        return farthest_points(self.vectors(rows), count, first)

    def hybrid(self, rows: Sequence[Any], count: int) -> np.ndarray:
        """Farthest points by `rank of the loss (1/n to 1) × distance`, from the highest loss on."""
        rank = np.empty(len(rows), np.float32)
        rank[np.argsort(self.losses(rows), kind="stable")] = np.arange(1, len(rows) + 1) / len(rows)
        return farthest_points(self.vectors(rows), count, int(rank.argmax()), rank)

    def facility_location(self, rows: Sequence[Any], count: int) -> np.ndarray:
        return facility_location(self.vectors(rows), count, self.seed)

    def gradient(self, rows: Sequence[Any], count: int) -> np.ndarray:
        """The rows that help a target set most, the most helpful first."""
        if self.influence is None:
            raise SharpenError("coreset strategy gradient needs influence=GradientInfluence(…)")
        found = batched(self.influence, [dialog_of(row) for row in rows])
        return np.argsort(-finite(found, rows, "influence"), kind="stable")[:count]

    def curriculum(self, rows: Sequence[Any], count: int) -> np.ndarray:
        """From low to high loss, at even distances of rank: easy and hard rows both stay."""
        return easy_to_hard(self.losses(rows), count)

    def curriculum_length(self, rows: Sequence[Any], count: int) -> np.ndarray:
        """The same by length of the text, which needs no model."""
        return easy_to_hard(np.array([len(dialog_text(dialog_of(r))) for r in rows]), count)

    def losses(self, rows: Sequence[Any]) -> np.ndarray:
        """A row's own `loss` where its metadata has one, else the scorer's."""
        given = [row.metadata.get("loss") for row in rows]
        unknown = [index for index, value in enumerate(given) if value is None]
        if unknown:
            if self.scorer is None:
                lack = f"no loss, and coreset strategy {self.strategy} has no scorer to measure it"
                where = name_of(rows, unknown[0])
                raise RowError(where, f"{lack}; give scorer=ModelScorer.load(model)")
            found = batched(self.scorer.losses, [dialog_of(rows[i]) for i in unknown])
            for index, value in zip(unknown, found, strict=True):
                given[index] = value
        return finite(given, rows, "loss")

    def vectors(self, rows: Sequence[Any]) -> np.ndarray:
        """One row of unit length each, whatever the encoder's own length was."""
        found = batched(self.encoder.encode, [dialog_text(dialog_of(row)) for row in rows])
        if found.ndim != 2 or len(found) != len(rows):
            raise SharpenError(f"encoder: {found.shape} values for {len(rows)} rows")
        bad = np.flatnonzero(~np.isfinite(found).all(1))
        if len(bad):
            raise RowError(name_of(rows, int(bad[0])), "the encoder's vector is not finite")
        return normalised(found)


def dialog_of(row: Any) -> Dialog:
    return row if isinstance(row, Dialog) else row.dialog


def name_of(rows: Sequence[Any], index: int) -> str:
    return dialog_of(rows[index]).id or f"row {index}"


def batched(measure: Callable[[Sequence[Any]], Any], items: Sequence[Any]) -> np.ndarray:
    starts = range(0, len(items), BATCH)
    return np.concatenate([np.asarray(measure(items[s : s + BATCH])) for s in starts])


def finite(values: Any, rows: Sequence[Any], what: str) -> np.ndarray:
    if len(values) != len(rows):
        raise SharpenError(f"{what}: {len(values)} values for {len(rows)} rows")
    for index, value in enumerate(values):
        if type(value) is bool or not isinstance(value, Real) or not math.isfinite(value):
            raise RowError(name_of(rows, index), f"{what} {value!r} is not a finite number")
    return np.asarray(values, np.float64)


def easy_to_hard(difficulty: np.ndarray, count: int) -> np.ndarray:
    order = np.argsort(difficulty, kind="stable")
    return order[((np.arange(count) + 0.5) * len(order) / count).astype(int)]


def farthest_points(
    vectors_N_D: np.ndarray, count: int, first: int, weight_N: np.ndarray | None = None
) -> np.ndarray:
    """Exactly the greedy order by `weight × (1 - cosine to the nearest chosen row)`. Scores only
    fall, so the next rows are looked for in a pool of the highest scores, as long as its best stays
    above whatever is outside; only then is everything compared with the newly chosen rows."""
    total = len(vectors_N_D)
    weight_N = np.ones(total, np.float32) if weight_N is None else weight_N
    score_N = np.full(total, np.inf, np.float32)
    chosen, fresh = [first], [first]
    while len(chosen) < count:
        for start in range(0, total, BATCH):
            part = slice(start, start + BATCH)
            closest = (vectors_N_D[part] @ vectors_N_D[fresh].T).max(1)
            score_N[part] = np.minimum(score_N[part], weight_N[part] * (1 - closest))
        score_N[fresh] = -np.inf
        split = max(total - POOL, 0)
        order = np.argpartition(score_N, split)
        outside = score_N[order[:split]].max(initial=-np.inf)
        pool = np.sort(order[split:])  # sorted, so that of equal rows the first is taken
        pool_P_D, weight_P, score_P = vectors_N_D[pool], weight_N[pool], score_N[pool]
        fresh = []
        while len(chosen) + len(fresh) < count and score_P[best := score_P.argmax()] >= outside:
            fresh.append(int(pool[best]))
            # not `@`: a product this small costs BLAS's threads more to meet than to compute
            like_P = np.einsum("pd,d->p", pool_P_D, pool_P_D[best])
            score_P = np.minimum(score_P, weight_P * (1 - like_P))
            score_P[best] = -np.inf
        chosen += fresh
    return np.array(chosen)


def facility_location(vectors_N_D: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
    """Greedy for Σ_i max_{j chosen} max(0, cosine(i, j)): at least 1 - 1/e of the best value. More
    than `GROUP` rows are cut into groups of like rows, and rows of different groups count as
    unlike: merging the groups' greedy orders by gain is then the greedy order of the whole."""
    orders, gains, chance = [], [], np.random.default_rng(seed)
    for group in like_groups(vectors_N_D, np.arange(len(vectors_N_D)), chance):
        order, gain = greedy_cover(np.maximum(vectors_N_D[group] @ vectors_N_D[group].T, 0), count)
        orders.append(group[order])
        gains.append(gain)
    best = np.argsort(-np.concatenate(gains), kind="stable")[:count]
    return np.concatenate(orders)[best]


def like_groups(
    vectors_N_D: np.ndarray, rows: np.ndarray, chance: np.random.Generator
) -> list[np.ndarray]:
    """Halve along the direction of greatest spread until no group is larger than `GROUP`."""
    if len(rows) <= GROUP:
        return [rows]
    part_n_D = vectors_N_D[rows] - vectors_N_D[rows].mean(0)
    axis = chance.standard_normal(part_n_D.shape[1]).astype(np.float32)
    for _ in range(6):  # power iteration: a rough first principal axis is enough
        axis = (part_n_D @ axis) @ part_n_D
        axis /= max(float(np.linalg.norm(axis)), 1e-12)
    order = rows[np.argsort(part_n_D @ axis, kind="stable")]
    low, high = np.sort(order[: len(order) // 2]), np.sort(order[len(order) // 2 :])
    return like_groups(vectors_N_D, low, chance) + like_groups(vectors_N_D, high, chance)


def greedy_cover(similar_n_n: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The greedy order and its gains; a pick changes only the gains of rows it covers better."""
    covered_n = np.zeros(len(similar_n_n), similar_n_n.dtype)
    gain_n = similar_n_n.sum(1, dtype=np.float64)
    order, gains = [], []
    while len(order) < min(count, len(gain_n)):
        best = int(gain_n.argmax())
        order.append(best)
        gains.append(gain_n[best])
        better = np.flatnonzero(similar_n_n[best] > covered_n)
        old, new = covered_n[better, None], similar_n_n[best][better, None]
        gain_n -= (np.clip(similar_n_n[better], old, new) - old).sum(0, dtype=np.float64)
        covered_n[better] = new[:, 0]
        gain_n[best] = -np.inf
    return np.array(order), np.array(gains)
