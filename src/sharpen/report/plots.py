"""Figures of a run, drawn without a display."""

from __future__ import annotations

from pathlib import Path

from sharpen.records import atomic_write
from sharpen.types import Json


def draw_calibration(found: Json, path: str | Path) -> None:
    """How sure a model was against how often it was right, and how many rows each point has."""
    from matplotlib.figure import Figure  # without pyplot no display is looked for

    figure = Figure(figsize=(5, 4.5), layout="constrained")
    axes = figure.subplots()
    points = [(row["confidence"], row["accuracy"]) for row in found["bins"]]
    axes.plot((0, 1), (0, 1), "--", color="0.6", label="as sure as right")
    axes.plot(*zip(*points, strict=True), "o-", label=f"model (error {found['ece']:.3f})")
    for point, row in zip(points, found["bins"], strict=True):
        axes.annotate(row["count"], point, (0, -14), textcoords="offset points", ha="center")
    axes.set(xlim=(0.48, 1.02), ylim=(0, 1.02), xlabel="confidence", ylabel="accuracy")
    axes.legend(title="numbers: rows of a point", loc="lower right")
    with atomic_write(path) as file:
        figure.savefig(file, format="png")
