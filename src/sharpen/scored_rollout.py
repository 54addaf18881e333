"""The one way to play and score tasks. RL, dev evaluation, pair sampling, self-play and benchmarks
all call it, so that an answer is played, judged and counted in the same way everywhere.

    play(policy, tasks, how)            → trajectories
    score_groups(tasks, played, how)    → groups of scored trajectories
    play_and_score(policy, tasks, how)  → both
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from sharpen.config import format_exception
from sharpen.envs.perturb import Perturbation, PerturbedEnvironment
from sharpen.kinds import KindEnvironment
from sharpen.rewards.compose import as_score
from sharpen.rollout import rollout
from sharpen.types import (
    MakeEnvironment,
    Policy,
    Reward,
    Sampling,
    Score,
    StopReason,
    Task,
    TokenPolicy,
    Trajectory,
)

# such an episode says nothing about the model
NOT_THE_MODELS_FAULT = (
    StopReason.ENVIRONMENT_ERROR,
    StopReason.POLICY_ERROR,
    StopReason.CANCELLED,
)
FLAT = 1e-8  # rewards closer than this are equal
_MAX_REASON = 300  # characters of why a sample was dropped


@dataclass(frozen=True, slots=True)
class PlaySettings:
    """How tasks are played and which of the samples count."""

    reward: Reward
    sampling: Sampling
    make_environment: MakeEnvironment = KindEnvironment
    max_turns: int = 0  # of an episode; 0: each kind's own limit
    samples: int = 1  # per task
    perturbation: Perturbation | None = None
    reward_workers: int = 1  # threads
    excluded_stops: tuple[StopReason, ...] = NOT_THE_MODELS_FAULT
    max_length: int = 0  # tokens of an episode; 0: any
    # added to a score for training; not reported as reward
    shape: Callable[[Trajectory], float] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TrajectoryGroup:
    """The samples of one task that have a score, their rewards for training (score and shaping),
    and why other samples have no score."""

    task: Task
    samples: list[Trajectory]
    rewards: np.ndarray
    dropped: list[str] = field(default_factory=list)

    @property
    def flat(self) -> bool:
        """Whether all samples are equally good, so that nothing can be learnt from them."""
        return is_flat(self.rewards)


def is_flat(rewards: np.ndarray) -> bool:
    """Whether rewards do not differ."""
    return len(rewards) < 2 or float(np.ptp(rewards)) < FLAT


def play_and_score(
    policy: Policy | TokenPolicy, tasks: Sequence[Task], how: PlaySettings
) -> list[TrajectoryGroup]:
    """Returns one group of scored samples per task."""
    return score_groups(tasks, play(policy, tasks, how), how)


def play(
    policy: Policy | TokenPolicy, tasks: Sequence[Task], how: PlaySettings
) -> list[Trajectory]:
    """Returns `how.samples` trajectories per task; the samples of a task lie side by side.

    Perturbation is on the environment's side: the policy sees the changed tools and words, the
    trajectory holds what it meant in the original ones, and the ids stay as they were sampled.
    """
    repeated = [task for task in tasks for _ in range(how.samples)]
    started = time.perf_counter()
    perturbation = how.perturbation
    if perturbation is None:
        trajectories = rollout(policy, repeated, how.make_environment, how.sampling, how.max_turns)
    else:

        def make_perturbed() -> PerturbedEnvironment:
            return PerturbedEnvironment(how.make_environment(), perturbation)

        shown = rollout(policy, repeated, make_perturbed, how.sampling, how.max_turns)
        trajectories = [perturbation.restore_trajectory(trajectory) for trajectory in shown]
    seconds = (time.perf_counter() - started) / max(len(repeated), 1)
    timed = []
    for trajectory in trajectories:
        metadata = trajectory.metadata | {"seconds": seconds}
        timed.append(replace(trajectory, metadata=metadata))
    return timed


def score_trajectories(
    tasks: Sequence[Task], trajectories: Sequence[Trajectory], reward: Reward
) -> list[Score]:
    """Returns the score of each trajectory; a reward that raises ends the evaluation. Rewards that
    can score many at once are asked once."""
    score_many = getattr(reward, "score_many", None)
    if score_many:
        return score_many(tasks, trajectories)
    pairs = zip(tasks, trajectories, strict=True)
    return [as_score(reward.score(task, trajectory)) for task, trajectory in pairs]


def score_groups(
    tasks: Sequence[Task], trajectories: Sequence[Trajectory], how: PlaySettings
) -> list[TrajectoryGroup]:
    """Returns the scored groups of trajectories whose samples of one task lie side by side."""
    size = len(trajectories) // len(tasks)
    repeated = [task for task in tasks for _ in range(size)]
    with ThreadPoolExecutor(how.reward_workers) as threads:
        outcomes = list(
            threads.map(
                lambda task, played: score_or_reason(task, played, how), repeated, trajectories
            )
        )
    groups = []
    for number, task in enumerate(tasks):
        part = slice(number * size, (number + 1) * size)
        groups.append(_group(task, trajectories[part], outcomes[part], how))
    return groups


def _group(
    task: Task,
    trajectories: Sequence[Trajectory],
    outcomes: Sequence[Score | str],
    how: PlaySettings,
) -> TrajectoryGroup:
    """One task's samples with their scores, and the reasons of those without."""
    samples = []
    rewards = []
    dropped = []
    for trajectory, outcome in zip(trajectories, outcomes, strict=True):
        if isinstance(outcome, str):
            dropped.append(outcome)
            continue
        sample = replace(trajectory, score=outcome)
        samples.append(sample)
        shaping = how.shape(sample) if how.shape else 0.0
        rewards.append(outcome.value + shaping)
    return TrajectoryGroup(task, samples, np.array(rewards, np.float64), dropped)


def score_or_reason(task: Task, trajectory: Trajectory, how: PlaySettings) -> Score | str:
    """Returns the score of a trajectory, or why it has none."""
    reason = _reason_to_drop(trajectory, how)
    if reason:
        return reason[:_MAX_REASON]
    try:
        score = as_score(how.reward.score(task, trajectory))
    except Exception as error:  # a user's code may raise anything: the sample goes, counted
        return f"reward: {format_exception(error)}"[:_MAX_REASON]
    if score.parts.get("failed"):
        return f"reward: {score.feedback}"[:_MAX_REASON]
    return score


def _reason_to_drop(trajectory: Trajectory, how: PlaySettings) -> str:
    """Why a trajectory cannot be scored or trained on; "" if it can."""
    stop = trajectory.stop
    last = trajectory.turns[-1] if trajectory.turns else None
    last_error = last.error if last else ""
    if stop in how.excluded_stops:
        reason = trajectory.metadata.get("error") or last_error or "not to be trained on"
        return f"{stop.value}: {reason}"
    if last is None or not any(turn.ids for turn in trajectory.turns):
        return f"{stop.value}: nothing was sampled: {last_error or 'no turn'}"
    length = len(last.prompt_ids) + len(last.ids)
    if how.max_length and length > how.max_length:
        return f"length: {length} tokens, over max_length {how.max_length}"
    return ""


def summarize_reasons(dropped: Sequence[str]) -> str:
    """Returns why samples were dropped, the first of each kind: one must not hide another."""
    counts = Counter(reason.partition(":")[0] for reason in dropped).most_common()
    firsts = []
    for kind, _ in counts:
        firsts.append(next(reason for reason in dropped if reason.partition(":")[0] == kind))
    if len(counts) == 1:
        return firsts[0]
    return "; ".join(f"{count} {first}" for (_, count), first in zip(counts, firsts, strict=True))


def mean_scores(samples: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the mean of the scores (under ""), of `solved`, and of every part of the scores."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        if sample.score is None:
            continue
        named: Mapping[str, float] = {
            "": sample.score.value,
            "solved": float(sample.score.is_solved),
            **sample.score.parts,
        }
        for name, value in named.items():
            values.setdefault(name, []).append(value)
    values.pop("failed", None)
    return {name: float(np.mean(numbers)) for name, numbers in values.items()}
