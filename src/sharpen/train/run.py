"""What every training loop does around its steps: the run folder, metrics, checkpoints, signals and
what is shown.

    with TrainingRun(output, config, learner) as run:
        state = run.resume({})
        while learner.steps_done < learner.total_steps:
            row = …                      # one step of the method
            run.end_of_step(row, state)

Of several processes the first writes; the others only take part where weights come together.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from sharpen.records import RunFolder, write_jsonl
from sharpen.report.runs import write_report
from sharpen.train.checkpoint import EMPTY, Others, load_last_checkpoint, save_checkpoint
from sharpen.train.display import Display, flops_per_token
from sharpen.train.learner import Learner
from sharpen.train.trackers import Trackers
from sharpen.types import Json, SharpenError


class Interrupted(SharpenError):
    """SIGINT or SIGTERM came; the state is saved."""

    def __init__(self, number: int):
        name = signal.Signals(number).name
        super().__init__(f"stopped by {name}, saved; the same command continues")
        self.exit_code = 128 + number


class TrainingRun:
    """A run in its folder. `config` has the fields save_steps, keep_checkpoints and report_to. A
    row stands for `updates` optimiser steps; `others` are saved and restored with the learner."""

    def __init__(
        self,
        path: str | Path,
        config: Any,
        learner: Learner,
        updates: int = 1,
        others: Others = EMPTY,
    ):
        self.path, self.config, self.learner = Path(path), config, learner
        self.updates, self.others, self.total = updates, others, learner.total_steps // updates
        self.first = learner.processes.rank == 0

    def __enter__(self) -> TrainingRun:
        with contextlib.ExitStack() as stack:
            self.stop = stack.enter_context(SignalFlag())
            names = self.config.report_to if self.first else ()
            settings = self.config.model_dump(mode="json")
            self.trackers = stack.enter_context(Trackers(names, self.path, settings))
            self.exits = stack.pop_all()
        return self

    def __exit__(self, *failure: object) -> None:
        self.exits.close()
        if self.first and not any(failure):
            write_report(self.path)

    def resume(self, state: Json) -> Json:
        """The loop's own state from the last good checkpoint, which the learner takes up; else
        `state`."""
        learner = self.learner
        state = load_last_checkpoint(self.path / "checkpoints", learner, self.others) or state
        done, total = learner.steps_done // self.updates, self.total
        if self.first:
            self.folder = RunFolder(self.path, self.config)
            rewind(self.folder, done)
            if not learner.processes.resumable:
                print(f"parallel={learner.config.parallel}: no checkpoints, a stop is an end")
            if done:
                print(f"continuing behind step {done} of {total}")
            flops = flops_per_token(learner.model)
            self.display = self.exits.enter_context(Display(total, done, flops, learner.device))
        return state

    def end_of_step(self, row: Json, state: Json, show: bool = False) -> None:
        """Record the step; save when it is time, when it was the last, or when a signal came."""
        step, last = row["step"], row["step"] == self.total
        if self.first:
            # before the checkpoint: a row too many is taken back, one too few is lost
            self.folder.log(row)
            self.trackers.log(row)
        number = self.learner.processes.agreed(self.stop.number)
        due = step % self.config.save_steps == 0 or last or number
        if due and self.learner.processes.resumable:
            folder, keep = self.path / "checkpoints", self.config.keep_checkpoints
            save_checkpoint(folder, self.learner, state, keep, self.others)
        if self.first:
            self.display.show(row, always=last or show)
        if number:
            raise Interrupted(number)


def first_process() -> bool:
    """Known before the processes have met: the launcher says it."""
    return os.environ.get("RANK", "0") == "0"


class SignalFlag:
    """Remembers SIGINT and SIGTERM until the step is done and saved; a second one ends at once.

    Outside the `with` block signals mean what they meant before.
    """

    def __enter__(self) -> SignalFlag:
        self.number = 0
        self.before = {n: signal.signal(n, self.remember) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *failure: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def remember(self, number: int, frame: Any) -> None:
        self.number = number
        signal.signal(number, signal.SIG_DFL)


def rewind(run: RunFolder, step: int) -> None:
    """Drop metrics of steps that the checkpoint does not hold: they are about to be made again."""
    rows = run.metrics()
    kept = [row for row in rows if row["step"] <= step]
    if len(kept) < len(rows):
        write_jsonl(run.metrics_file, kept)
