"""Figures of runs and evaluations, drawn without a display.

Called by the reports, the comparison of methods and the reward model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sharpen.records import atomic_write
from sharpen.types import Json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[float, float]
Interval = tuple[float, float, float]  # mean, low, high
_MAX_DOTS = 40  # a curve with more points is drawn without dots


def draw_lines(title: str, series: Mapping[str, Sequence[Point]], unit: str = "step") -> Figure:
    """Draw one curve per name; `unit` labels the x axis."""
    # Constrained layout is slow, and a page can hold many curves.
    figure, axes = _make_figure(title, layout=None)
    for name, points in series.items():
        xs, ys = _split_points(points)
        style = "-" if len(points) > _MAX_DOTS else ".-"
        axes.plot(xs, ys, style, label=name, linewidth=1.3)
    axes.set_xlabel(unit)
    if len(series) > 1:
        axes.legend(fontsize=7)
    return figure


def draw_bars(title: str, intervals: Mapping[str, Interval]) -> Figure:
    """Draw means as horizontal bars with their intervals, the first on top."""
    figure, axes = _make_figure(title, height=max(1.5, 0.34 * len(intervals) + 0.8))
    names = []
    means = []
    below = []
    above = []
    for name, (mean, low, high) in reversed(list(intervals.items())):
        names.append(name)
        means.append(mean)
        below.append(max(mean - low, 0.0))
        above.append(max(high - mean, 0.0))
    axes.barh(names, means, xerr=(below, above), color="#4a90c2", ecolor="0.3", capsize=3)
    return figure


def draw_points(title: str, points: Mapping[str, Point], x: str, y: str) -> Figure:
    """Draw named points and join the Pareto-optimal ones (low x and low y are good)."""
    figure, axes = _make_figure(title)
    for name, point in points.items():
        axes.plot(*point, "o")
        axes.annotate(name, point, (4, 4), textcoords="offset points", fontsize=7)
    best = []
    for point in points.values():
        if not any(_dominates(other, point) for other in points.values()):
            best.append(point)
    if best:
        xs, ys = _split_points(sorted(best))
        axes.plot(xs, ys, "--", color="0.6", linewidth=1)
    axes.set(xlabel=x, ylabel=y)
    return figure


def draw_calibration(calibration: Json, path: str | Path) -> None:
    """Draw accuracy against confidence, with the number of rows at each point, and save it."""
    figure, axes = _make_figure("", width=5, height=4.5)
    bins = calibration["bins"]
    points = [(row["confidence"], row["accuracy"]) for row in bins]
    xs, ys = _split_points(points)
    axes.plot((0, 1), (0, 1), "--", color="0.6", label="perfect calibration")
    axes.plot(xs, ys, "o-", label=f"model (error {calibration['ece']:.3f})")
    for point, row in zip(points, bins, strict=True):
        axes.annotate(row["count"], point, (0, -14), textcoords="offset points", ha="center")
    axes.set(xlim=(0.48, 1.02), ylim=(0, 1.02), xlabel="confidence", ylabel="accuracy")
    axes.legend(title="numbers: rows per point", loc="lower right")
    save(figure, path)


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure in the format of its suffix: png or svg."""
    with atomic_write(path) as file:
        figure.savefig(file, format=Path(path).suffix[1:], dpi=150)


def _make_figure(
    title: str,
    width: float = 4.6,
    height: float = 2.9,
    layout: Literal["constrained"] | None = "constrained",
) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure  # pyplot would look for a display

    figure = Figure(figsize=(width, height), layout=layout)
    if layout is None:
        figure.subplots_adjust(left=0.15, right=0.97, bottom=0.17, top=0.9)
    axes = figure.subplots()
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _split_points(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _dominates(point: Point, other: Point) -> bool:
    """Returns whether a point is no worse than another in both directions, and not the same."""
    return point != other and point[0] <= other[0] and point[1] <= other[1]
