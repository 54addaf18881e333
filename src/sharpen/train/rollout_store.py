"""Every scored trajectory of an online run, in `rollouts/step-NNNNNN.jsonl.gz`: one file per step,
one line per sample. `OnlineTrainer` writes it; `report/rollouts.py` reads and draws it.

The total size is bounded: the files of the oldest steps are removed first.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sharpen.records import atomic_write, dump_row
from sharpen.report.rollouts import ROLLOUTS, rollout_files, step_of_file
from sharpen.rows import message_to_wire
from sharpen.scored_rollout import TrajectoryGroup
from sharpen.types import Json, Message, Task, Trajectory, Turn

_LOGPROB_DIGITS = 6
_COMPRESSION = 1  # the fastest: a step's rollouts are megabytes of text


class RolloutStore:
    """Writes the rollouts of a run. `max_mb` of 0 stores nothing."""

    def __init__(self, output: Path, max_mb: int):
        self.folder = output / ROLLOUTS
        self.max_bytes = max_mb << 20

    def write(
        self,
        step: int,
        groups: Sequence[TrajectoryGroup],
        advantages: Sequence[np.ndarray | None],
    ) -> None:
        """Store the samples of a step. `advantages` has one array per group, or None."""
        if not self.max_bytes:
            return
        path = self.folder / f"step-{step:06d}.jsonl.gz"
        with (
            atomic_write(path) as file,
            # no name and no time: equal rollouts are equal files
            gzip.GzipFile("", "wb", _COMPRESSION, file, mtime=0) as packed,
        ):
            for group, group_advantages in zip(groups, advantages, strict=True):
                for number, sample in enumerate(group.samples):
                    row = _row(step, group.task, sample, float(group.rewards[number]))
                    if group_advantages is not None:
                        row["advantage"] = float(group_advantages[number])
                    # half a surrogate pair in a model's text must not end the run
                    packed.write(dump_row(row).encode("utf-8", "replace") + b"\n")
        self._remove_oldest()

    def rewind(self, step: int) -> None:
        """Remove the rollouts of steps that the checkpoint does not hold."""
        for path in rollout_files(self.folder.parent):
            if step_of_file(path) > step:
                path.unlink()

    def _remove_oldest(self) -> None:
        """Keep within the size limit; the newest step always stays."""
        files = rollout_files(self.folder.parent)
        size = sum(path.stat().st_size for path in files)
        for path in files[:-1]:
            if size <= self.max_bytes:
                return
            size -= path.stat().st_size
            path.unlink()


def _row(step: int, task: Task, sample: Trajectory, training_reward: float) -> Json:
    """One stored sample."""
    assert sample.score is not None
    messages: list[Message] = [*task.messages]
    for turn in sample.turns:
        messages.append(turn.message)
        messages.extend(turn.results)
    return {
        "step": step,
        "task": task.id,
        "instruction": task.instruction,
        "stop": sample.stop.value,
        "reward": sample.score.value,
        "training_reward": training_reward,  # with shaping
        "solved": sample.score.is_solved,
        "parts": dict(sample.score.parts),
        "feedback": sample.score.feedback,
        "messages": [message_to_wire(message) for message in messages],
        "turns": [_turn_row(turn) for turn in sample.turns],
    }


def _turn_row(turn: Turn) -> Json:
    """The ids that the model saw and sampled in a turn."""
    return {
        "prompt_ids": list(turn.prompt_ids),
        "ids": list(turn.ids),
        "logprobs": [_rounded(value) for value in turn.logprobs],
    }


def _rounded(value: float) -> float | None:
    """A short number; JSON has no infinity."""
    return round(value, _LOGPROB_DIGITS) if math.isfinite(value) else None
