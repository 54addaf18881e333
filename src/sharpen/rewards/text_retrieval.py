"""The reward of finding a value in a long text."""

from __future__ import annotations

from sharpen.rewards.math import normalize_text
from sharpen.types import Score, Task, Trajectory

_MAX_EXTRA_CHARACTERS = 400  # that may stand around the value


class TextRetrievalReward:
    """1 if a short answer holds the value that was sought."""

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        text = trajectory.turns[-1].message.content if trajectory.turns else ""
        value = max((str(answer) for answer in task.gold["answers"]), key=len)
        is_short = len(text) <= len(value) + _MAX_EXTRA_CHARACTERS
        right = is_short and normalize_text(value) in normalize_text(text)
        feedback = "" if right else "the value is not in the answer, or not alone"
        return Score(float(right), {"right": float(right)}, feedback, solved=right)
