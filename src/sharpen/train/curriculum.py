"""Curriculum by measured pass rate: tasks that are solved sometimes are drawn more often than those
that are always or never solved, because only differences within a group teach anything.

RL with `curriculum: true` picks its tasks here. A task that nobody has tried yet is taken to be as
hard as others of its kind and difficulty. What is drawn follows from the seed, the number of draws
and the reported rates, all of which `state` holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sharpen.types import Json, SharpenError, Task

# between these pass rates all tasks have the same weight
_EASY_RATE = 0.8
_HARD_RATE = 0.2
MIN_WEIGHT = 0.05  # of any task: what is out of reach now may come within reach
_MIN_NEWEST_SHARE = 0.25  # of a running rate: the share that the newest report has at least
_UNKNOWN_RATE = 0.5  # the rate of a level that nobody has tried yet
_LEVEL_REPORTS = 0.5  # a level's rate counts as this many reports in its tasks' rates

_RunningRates = dict[str, tuple[float, int]]  # name → rate, number of reports


class Curriculum:
    """`pick` tasks for a step, then `update` with the share of each task's samples that passed."""

    def __init__(self, tasks: Sequence[Task], seed: int = 0):
        self.tasks = {task.id: task for task in tasks}
        if len(self.tasks) < len(tasks) or not tasks:
            raise SharpenError(
                f"curriculum: {len(tasks)} tasks with {len(self.tasks)} different ids; tasks need "
                "ids of their own, and there must be at least one"
            )
        self._seed = seed
        self._draws = 0
        self._by_task: _RunningRates = {}
        self._by_level: _RunningRates = {}

    def rate(self, task: Task) -> float:
        """Return the pass rate of the task, as far as it is known."""
        level_rate, _ = self._by_level.get(_level_of(task), (_UNKNOWN_RATE, 0))
        task_rate, reports = self._by_task.get(task.id, (0.0, 0))
        weighted_sum = task_rate * reports + level_rate * _LEVEL_REPORTS
        return weighted_sum / (reports + _LEVEL_REPORTS)

    def pick(self, count: int) -> list[Task]:
        """Draw different tasks, each with a chance by its rate."""
        if count > len(self.tasks):
            raise SharpenError(
                f"curriculum: {count} tasks per step, but there are {len(self.tasks)}; "
                "lower tasks_per_step"
            )
        tasks = list(self.tasks.values())
        weights_N = np.array([sampling_weight(self.rate(task)) for task in tasks])
        generator = np.random.default_rng([self._seed % (1 << 62), self._draws])
        uniform_N = generator.random(len(tasks))
        self._draws += 1
        # the largest keys are a weighted draw without repetition (Efraimidis and Spirakis)
        keys_N = np.log(np.maximum(uniform_N, 1e-300)) / weights_N
        largest_first = np.argsort(-keys_N, kind="stable")
        return [tasks[index] for index in largest_first[:count]]

    def update(self, ids: Sequence[str], rates: Sequence[float]) -> None:
        """Report what share of each task's samples passed."""
        for task_id, rate in zip(ids, rates, strict=True):
            is_valid = math.isfinite(rate) and 0 <= rate <= 1
            if task_id not in self.tasks or not is_valid:
                raise SharpenError(
                    f"curriculum: task {task_id!r} cannot have the pass rate {rate}; expected a "
                    "known task and a rate from 0 to 1"
                )
            _update_rate(self._by_task, task_id, float(rate))
            _update_rate(self._by_level, _level_of(self.tasks[task_id]), float(rate))

    def state(self) -> Json:
        return {
            "draws": self._draws,
            "by_task": dict(self._by_task),
            "by_level": dict(self._by_level),
        }

    def load_state(self, state: Json) -> None:
        self._draws = state["draws"]
        self._by_task = _rates_from_json(state["by_task"])
        self._by_level = _rates_from_json(state["by_level"])


def _level_of(task: Task) -> str:
    """Return the name of what is taken to be equally hard: tasks of one kind and difficulty."""
    return f"{task.kind} {task.difficulty}"


def sampling_weight(rate: float) -> float:
    """Return a task's weight in the draw: 1 between the hard and the easy rate, falling to
    `MIN_WEIGHT` at 0 and 1, where nothing can be learnt."""
    hard_side = rate / _HARD_RATE
    easy_side = (1 - rate) / (1 - _EASY_RATE)
    reach = min(hard_side, easy_side, 1.0)
    return MIN_WEIGHT + (1 - MIN_WEIGHT) * max(reach, 0.0)


def _update_rate(rates: _RunningRates, name: str, rate: float) -> None:
    """Add a report to a running rate: a mean at first, later one that forgets, because the policy
    changes."""
    rate_before, reports = rates.get(name, (0.0, 0))
    newest_share = max(_MIN_NEWEST_SHARE, 1 / (reports + 1))
    rates[name] = (rate_before + (rate - rate_before) * newest_share, reports + 1)


def _rates_from_json(value: Json) -> _RunningRates:
    """Return running rates whose pairs JSON has made lists."""
    return {name: (rate, reports) for name, (rate, reports) in value.items()}
