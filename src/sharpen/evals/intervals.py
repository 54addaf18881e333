"""How sure a figure is, and whether two models differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z95 = 1.959963984540054
RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Figure:
    mean: float
    std: float
    count: int
    low: float  # 95% interval
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.1%} [{self.low:.1%}, {self.high:.1%}] (n={self.count})"


def figure(values: Sequence[float]) -> Figure:
    """Mean with its 95% interval: Wilson's for yes/no values (honest at 0% and 100%), or normal."""
    count = len(values)
    if not count:
        raise ValueError("no values")
    mean = math.fsum(values) / count
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / count)
    if all(v in (0.0, 1.0) for v in values):
        return Figure(mean, std, count, *wilson(mean, count))
    margin = Z95 * std / math.sqrt(count)
    return Figure(mean, std, count, mean - margin, mean + margin)


def wilson(rate: float, count: int) -> tuple[float, float]:
    spread = Z95 * math.sqrt(rate * (1 - rate) / count + Z95**2 / (4 * count**2))
    centre, scale = rate + Z95**2 / (2 * count), 1 + Z95**2 / count
    low, high = (centre - spread) / scale, (centre + spread) / scale
    return (0.0 if rate == 0 else low), (1.0 if rate == 1 else high)


def bootstrapped(values: Sequence[float], weights: Sequence[float] | None = None) -> Figure:
    """A (weighted) mean with its bootstrap interval, seeded. Where all values are equal a bootstrap
    has no width; Wilson's interval is then the honest one for yes/no values."""
    if not values:
        raise ValueError("no values")
    x = np.asarray(values, float)
    w = np.ones_like(x) if weights is None else np.asarray(weights, float)
    mean = float((x * w).sum() / w.sum())
    std = float(np.sqrt((w * (x - mean) ** 2).sum() / w.sum()))
    if x.min() == x.max():
        ends = wilson(mean, len(x)) if mean in (0.0, 1.0) else (mean, mean)
        return Figure(mean, 0.0, len(x), *ends)
    low, high = np.percentile(resampled(x * w, w), (2.5, 97.5))
    return Figure(mean, std, len(x), float(low), float(high))


def resampled(tops: np.ndarray, bottoms: np.ndarray) -> np.ndarray:
    """The ratio of two sums over `RESAMPLES` draws of the items with replacement."""
    chance, found = np.random.default_rng(0), list[np.ndarray]()
    block = max(1, min(RESAMPLES, (1 << 20) // len(tops)))  # draws at a time: 8 MB of them
    for start in range(0, RESAMPLES, block):
        drawn = chance.integers(0, len(tops), (min(block, RESAMPLES - start), len(tops)))
        above, below = tops[drawn].sum(1), bottoms[drawn].sum(1)
        found.append(above[below != 0] / below[below != 0])
    return np.concatenate(found)


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
    x = np.asarray(after, float) - np.asarray(before, float)
    if not len(x):
        raise ValueError("no values")
    draws = resampled(x, np.ones_like(x)) if x.min() != x.max() else np.array([x[0]])
    low, high = (float(end) for end in np.percentile(draws, (2.5, 97.5)))
    if set(before) | set(after) <= {0.0, 1.0}:
        p, test = mcnemar(int((x > 0).sum()), int((x < 0).sum())), "McNemar"
    else:
        beyond = min((draws <= 0).mean(), (draws >= 0).mean())
        p, test = float(min(1.0, max(2 * beyond, 1 / len(draws)))), "bootstrap"
    return Difference(float(x.mean()), low, high, p, len(x), test)


def mcnemar(gained: int, lost: int) -> float:
    """The exact two-sided p-value: gains and losses are equally likely if nothing changed."""
    total, fewer = gained + lost, min(gained, lost)
    tail = sum(math.comb(total, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / 2**total)
