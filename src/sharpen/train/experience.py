"""From sampled trajectories to training rows: scored groups, and exactly the ids that were sampled.

What cannot be scored, or says nothing, is counted and never trained on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sharpen.config import one_line
from sharpen.rewards.compose import as_score
from sharpen.train.advantages import FLAT
from sharpen.types import Datum, Reward, Score, SharpenError, StopReason, Task, Trajectory, Turn

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


def scored(
    tasks: Sequence[Task],
    trajectories: Sequence[Trajectory],
    reward: Reward,
    shape: Shape | None = None,
) -> list[Group]:
    """Each task's samples lie side by side in `trajectories`, equally many a task."""
    size, groups = len(trajectories) // len(tasks), []
    for number, task in enumerate(tasks):
        kept, rewards, dropped = [], [], []
        for trajectory in trajectories[number * size : (number + 1) * size]:
            found = judged(task, trajectory, reward)
            if isinstance(found, str):
                dropped.append(found)
                continue
            kept.append(replace(trajectory, score=found))
            rewards.append(found.value + (shape(trajectory) if shape else 0.0))
        groups.append(Group(task, kept, np.array(rewards, np.float64), dropped))
    return groups


def judged(task: Task, trajectory: Trajectory, reward: Reward) -> Score | str:
    """The score, or why there is none."""
    if trajectory.stop in UNTRUE:
        told = (
            trajectory.metadata.get("error") or trajectory.turns[-1:] and trajectory.turns[-1].error
        )
        return f"{trajectory.stop.value}: {told or 'no reason given'}"
    if not any(turn.ids for turn in trajectory.turns):
        if trajectory.stop is StopReason.CONTEXT:
            length = len(trajectory.turns[0].prompt_ids)
            return f"context: the prompt of {length} tokens leaves no room for an answer"
        return f"{trajectory.stop.value}: nothing was sampled"
    try:
        score = as_score(reward.score(task, trajectory))
    except Exception as error:  # a user's code may raise anything; the sample goes, the run stays
        return f"reward: {type(error).__name__}: {one_line(error)}"[:300]
    return f"reward: {score.feedback}"[:300] if score.parts.get("failed") else score


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
    mask, columns = np.zeros(len(ids), bool), {}
    for turn in turns:
        mask[len(turn.prompt_ids) : len(turn.prompt_ids) + len(turn.ids)] = True
    if all(len(turn.logprobs) == len(turn.ids) for turn in turns):
        columns["sampler"] = np.array([p for turn in turns for p in turn.logprobs], np.float32)
    return Datum(ids, mask, name, columns=columns)


def with_columns(rows: Sequence[Datum], **columns: Sequence[Any]) -> list[Datum]:
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


def figures(groups: Sequence[Group]) -> dict[str, float]:
    """What a step's metrics row says of its samples."""
    samples = [sample for group in groups for sample in group.samples]
    values = [sample.score.value for sample in samples if sample.score]
    turns = [turn for sample in samples for turn in sample.turns]
    told = {
        "reward": float(np.mean(values)) if values else 0.0,
        "reward_std": float(np.std(values)) if values else 0.0,
        "samples": len(samples),
        "dropped": sum(len(group.dropped) for group in groups),
        "sampled_tokens": sum(len(turn.ids) for turn in turns),
        "turns": len(turns) / max(len(samples), 1),
    }
    stops = Counter(sample.stop.value for sample in samples)
    return told | {f"stop_{name}": count for name, count in stops.items()}


def means(groups: Sequence[Group]) -> dict[str, float]:
    """The mean of `reward` and of every part of the scores."""
    scores = [sample.score for group in groups for sample in group.samples if sample.score]
    parts: dict[str, list[float]] = {"reward": [score.value for score in scores]}
    for score in scores:
        for name, value in score.parts.items():
            parts.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in parts.items() if values}


def as_figures(found: float | Mapping[str, float]) -> dict[str, float]:
    """What an evaluation callback gave back: one number, or several by name."""
    return (
        {k: float(v) for k, v in found.items()}
        if isinstance(found, Mapping)
        else {"metric": float(found)}
    )
