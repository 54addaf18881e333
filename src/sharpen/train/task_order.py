"""Which tasks come next in online training. Group sources call it.

An order picks tasks, hears how they went, and can be saved and continued: what it picks follows
from the seed, from what it picked before, and from what was reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from sharpen.scored_rollout import TrajectoryGroup
from sharpen.train.batching import epoch_order
from sharpen.train.curriculum import Curriculum
from sharpen.train.self_play import SelfPlay
from sharpen.types import Json, Task


class TaskOrder(Protocol):
    """The order in which tasks are sampled."""

    def pick(self, count: int) -> list[Task]:
        """Returns the next tasks, at most `count`."""
        ...

    def update(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Report the scored samples of picked tasks."""
        ...

    def state(self) -> Json: ...

    def load_state(self, state: Json) -> None: ...


class EpochOrder:
    """An endless order of the tasks, shuffled anew in every epoch."""

    def __init__(self, tasks: Sequence[Task], seed: int):
        self.tasks = tasks
        self.seed = seed
        self.position = 0

    def pick(self, count: int) -> list[Task]:
        """Returns the next tasks of the order."""
        picked = []
        for place in range(self.position, self.position + count):
            epoch, index = divmod(place, len(self.tasks))
            order = _epoch_order(len(self.tasks), self.seed, epoch)
            picked.append(self.tasks[order[index]])
        self.position += count
        return picked

    def update(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Nothing depends on how the tasks went."""

    def state(self) -> Json:
        return {"position": self.position}

    def load_state(self, state: Json) -> None:
        self.position = state["position"]


@lru_cache(maxsize=4)
def _epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """The shuffled indices of an epoch; tasks are not told apart by type."""
    return epoch_order(("",) * count, seed, epoch)


class CurriculumOrder:
    """Tasks by measured pass rate: those that are solved now and then come more often."""

    def __init__(self, tasks: Sequence[Task], seed: int):
        self.curriculum = Curriculum(tasks, seed)

    def pick(self, count: int) -> list[Task]:
        """Returns different tasks, drawn by their pass rates."""
        return self.curriculum.pick(min(count, len(self.curriculum.tasks)))

    def update(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Report the share of each task's samples that solved it."""
        ids = []
        pass_rates = []
        for group in groups:
            if not group.samples or group.task.id not in self.curriculum.tasks:
                continue
            solved = 0
            for sample in group.samples:
                solved += bool(sample.score and sample.score.is_solved)
            ids.append(group.task.id)
            pass_rates.append(solved / len(group.samples))
        self.curriculum.update(ids, pass_rates)

    def state(self) -> Json:
        return self.curriculum.state()

    def load_state(self, state: Json) -> None:
        self.curriculum.load_state(state)


class SelfPlayOrder:
    """For a share of the tasks the policy proposes tasks; half of the others are what it proposed
    before and can be learnt from. The rest comes from the run's own tasks."""

    def __init__(self, self_play: SelfPlay, share: float, own_tasks: TaskOrder):
        self.self_play = self_play
        self.share = share
        self.own_tasks = own_tasks

    def pick(self, count: int) -> list[Task]:
        """Returns prompts for the proposer, then its own earlier proposals, then other tasks."""
        proposals = self.self_play.propose(round(count * self.share))
        half_of_others = (count - len(proposals)) // 2
        newest_first = self.self_play.learnable()[::-1]
        tasks = proposals + newest_first[:half_of_others]
        return tasks + self.own_tasks.pick(count - len(tasks))

    def update(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Report to the order of the run's own tasks."""
        self.own_tasks.update(groups)

    def state(self) -> Json:
        return {"self_play": self.self_play.state(), "own_tasks": self.own_tasks.state()}

    def load_state(self, state: Json) -> None:
        self.self_play.load_state(state["self_play"])
        self.own_tasks.load_state(state["own_tasks"])
