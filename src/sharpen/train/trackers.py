"""Metrics elsewhere: TensorBoard, trackio and wandb by name. The run folder's own
`metrics.jsonl` is always written and is the record; these are views of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sharpen.types import Json, SharpenError


class Trackers:
    """`with Trackers(names, run) as trackers: trackers.log(row)`."""

    def __init__(self, names: Sequence[str], run: Path, config: Json):
        for name in names:
            if importlib.util.find_spec(name) is None:
                raise SharpenError(f"report_to: {name} is not installed; pip install {name}")
        self.sinks = [SINKS[name](run, config) for name in names]

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *failure: object) -> None:
        for sink in self.sinks:
            sink.close()

    def log(self, row: Json) -> None:
        figures = {k: float(v) for k, v in row.items() if isinstance(v, int | float)}
        del figures["step"]
        for sink in self.sinks:
            sink.log(figures, row["step"])


class TensorBoard:
    def __init__(self, run: Path, config: Json):
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(run / "tensorboard"))
        self.writer.add_text("config", str(config))

    def log(self, figures: dict[str, float], step: int) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class Service:
    """trackio and wandb speak alike."""

    def __init__(self, module: str, run: Path, config: Json):
        self.service: Any = importlib.import_module(module)
        self.service.init(project="sharpen", name=run.resolve().name, config=config)

    def log(self, figures: dict[str, float], step: int) -> None:
        self.service.log(figures, step=step)

    def close(self) -> None:
        self.service.finish()


SINKS: dict[str, Any] = {name: partial(Service, name) for name in ("trackio", "wandb")}
SINKS["tensorboard"] = TensorBoard
