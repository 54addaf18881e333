"""From sampled trajectories to training rows: scored groups, and exactly the ids that were sampled.

What cannot be scored, or says nothing, is counted and never trained on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sharpen.config import raised
from sharpen.rewards.agent import AgentRewardModel
from sharpen.rewards.compose import as_score
from sharpen.rewards.verifiable import VERIFIERS, VerifiableRewardCalculator
from sharpen.train.advantages import FLAT
from sharpen.types import (
    Datum,
    Json,
    Message,
    Reward,
    Score,
    SharpenError,
    StopReason,
    Task,
    Trajectory,
    Turn,
)

# not the model's doing: such an episode says nothing about it
UNTRUE = (StopReason.ENVIRONMENT_ERROR, StopReason.POLICY_ERROR, StopReason.CANCELLED)
Shape = Callable[[Trajectory], float]  # added to a trajectory's score


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The samples of one task that have a score, their rewards, and why others have none."""

    task: Task
    samples: list[Trajectory]
    rewards: np.ndarray
    dropped: list[str] = field(default_factory=list)

    @property
    def flat(self) -> bool:
        """Nothing can be learnt from samples that are all equally good."""
        return flat(self.rewards)


def flat(rewards: np.ndarray) -> bool:
    return len(rewards) < 2 or float(np.ptp(rewards)) < FLAT


@dataclass(frozen=True, slots=True)
class GroupScorer:
    """A reward with what else decides whether a sample is trained on: why it ended, and its
    length. `shape` is added to a score for training and not reported as reward."""

    reward: Reward
    excluded_stops: Sequence[StopReason] = ()
    max_length: int = 0  # of an episode; 0: any
    workers: int = 1
    shape: Shape | None = None

    def groups(self, tasks: Sequence[Task], trajectories: Sequence[Trajectory]) -> list[Group]:
        """Each task's samples lie side by side in `trajectories`, equally many a task."""
        size, groups = len(trajectories) // len(tasks), []
        repeated = [task for task in tasks for _ in range(size)]
        with ThreadPoolExecutor(self.workers) as threads:
            found = list(threads.map(self.judged, repeated, trajectories))
        for number, task in enumerate(tasks):
            part = slice(number * size, (number + 1) * size)
            pairs = [*zip(found[part], trajectories[part], strict=True)]
            kept = [replace(made, score=s) for s, made in pairs if isinstance(s, Score)]
            rewards = [s.score.value + (self.shape(s) if self.shape else 0.0) for s in kept]  # type: ignore[union-attr]
            dropped = [s for s, _ in pairs if isinstance(s, str)]
            groups.append(Group(task, kept, np.array(rewards, np.float64), dropped))
        return groups

    def judged(self, task: Task, trajectory: Trajectory) -> Score | str:
        """The score, or why there is none."""
        last = trajectory.turns[-1] if trajectory.turns else Turn(Message("assistant"))
        length, limit = len(last.prompt_ids) + len(last.ids), self.max_length
        if trajectory.stop in (*UNTRUE, *self.excluded_stops):
            told = trajectory.metadata.get("error") or last.error or "not to be trained on"
            return f"{trajectory.stop.value}: {told}"[:300]
        if not any(turn.ids for turn in trajectory.turns):
            return f"{trajectory.stop.value}: nothing was sampled: {last.error or 'no turn'}"[:300]
        if limit and length > limit:
            return f"length: {length} tokens, over max_length {limit}"
        try:
            score = as_score(self.reward.score(task, trajectory))
        except Exception as error:  # a user's code may raise anything: the sample goes, counted
            return f"reward: {raised(error)}"[:300]
        return f"reward: {score.feedback}"[:300] if score.parts.get("failed") else score


class TaskReward:
    """By the task's kind: what can be verified, else the agent's."""

    def __init__(self, workers: int = 1):
        self.verifiable = VerifiableRewardCalculator(workers=workers)
        self.agent = AgentRewardModel()

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        verified = task.kind in VERIFIERS or task.kind == "tool_state"
        return (self.verifiable if verified else self.agent).score(task, trajectory)

    def close(self) -> None:
        self.verifiable.close()


def trajectory_to_datums(trajectory: Trajectory) -> list[Datum]:
    """The ids that the model saw, those that it sampled marked. One row, as long as every prompt
    begins with the one before it and its answer; else a new one from there."""
    runs: list[list[Turn]] = []
    for turn in trajectory.turns:
        if not turn.ids:
            continue
        if not turn.prompt_ids:
            raise SharpenError(f"task {trajectory.task_id}: its policy gives no ids to train on")
        before = (*runs[-1][-1].prompt_ids, *runs[-1][-1].ids) if runs else turn.prompt_ids
        if runs and turn.prompt_ids[: len(before)] == before:
            runs[-1].append(turn)
        else:
            runs.append([turn])
    return [joined(run, trajectory.task_id) for run in runs]


def joined(turns: Sequence[Turn], name: str) -> Datum:
    ids = np.array([*turns[-1].prompt_ids, *turns[-1].ids], np.int32)
    mask, logprobs_T = np.zeros(len(ids), bool), np.zeros(len(ids), np.float32)
    known = all(len(turn.logprobs) == len(turn.ids) for turn in turns)
    for turn in turns:
        start, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.ids)
        mask[start:end] = True
        if known:
            logprobs_T[start:end] = turn.logprobs
    return Datum(ids, mask, name, columns={"sampler": logprobs_T[mask]} if known else {})


def rows_of(groups: Sequence[Group]) -> tuple[list[Datum], np.ndarray, np.ndarray]:
    """All samples' rows, the number of the sample that each belongs to, and how many trained
    tokens each sample has."""
    made = [trajectory_to_datums(sample) for group in groups for sample in group.samples]
    owners = np.repeat(np.arange(len(made)), [len(rows) for rows in made])
    lengths = np.array([sum(int(row.mask.sum()) for row in rows) for rows in made])
    return [row for rows in made for row in rows], owners, lengths


def counted(rows: Sequence[Datum]) -> list[Datum]:
    """Rows that say the same and are equally good become one that weighs as much as they."""
    found: dict[Any, list[Datum]] = {}
    for row in rows:
        key = row.ids.tobytes(), row.mask.tobytes(), row.columns["advantage"].tobytes()
        found.setdefault(key, []).append(row)
    return [replace(same[0], weight=sum(row.weight for row in same)) for same in found.values()]


def with_columns(rows: Sequence[Datum], **columns: Any) -> list[Datum]:
    """The rows with a further column each, given as one array a row (or a number for all of its
    tokens)."""
    found = []
    for number, row in enumerate(rows):
        count = int(row.mask.sum())
        added = {
            n: np.broadcast_to(np.float32(values[number]), count) for n, values in columns.items()
        }
        found.append(replace(row, columns={**row.columns, **added}))
    return found


def figures(groups: Sequence[Group]) -> Json:
    """What a step's metrics row says of its samples."""
    samples = [sample for group in groups for sample in group.samples]
    dropped = [reason for group in groups for reason in group.dropped]
    if not samples:
        raise SharpenError(f"no sample of the step could be scored: {reasons(dropped)}")
    turns = [turn for sample in samples for turn in sample.turns]
    lengths = [sum(len(turn.ids) for turn in sample.turns) for sample in samples]
    told: Json = {f"reward_{name}": value for name, value in means(samples).items() if name}
    told |= {
        "reward": means(samples)[""],
        "reward_std": float(np.std([sample.score.value for sample in samples if sample.score])),
        "samples": len(samples),
        "dropped": len(dropped),
        "turns": len(turns) / len(samples),
        "length": float(np.mean(lengths)),
        "longest": max(lengths),
    }
    if dropped:
        told["dropped_why"] = reasons(dropped)
    stops = Counter(sample.stop.value for sample in samples)
    return told | {f"stop_{name}": count for name, count in sorted(stops.items())}


def reasons(dropped: Sequence[str]) -> str:
    """Why samples were dropped, the first of each kind: one must not hide another."""
    kinds = Counter(reason.partition(":")[0] for reason in dropped).most_common()
    firsts = [next(r for r in dropped if r.partition(":")[0] == kind) for kind, _ in kinds]
    if len(kinds) == 1:
        return firsts[0]
    return "; ".join(f"{n} {first}" for (_, n), first in zip(kinds, firsts, strict=True))


def means(samples: Sequence[Trajectory]) -> dict[str, float]:
    """The mean of the scores (under "") and of every part of them."""
    found: dict[str, list[float]] = {}
    for score in (sample.score for sample in samples if sample.score):
        for name, value in {"": score.value, **score.parts}.items():
            found.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in found.items() if name != "failed"}


def as_figures(found: float | Mapping[str, float]) -> dict[str, float]:
    """What an evaluation callback gave back: one number, or several by name."""
    named = found if isinstance(found, Mapping) else {"metric": found}
    return {name: float(value) for name, value in named.items()}
