"""Curriculum by measured pass rate: tasks that are solved now and then are drawn more often than
those that are always or never solved, for only differences within a group teach anything.

A task nobody tried yet is taken to be as hard as others of its kind and difficulty. What is drawn
follows from the seed, the number of draws and what was reported, all of which `state` holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sharpen.types import Json, SharpenError, Task

EASY, HARD = 0.8, 0.2  # pass rates between which all tasks are equally welcome
LEAST = 0.05  # of a weight: what was out of reach may come within it
LATEST = 0.25  # of a running rate: the share that the newest report has at least
UNKNOWN = 0.5  # the rate of a level that nobody tried yet
PRIOR = 0.5  # so many reports a level's rate counts for in its tasks' rates

Running = dict[str, tuple[float, int]]  # name → rate, reports


class Curriculum:
    """`pick` tasks for a step, `update` with the share of each one's samples that passed."""

    def __init__(self, tasks: Sequence[Task], seed: int = 0):
        self.tasks, self.seed, self.draws = {task.id: task for task in tasks}, seed, 0
        if len(self.tasks) < len(tasks) or not tasks:
            raise SharpenError("curriculum: tasks need ids of their own, and there must be some")
        self.by_task: Running = {}
        self.by_level: Running = {}

    def rate(self, task: Task) -> float:
        """How often the task is solved, as far as is known."""
        usual, _ = self.by_level.get(level(task), (UNKNOWN, 0))
        own, reports = self.by_task.get(task.id, (0.0, 0))
        return (own * reports + usual * PRIOR) / (reports + PRIOR)

    def pick(self, count: int) -> list[Task]:
        """Different tasks, each with a chance by its rate."""
        if count > len(self.tasks):
            raise SharpenError(f"curriculum: {count} tasks a step, but there are {len(self.tasks)}")
        tasks = list(self.tasks.values())
        weights_N = np.array([welcome(self.rate(task)) for task in tasks])
        chances_N = np.random.default_rng([self.seed % (1 << 62), self.draws]).random(len(tasks))
        self.draws += 1
        # the largest of these are a weighted draw without repetition
        keys_N = np.log(np.maximum(chances_N, 1e-300)) / weights_N
        return [tasks[at] for at in np.argsort(-keys_N, kind="stable")[:count]]

    def update(self, ids: Sequence[str], rates: Sequence[float]) -> None:
        """Report what share of each task's samples passed."""
        for name, rate in zip(ids, rates, strict=True):
            if name not in self.tasks or not (math.isfinite(rate) and 0 <= rate <= 1):
                raise SharpenError(f"curriculum: task {name!r} cannot have the pass rate {rate}")
            follow(self.by_task, name, float(rate))
            follow(self.by_level, level(self.tasks[name]), float(rate))

    def state(self) -> Json:
        return {"draws": self.draws, "by_task": {**self.by_task}, "by_level": {**self.by_level}}

    def load_state(self, state: Json) -> None:
        self.draws = state["draws"]
        self.by_task, self.by_level = (
            {name: (rate, reports) for name, (rate, reports) in state[part].items()}
            for part in ("by_task", "by_level")
        )


def level(task: Task) -> str:
    return f"{task.kind} {task.difficulty}"


def welcome(rate: float) -> float:
    """1 between HARD and EASY, falling to LEAST where nothing can be learnt."""
    reach = min(rate / HARD, (1 - rate) / (1 - EASY), 1.0)
    return LEAST + (1 - LEAST) * max(reach, 0.0)


def follow(running: Running, name: str, rate: float) -> None:
    """A mean at first; later one that forgets, for the policy moves."""
    before, reports = running.get(name, (0.0, 0))
    running[name] = before + (rate - before) * max(LATEST, 1 / (reports + 1)), reports + 1
