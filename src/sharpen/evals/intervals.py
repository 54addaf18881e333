"""How sure a figure is, and whether two models differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_Z95 = 1.959963984540054
_RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Figure:
    """A mean with its 95% interval."""

    mean: float
    std: float
    count: int
    low: float  # 95% interval
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.1%} [{self.low:.1%}, {self.high:.1%}] (n={self.count})"


def interval(values: Sequence[float], weights: Sequence[float] | None = None) -> Figure:
    """Returns the (weighted) mean with its 95% interval: Wilson's for plain yes/no values, which
    is honest at 0% and 100%; otherwise a seeded bootstrap."""
    if not values:
        raise ValueError("no values")
    is_weighted = weights is not None and any(weight != 1.0 for weight in weights)
    if is_weighted or any(value not in (0.0, 1.0) for value in values):
        return bootstrapped(values, weights)
    count = len(values)
    mean = math.fsum(values) / count
    std = math.sqrt(mean * (1 - mean))
    return Figure(mean, std, count, *wilson(mean, count))


def wilson(rate: float, count: int) -> tuple[float, float]:
    """Returns Wilson's 95% interval of a rate."""
    spread = _Z95 * math.sqrt(rate * (1 - rate) / count + _Z95**2 / (4 * count**2))
    center = rate + _Z95**2 / (2 * count)
    scale = 1 + _Z95**2 / count
    low = 0.0 if rate == 0 else (center - spread) / scale
    high = 1.0 if rate == 1 else (center + spread) / scale
    return low, high


def bootstrapped(values: Sequence[float], weights: Sequence[float] | None = None) -> Figure:
    """Returns a (weighted) mean with its bootstrap interval, seeded. Where all values are equal a
    bootstrap has no width; Wilson's interval is then the honest one for yes/no values."""
    if not values:
        raise ValueError("no values")
    value_N = np.asarray(values, float)
    weight_N = np.ones_like(value_N) if weights is None else np.asarray(weights, float)
    mean = float((value_N * weight_N).sum() / weight_N.sum())
    variance = (weight_N * (value_N - mean) ** 2).sum() / weight_N.sum()
    if value_N.min() == value_N.max():
        ends = wilson(mean, len(value_N)) if mean in (0.0, 1.0) else (mean, mean)
        return Figure(mean, 0.0, len(value_N), *ends)
    low, high = np.percentile(_resample(value_N * weight_N, weight_N), (2.5, 97.5))
    return Figure(mean, float(np.sqrt(variance)), len(value_N), float(low), float(high))


def _resample(numerators: np.ndarray, denominators: np.ndarray) -> np.ndarray:
    """The ratio of two sums over `_RESAMPLES` draws of the items with replacement."""
    rng = np.random.default_rng(0)
    count = len(numerators)
    block = max(1, min(_RESAMPLES, (1 << 20) // count))  # draws at a time: 8 MB of them
    ratios = []
    for start in range(0, _RESAMPLES, block):
        indices = rng.integers(0, count, (min(block, _RESAMPLES - start), count))
        above = numerators[indices].sum(1)
        below = denominators[indices].sum(1)
        ratios.append(above[below != 0] / below[below != 0])
    return np.concatenate(ratios)


@dataclass(frozen=True, slots=True)
class Difference:
    """The second of two models less the first, on the items that both have."""

    difference: float
    low: float
    high: float
    p: float
    count: int
    test: str

    def __str__(self) -> str:
        ends = f"[{self.low:+.4f}, {self.high:+.4f}]"
        return f"{self.difference:+.4f} {ends} p={self.p:.3g} ({self.test}, n={self.count})"


def paired(before: Sequence[float], after: Sequence[float]) -> Difference:
    """McNemar's exact test for yes/no values, else a paired bootstrap; its interval for both."""
    change_N = np.asarray(after, float) - np.asarray(before, float)
    if not len(change_N):
        raise ValueError("no values")
    draws = np.array([change_N[0]])
    if change_N.min() != change_N.max():
        draws = _resample(change_N, np.ones_like(change_N))
    low, high = (float(end) for end in np.percentile(draws, (2.5, 97.5)))
    if set(before) | set(after) <= {0.0, 1.0}:
        test = "McNemar"
        p = _mcnemar(int((change_N > 0).sum()), int((change_N < 0).sum()))
    else:
        test = "bootstrap"
        beyond = min((draws <= 0).mean(), (draws >= 0).mean())
        p = float(min(1.0, max(2 * beyond, 1 / len(draws))))
    return Difference(float(change_N.mean()), low, high, p, len(change_N), test)


def _mcnemar(gained: int, lost: int) -> float:
    """The exact two-sided p-value: gains and losses are equally likely if nothing changed."""
    total = gained + lost
    fewer = min(gained, lost)
    tail = sum(math.comb(total, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / 2**total)
