"""Run tasks through a policy and score them: one record a task, one figure a metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sharpen.evals.intervals import Figure, figure
from sharpen.progress import progress
from sharpen.rollout import MakeEnvironment, OneTurn, rollout
from sharpen.rows import message_to_wire
from sharpen.types import Json, Policy, Reward, Sampling, SharpenError, Task, Trajectory

CHUNK = 32  # tasks between two progress reports


@dataclass(frozen=True, slots=True)
class Evaluation:
    figures: dict[str, Figure]
    records: list[Json]


def evaluate(
    policy: Policy,
    tasks: Sequence[Task],
    reward: Reward,
    sampling: Sampling,
    title: str = "evaluate",
    make: MakeEnvironment = OneTurn,
    max_turns: int = 8,
) -> Evaluation:
    """The policy acts in each task's environment (none: it answers once), the reward scores."""
    if not tasks:
        raise SharpenError(f"{title}: there are no tasks to evaluate")
    records: list[Json] = []
    with progress(title, len(tasks)) as advance:
        for start in range(0, len(tasks), CHUNK):
            chunk = tasks[start : start + CHUNK]
            trajectories = rollout(policy, chunk, make, sampling, max_turns)
            for task, trajectory in zip(chunk, trajectories, strict=True):
                records.append(record(task, trajectory, reward))
            advance(len(chunk))
    names = [key for row in records for key, value in row.items() if isinstance(value, float)]
    figures = {}
    for name in dict.fromkeys([*names, "tokens"]):
        figures[name] = figure([float(row[name]) for row in records if name in row])
    return Evaluation(figures, records)


def record(task: Task, trajectory: Trajectory, reward: Reward) -> Json:
    score = reward.score(task, trajectory)
    turns = trajectory.turns
    return {
        "id": task.id,
        "stop": trajectory.stop.value,
        "value": score.value,
        **score.parts,
        "feedback": score.feedback,
        "answer": message_to_wire(turns[-1].message) if turns else {},
        "turns": len(turns),
        "unparsed": [bad.raw for turn in turns for bad in turn.message.unparsed],
        "tokens": sum(len(turn.ids) for turn in turns),
        **trajectory.metadata,
    }
