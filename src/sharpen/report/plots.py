"""Figures of a run, drawn without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sharpen.records import atomic_write
from sharpen.types import Json

Point = tuple[float, float]
Span = tuple[float, float, float]  # mean, low, high


def draw_lines(title: str, series: Mapping[str, Sequence[Point]], unit: str = "step") -> Any:
    figure, axes = canvas(title, layout=None)  # which a page of many curves would wait for
    for name, points in series.items():
        style = "-" if len(points) > 40 else ".-"
        axes.plot(*zip(*points, strict=True), style, label=name, linewidth=1.3)
    axes.set_xlabel(unit)
    if len(series) > 1:
        axes.legend(fontsize=7)
    return figure


def draw_bars(title: str, values: Mapping[str, Span]) -> Any:
    """Means with their intervals."""
    figure, axes = canvas(title, height=max(1.5, 0.34 * len(values) + 0.8))
    names = list(values)[::-1]
    means = [values[name][0] for name in names]
    below = [max(values[name][0] - values[name][1], 0.0) for name in names]
    above = [max(values[name][2] - values[name][0], 0.0) for name in names]
    axes.barh(names, means, xerr=(below, above), color="#4a90c2", ecolor="0.3", capsize=3)
    return figure


def draw_points(title: str, points: Mapping[str, Point], x: str, y: str) -> Any:
    """One named point each; those that no other beats in both are joined (least x, least y)."""
    figure, axes = canvas(title)
    for name, point in points.items():
        axes.plot(*point, "o")
        axes.annotate(name, point, (4, 4), textcoords="offset points", fontsize=7)
    best = [p for p in points.values() if not any(beats(other, p) for other in points.values())]
    if best:
        axes.plot(*zip(*sorted(best), strict=True), "--", color="0.6", linewidth=1)
    axes.set(xlabel=x, ylabel=y)
    return figure


def beats(one: Point, other: Point) -> bool:
    return one != other and one[0] <= other[0] and one[1] <= other[1]


def draw_calibration(found: Json, path: str | Path) -> None:
    """How sure a model was against how often it was right, and how many rows each point has."""
    figure, axes = canvas("", width=5, height=4.5)
    points = [(row["confidence"], row["accuracy"]) for row in found["bins"]]
    axes.plot((0, 1), (0, 1), "--", color="0.6", label="as sure as right")
    axes.plot(*zip(*points, strict=True), "o-", label=f"model (error {found['ece']:.3f})")
    for point, row in zip(points, found["bins"], strict=True):
        axes.annotate(row["count"], point, (0, -14), textcoords="offset points", ha="center")
    axes.set(xlim=(0.48, 1.02), ylim=(0, 1.02), xlabel="confidence", ylabel="accuracy")
    axes.legend(title="numbers: rows of a point", loc="lower right")
    save(figure, path)


def canvas(
    title: str, width: float = 4.6, height: float = 2.9, layout: Any = "constrained"
) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # without pyplot no display is looked for

    figure = Figure(figsize=(width, height), layout=layout)
    if layout is None:
        figure.subplots_adjust(left=0.15, right=0.97, bottom=0.17, top=0.9)
    axes = figure.subplots()
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: Any, path: str | Path) -> None:
    """By its suffix: png or svg."""
    with atomic_write(path) as file:
        figure.savefig(file, format=Path(path).suffix[1:], dpi=150)
