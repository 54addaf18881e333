"""How sure a figure is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.959963984540054


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
    """Mean with its 95% interval: Wilson's for yes/no values, which stays honest at 0% and 100%;
    Student-free normal else."""
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
