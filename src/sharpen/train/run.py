"""What every training loop does around its steps: the run folder, metrics, checkpoints, signals and
the display. The trainers use it like this:

    with TrainingRun(output, config, learner) as run:
        state = run.resume({})
        while learner.steps_done < learner.total_steps:
            row = …                      # one step of the method
            run.end_of_step(row, state)

Of several processes the first writes; the others only take part where weights are gathered.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from sharpen.records import RunFolder, write_jsonl
from sharpen.report.runs import write_report
from sharpen.train.checkpoint import (
    NO_OTHERS,
    OtherLearners,
    load_last_checkpoint,
    save_checkpoint,
)
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
    metrics row stands for `updates` optimiser steps; `others` are saved and restored with the
    learner."""

    folder: RunFolder
    display: Display

    def __init__(
        self,
        path: str | Path,
        config: Any,
        learner: Learner,
        updates: int = 1,
        others: OtherLearners = NO_OTHERS,
    ):
        self.path = Path(path)
        self.config = config
        self.learner = learner
        self.total = learner.total_steps // updates  # metrics rows of the whole run
        self.first = learner.processes.rank == 0  # whether this process writes
        self._updates = updates
        self._others = others

    def __enter__(self) -> TrainingRun:
        with contextlib.ExitStack() as stack:
            self._signal = stack.enter_context(_SignalFlag())
            tracker_names = self.config.report_to if self.first else ()
            settings = self.config.model_dump(mode="json")
            self._trackers = stack.enter_context(Trackers(tracker_names, self.path, settings))
            self._exits = stack.pop_all()
        return self

    def __exit__(self, *failure: object) -> None:
        self._exits.close()
        if self.first and not any(failure):
            write_report(self.path)

    def resume(self, state: Json) -> Json:
        """Restore the learner from the last good checkpoint and return the loop's own state from
        it; without a checkpoint return `state`."""
        learner = self.learner
        checkpoints = self.path / "checkpoints"
        state = load_last_checkpoint(checkpoints, learner, self._others) or state
        if not self.first:
            return state
        done = learner.steps_done // self._updates
        self.folder = RunFolder(self.path, self.config)
        _rewind_metrics(self.folder, done)
        if not learner.processes.resumable:
            print(
                f"parallel={learner.config.parallel}: no checkpoints, a run that is stopped "
                "cannot continue"
            )
        if done:
            print(f"continuing after step {done} of {self.total}")
        flops = flops_per_token(learner.model)
        self.display = self._exits.enter_context(Display(self.total, done, flops, learner.device))
        return state

    def end_of_step(self, row: Json, state: Json, show: bool = False) -> None:
        """Record the step's metrics row; save if it is time, after the last step, or if a signal
        came."""
        step = row["step"]
        is_last = step == self.total
        if self.first:
            # Before the checkpoint: a row too many can be taken back, one too few is lost.
            self.folder.log(row)
            self._trackers.log(row)
        signal_number = self.learner.processes.highest(self._signal.number)
        save_now = step % self.config.save_steps == 0 or is_last or signal_number != 0
        if save_now and self.learner.processes.resumable:
            save_checkpoint(
                self.path / "checkpoints",
                self.learner,
                state,
                self.config.keep_checkpoints,
                self._others,
            )
        if self.first:
            self.display.show(row, always=is_last or show)
        if signal_number:
            raise Interrupted(signal_number)


def first_process() -> bool:
    """Whether this is the process that writes. The launcher says it in RANK, before the processes
    have joined."""
    return os.environ.get("RANK", "0") == "0"


class _SignalFlag:
    """Remembers SIGINT and SIGTERM until the step is done and saved; a second one ends the process
    at once. After the `with` block, signals are handled as before it."""

    def __enter__(self) -> _SignalFlag:
        self.number = 0  # of the signal that came
        self._handlers = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *failure: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: Any) -> None:
        self.number = number
        signal.signal(number, signal.SIG_DFL)


def _rewind_metrics(run: RunFolder, step: int) -> None:
    """Drop the metrics of steps that the checkpoint does not hold: they are made again."""
    rows = run.metrics()
    rows_so_far = [row for row in rows if row["step"] <= step]
    if len(rows_so_far) < len(rows):
        write_jsonl(run.metrics_file, rows_so_far)
