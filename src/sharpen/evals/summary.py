"""Figures of measured items: each metric's mean with its 95% interval, and what several samples of
each task add (pass@k, pass^k)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sharpen.evals.intervals import Difference, Figure, interval
from sharpen.rewards.metrics import METRICS
from sharpen.types import Json


def summarize(rows: Sequence[Json]) -> dict[str, Figure]:
    """Returns a figure for each metric that any item has.

    A task with several samples counts once, by its mean (avg@k). Where nothing has weight, such as
    the precision of a decision that was never taken, nothing is known: the interval is [0, 1].
    """
    figures = {}
    for name in METRICS:
        values = _values_by_task(rows, name)
        if not values:
            continue
        weighted = [(value, weight) for value, weight in values if weight]
        if weighted:
            figures[name] = interval([v for v, _ in weighted], [w for _, w in weighted])
        else:
            figures[name] = Figure(0.0, 0.0, 0, 0.0, 1.0)
    return figures | _pass_rates(rows)


def _values_by_task(rows: Sequence[Json], name: str) -> list[tuple[float, float]]:
    """A metric's value and weight for each task: the mean over its samples."""
    samples_of: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        value = row["metrics"].get(name)
        if value is None:
            continue
        pair = tuple(value) if isinstance(value, (tuple, list)) else (value, 1.0)
        samples_of.setdefault(row["id"], []).append(pair)
    means = []
    for pairs in samples_of.values():
        weight = sum(w for _, w in pairs)
        total = sum(v * w for v, w in pairs)
        means.append((total / weight if weight else 0.0, weight / len(pairs)))
    return means


def _pass_rates(rows: Sequence[Json]) -> dict[str, Figure]:
    """pass@k: any of a task's k samples solves it; pass^k: all of them do."""
    solved_of: dict[str, list[bool]] = {}
    for row in rows:
        solved_of.setdefault(row["id"], []).append(row["solved"])
    k = max((len(solved) for solved in solved_of.values()), default=0)
    if k < 2:
        return {}
    any_solved = [float(any(solved)) for solved in solved_of.values()]
    all_solved = [float(all(solved)) for solved in solved_of.values()]
    means = [sum(solved) / len(solved) for solved in solved_of.values()]
    return {
        f"avg@{k}": interval(means),
        f"pass@{k}": interval(any_solved),
        f"pass^{k}": interval(all_solved),
    }


def plain_figures(figures: Mapping[str, Figure | Difference]) -> Json:
    """Returns figures as JSON values."""
    return {name: asdict(value) for name, value in figures.items()}


def figures_by(rows: Sequence[Json], key: str) -> Json:
    """Returns the figures by part, category or difficulty, where there is more than one."""
    names = sorted({row[key] for row in rows})
    if len(names) < 2:
        return {}
    grouped = {}
    for name in names:
        grouped[name] = plain_figures(summarize([row for row in rows if row[key] == name]))
    return grouped


def task_values(rows: Iterable[Json]) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns (suite, task) → its metrics, averaged over its samples, to compare with another
    evaluation. Metrics with weights are left out."""
    samples_of: dict[tuple[str, str], list[Json]] = {}
    for row in rows:
        samples_of.setdefault((row["suite"], row["id"]), []).append(row["metrics"])
    values: dict[tuple[str, str], dict[str, Any]] = {}
    for key, samples in samples_of.items():
        means = {}
        for name in METRICS:
            numbers = [s[name] for s in samples if isinstance(s.get(name), (int, float))]
            if numbers:
                means[name] = sum(numbers) / len(numbers)
        values[key] = means
    return values
