"""Sends metrics to TensorBoard, trackio and wandb, chosen by name in `report_to`.

`TrainingRun` calls it after every step. The run folder's own `metrics.jsonl` is always written and
is the record; these are views of it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sharpen.types import Json, SharpenError


class Trackers:
    """`with Trackers(names, run_folder, config) as trackers: trackers.log(row)`."""

    def __init__(self, names: Sequence[str], run: Path, config: Json):
        for name in names:
            if importlib.util.find_spec(name) is None:
                raise SharpenError(f"report_to: {name} is not installed; pip install {name}")
        self._trackers = [_TRACKERS[name](run, config) for name in names]

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *failure: object) -> None:
        for tracker in self._trackers:
            tracker.close()

    def log(self, row: Json) -> None:
        """Send the numbers of a step's metrics row."""
        figures = {}
        for name, value in row.items():
            if isinstance(value, int | float) and name != "step":
                figures[name] = float(value)
        for tracker in self._trackers:
            tracker.log(figures, row["step"])


class _TensorBoard:
    """Event files in the run folder's `tensorboard/`."""

    def __init__(self, run: Path, config: Json):
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(run / "tensorboard"))
        self.writer.add_text("config", str(config))

    def log(self, figures: dict[str, float], step: int) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class _Service:
    """trackio or wandb, which have the same interface."""

    def __init__(self, module: str, run: Path, config: Json):
        self.service: Any = importlib.import_module(module)
        self.service.init(project="sharpen", name=run.resolve().name, config=config)

    def log(self, figures: dict[str, float], step: int) -> None:
        self.service.log(figures, step=step)

    def close(self) -> None:
        self.service.finish()


_TRACKERS: dict[str, Any] = {
    "trackio": partial(_Service, "trackio"),
    "wandb": partial(_Service, "wandb"),
    "tensorboard": _TensorBoard,
}
