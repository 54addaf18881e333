"""Suites of tasks, and the records of their items: a policy answers, a reward scores.

An evaluation with a folder keeps every record there as it comes, so that the same command goes on
where it stopped. What a model on this machine answered is also kept in the cache, under the hashes
of the model, of the data and of the code that scores.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sharpen import records, types
from sharpen.config import Config
from sharpen.evals.metrics import FIVE, Item, measure
from sharpen.progress import progress
from sharpen.rollout import MakeEnvironment, OneTurn, rollout
from sharpen.rows import message_to_wire, task_to_row
from sharpen.types import Json, Policy, Sampling, Score, SharpenError, StopReason, Task, Trajectory

CHUNK = 32  # tasks between two progress reports
NO_USER = "the simulated user"  # how its failure begins
OWN_FAULT = re.compile(r"HTTP (?:400|413|422)\b")  # the request's; others are the server's
OBJECT = "object "  # how the hash of a policy in memory begins
Answered = tuple[Task, Trajectory, Score]


@dataclass(frozen=True, slots=True)
class Suite:
    """Tasks with what they are done in and judged by."""

    name: str
    tasks: Sequence[Task]
    reward: types.Reward
    make: MakeEnvironment = OneTurn
    max_tokens: int = 256
    max_turns: int = 1
    metrics: tuple[str, ...] = FIVE
    left_out: Json = field(default_factory=dict)  # reason → records that cannot be scored

    def digest(self) -> str:
        rows = [records.dump_row(task_to_row(task)) for task in self.tasks]
        return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def answered(
    policy: Policy, suite: Suite, tasks: Sequence[Task], sampling: Sampling
) -> Iterator[list[Answered]]:
    """As many tasks at a time as keep the policy busy."""
    if not tasks:
        raise SharpenError(f"{suite.name}: there are no tasks to evaluate")
    engine = getattr(policy, "engine", None)
    size = 2 * engine.most_rows if engine else CHUNK
    with progress(suite.name, len(tasks)) as advance:
        for start in range(0, len(tasks), size):
            chunk, began = tasks[start : start + size], time.perf_counter()
            made = rollout(policy, chunk, suite.make, sampling, suite.max_turns)
            seconds = (time.perf_counter() - began) / len(chunk)
            timed = [replace(t, metadata=t.metadata | {"seconds": seconds}) for t in made]
            yield list(zip(chunk, timed, scores(suite.reward, chunk, timed), strict=True))
            advance(len(chunk))


def scores(reward: Any, tasks: Sequence[Task], made: Sequence[Trajectory]) -> Iterable[Score]:
    many = getattr(reward, "score_many", None)
    return many(tasks, made) if many else map(reward.score, tasks, made)


def item_row(suite: str, task: Task, trajectory: Trajectory, score: Score) -> Json:
    """What is kept of an item: where it belongs, all that was said, every metric."""
    item, turns = Item(task, trajectory, score), trajectory.turns
    said = [message_to_wire(m) for turn in turns for m in (turn.message, *turn.results)]
    about = {"part": task.kind, "difficulty": task.difficulty, "due": item.due}
    about |= {"category": str(task.metadata.get("category", "")), "decision": item.decision}
    verdict = {"value": score.value, "parts": dict(score.parts), "feedback": score.feedback}
    error = (turns[-1].error if turns else "") or str(trajectory.metadata.get("error", ""))
    stop: Json = {"stop": trajectory.stop.value, "error": error}
    stop |= {"unparsed": [bad.raw for turn in turns for bad in turn.message.unparsed]}
    row = {"suite": suite, "id": task.id, **about, **verdict, **stop}
    return row | {"metrics": measure(item), "messages": said}


class EvaluationConfig(Config):
    """What scores depend on: an evaluation does not go on where one of these differs."""

    benchmark: str
    data: dict[str, str]  # suite → hash of its tasks
    model: str
    weights: str  # hash; empty where it cannot be told, as of a server
    code: str  # hash of what scores
    perturb: tuple[str, ...] = ()
    user: str = ""
    max_tokens: int = 0
    temperature: float = 0.0
    seed: int = 0


@functools.cache
def code_digest() -> str:
    """Of the code that scores: figures of two versions are not mixed."""
    home = Path(__file__).parents[1]
    files = sorted(p for room in ("evals", "rewards") for p in (home / room).glob("*.[py]*"))
    text = "".join(records.sha256_file(path) for path in files)
    return hashlib.sha256(text.encode()).hexdigest()


class Items:
    """Records by suite and id, in memory and, with a folder, in its `items.jsonl`."""

    def __init__(self, folder: Path | None, config: EvaluationConfig):
        self.rows: dict[tuple[str, str], Json] = {}
        self.file = folder and folder / "items.jsonl"
        self.cached: Path | None = records.cache_folder() / "evaluations" / f"{config.hash()}.jsonl"
        if not folder or not config.weights or config.weights.startswith(OBJECT):
            self.cached = None  # nobody can tell that it will be the same model
        if not folder or not self.file:
            return
        records.RunFolder(folder, config)
        records.drop_cut_line(self.file)
        if self.cached and self.cached.exists() and not self.file.exists():
            shutil.copy(self.cached, self.file)
        for row in records.read_jsonl(self.file) if self.file.exists() else ():
            self.rows[row.value["suite"], row.value["id"]] = row.value

    def add(self, rows: Sequence[Json]) -> None:
        """Kept, and on disk when this returns."""
        self.rows |= {(row["suite"], row["id"]): row for row in rows}
        if self.file:
            with open(self.file, "ab") as file:
                file.writelines(records.dump_row(row).encode() + b"\n" for row in rows)
                file.flush()
                os.fsync(file.fileno())

    def keep(self) -> None:
        """All is done: the next evaluation of this model on this data has nothing to ask."""
        if self.cached and self.file:
            with records.atomic_write(self.cached) as file:
                file.write(self.file.read_bytes())


def collect(
    items: Items, suite: Suite, tasks: Sequence[Task], policy: Any, sampling: Sampling
) -> list[Json]:
    """The tasks' records, after asking for those that are missing: `policy()` is who is asked."""
    pending = [task for task in tasks if (suite.name, task.id) not in items.rows]
    for chunk in answered(policy(), suite, pending, sampling) if pending or not tasks else ():
        lost = [error for _, made, _ in chunk if (error := unanswered(made))]
        items.add([item_row(suite.name, *one) for one in chunk if not unanswered(one[1])])
        if lost:
            kept = sum((suite.name, task.id) in items.rows for task in tasks)
            then = "the same command asks for the others" if items.file else "give an output folder"
            done = f"{kept} of {len(tasks)} items done"
            raise SharpenError(f"{suite.name}: {lost[-1]}; {done}, {then}")
    return [items.rows[suite.name, task.id] for task in tasks]


def unanswered(trajectory: Trajectory) -> str:
    """Why there is no answer to score, where that is not the item's own fault."""
    error = trajectory.turns[-1].error if trajectory.turns else ""
    told = str(trajectory.metadata.get("error", ""))
    if trajectory.stop is StopReason.ENVIRONMENT_ERROR and NO_USER in told:
        return told
    lost = trajectory.stop is StopReason.POLICY_ERROR and not OWN_FAULT.match(error)
    return (error or "no answer") if lost else ""
