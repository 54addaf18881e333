"""Run tasks through a policy and score them: one record a task, one figure a metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sharpen.evals.intervals import Figure, figure
from sharpen.progress import progress
from sharpen.rows import message_to_wire
from sharpen.types import (
    Dialog,
    Json,
    Policy,
    Reward,
    Sampling,
    SharpenError,
    Task,
    Trajectory,
)

CHUNK = 32  # tasks between two progress reports


@dataclass(frozen=True, slots=True)
class Evaluation:
    figures: dict[str, Figure]
    records: list[Json]


def evaluate_turns(
    policy: Policy,
    tasks: Sequence[Task],
    reward: Reward,
    sampling: Sampling,
    title: str = "evaluate",
) -> Evaluation:
    """Single-turn tasks: the policy answers once, the reward scores the answer."""
    if not tasks:
        raise SharpenError(f"{title}: there are no tasks to evaluate")
    records: list[Json] = []
    with progress(title, len(tasks)) as advance:
        for start in range(0, len(tasks), CHUNK):
            chunk = tasks[start : start + CHUNK]
            turns = policy.respond([Dialog(t.messages, t.tools, id=t.id) for t in chunk], sampling)
            for task, turn in zip(chunk, turns, strict=True):
                score = reward.score(task, Trajectory(task.id, (turn,), turn.stop))
                records.append(
                    {
                        "id": task.id,
                        "stop": turn.stop.value,
                        "value": score.value,
                        **score.parts,
                        "feedback": score.feedback,
                        "answer": message_to_wire(turn.message),
                        "unparsed": [bad.raw for bad in turn.message.unparsed],
                        "tokens": len(turn.ids),
                    }
                )
            advance(len(chunk))
    metrics = [key for key in records[0] if key == "tokens" or isinstance(records[0][key], float)]
    return Evaluation({m: figure([float(r[m]) for r in records]) for m in metrics}, records)
