"""Where the samples of a step come from. `OnlineTrainer` asks a `GroupSource` for each step's
groups; whether they were sampled here or elsewhere makes no difference to the loop.

`LocalGroupSource` samples with the learner's own model while the learner waits;
`async_sampler.AsyncGroupSource` samples ahead in a thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

from sharpen.scored_rollout import PlaySettings, TrajectoryGroup, play, score_groups
from sharpen.train.task_order import TaskOrder
from sharpen.types import Json, Policy, Task, TokenPolicy

_MAX_SEED = 1 << 32


@dataclass(frozen=True, slots=True)
class SampledStep:
    """The groups that a step trains on, and figures of their sampling for the metrics."""

    groups: list[TrajectoryGroup]
    figures: Json


class GroupSource(Protocol):
    """Gives each step its groups. Use it as a context manager: it may hold threads."""

    def next(self, step: int) -> SampledStep:
        """Returns the groups for the update after `step` steps are done."""
        ...

    def publish(self, step: int) -> None:
        """Sample from the weights after `step` steps from now on."""
        ...

    def state(self) -> Json:
        """Returns where sampling continues after the groups that `next` returned last."""
        ...

    def load_state(self, state: Json) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *failure: object) -> None: ...


class LocalGroupSource:
    """Samples from a policy in this process, which reads the learner's weights where they are."""

    def __init__(
        self,
        policy: Policy | TokenPolicy,
        order: TaskOrder,
        how: PlaySettings,
        tasks_per_step: int,
        seed: int,
        refill_rounds: int = 0,
    ):
        self.policy = policy
        self.order = order
        self.how = how
        self.tasks_per_step = tasks_per_step
        self.seed = seed
        self.refill_rounds = refill_rounds
        self.position = 0  # tasks sampled so far in the run

    def next(self, step: int) -> SampledStep:
        """Sample a step's tasks. Flat groups are followed by groups of further tasks, in at most
        `refill_rounds` rounds."""
        groups: list[TrajectoryGroup] = []
        rollout_seconds = 0.0
        reward_seconds = 0.0
        for _ in range(1 + self.refill_rounds):
            lively = sum(not group.flat for group in groups)
            tasks = self.order.pick(self.tasks_per_step - lively)
            if not tasks:
                break
            seed = (self.seed * 1_000_003 + self.position) % _MAX_SEED
            self.position += len(tasks)
            sampled = _sample(self.policy, tasks, self.how, seed)
            groups += sampled.groups
            rollout_seconds += sampled.rollout_seconds
            reward_seconds += sampled.reward_seconds
            self.order.update(sampled.groups)
        tokens = _count_tokens(groups)
        figures: Json = {
            "rollout_seconds": rollout_seconds,
            "reward_seconds": reward_seconds,
            "rollout_tokens_per_s": tokens / max(rollout_seconds, 1e-9),
        }
        return SampledStep(groups, figures)

    def publish(self, step: int) -> None:
        """Nothing to do: the policy reads the learner's own weights."""

    def state(self) -> Json:
        return {"position": self.position, "order": self.order.state()}

    def load_state(self, state: Json) -> None:
        self.position = state["position"]
        self.order.load_state(state["order"])

    def __enter__(self) -> LocalGroupSource:
        return self

    def __exit__(self, *failure: object) -> None:
        """Nothing to end."""


@dataclass(frozen=True, slots=True)
class _Sampled:
    """The groups of some tasks and the time that they took."""

    groups: list[TrajectoryGroup]
    rollout_seconds: float
    reward_seconds: float


def _sample(
    policy: Policy | TokenPolicy, tasks: Sequence[Task], how: PlaySettings, seed: int
) -> _Sampled:
    """Play and score the tasks with a seed of their own."""
    how = with_seed(how, seed)
    started = time.monotonic()
    trajectories = play(policy, tasks, how)
    played = time.monotonic()
    groups = score_groups(tasks, trajectories, how)
    return _Sampled(groups, played - started, time.monotonic() - played)


def with_seed(how: PlaySettings, seed: int) -> PlaySettings:
    """Returns the same settings with another seed of sampling."""
    return replace(how, sampling=replace(how.sampling, seed=seed))


def _count_tokens(groups: Sequence[TrajectoryGroup]) -> int:
    tokens = 0
    for group in groups:
        for sample in group.samples:
            tokens += sum(len(turn.ids) for turn in sample.turns)
    return tokens
