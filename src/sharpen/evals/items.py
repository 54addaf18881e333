"""Suites of tasks, and the stored records of their items: a policy answers, a reward scores.

An evaluation with a folder writes every record there as it comes, so that the same command
continues where it stopped. What a model on this machine answered is also kept in the cache, under
everything that a score depends on.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from sharpen import records
from sharpen.config import Config
from sharpen.envs.perturb import Perturbation
from sharpen.envs.simulated_service import SIMULATED_USER
from sharpen.kinds import KindEnvironment, KindReward, measure_item
from sharpen.progress import progress
from sharpen.rewards.metrics import Item
from sharpen.rows import message_to_wire, task_to_row
from sharpen.scored_rollout import PlaySettings, play, score_trajectories
from sharpen.types import (
    Json,
    MakeEnvironment,
    Policy,
    Reward,
    Sampling,
    Score,
    SharpenError,
    StopReason,
    Task,
    TokenPolicy,
    Trajectory,
)

CHUNK = 32  # tasks between two progress reports, for policies that do not say their size
# an HTTP status that is the request's own fault; others are the server's
_REQUEST_REFUSED = re.compile(r"HTTP (?:400|413|422)\b")
_PACKAGES = ("torch", "transformers", "tokenizers", "jsonschema-rs", "math-verify", "llguidance")
_CODE_SUFFIXES = (".py", ".yaml", ".jsonl", ".jinja")
_Answered = tuple[Task, int, Trajectory, Score]  # task, number of the sample, what was done, score


@dataclass(frozen=True, slots=True)
class Suite:
    """Tasks with what is different from their kinds' own ways: by default each is played, scored
    and limited by its kind."""

    name: str
    tasks: Sequence[Task]
    reward: Reward = field(default_factory=lambda: KindReward(workers=2))
    make_environment: MakeEnvironment = KindEnvironment
    max_tokens: int = 256
    max_turns: int = 0  # 0: the kinds' own
    metrics: tuple[str, ...] = ("accuracy",)
    left_out: Json = field(default_factory=dict)  # reason → number of records that have no score

    def digest(self) -> str:
        """Returns one hash of all tasks."""
        rows = [records.dump_row(task_to_row(task)) for task in self.tasks]
        return hashlib.sha256("\n".join(rows).encode()).hexdigest()


class EvaluationConfig(Config):
    """Everything that a score depends on: an evaluation does not continue where one differs."""

    benchmark: str
    data: dict[str, str]  # suite → hash of its tasks
    model: str
    weights: str  # hash; empty where it cannot be told, as of a server
    code: str  # hash of the code and of the libraries that play and score
    own_code: str = ""  # hash of the user's own kinds, rewards, environments and tools
    template: str = "auto"
    perturb: tuple[str, ...] = ()
    user: str = ""
    max_tokens: int = 0
    temperature: float = 0.0
    samples: int = 1
    seed: int = 0
    # of a suite that overrides what its kinds say
    reward: str = ""
    env: str = ""
    max_turns: int = 0


@functools.cache
def code_digest() -> str:
    """Returns one hash of everything here that plays and scores, and of the libraries below:
    figures of two versions are not mixed."""
    home = Path(__file__).parents[1]
    lines = []
    for path in sorted(home.rglob("*")):
        if path.suffix in _CODE_SUFFIXES:
            lines.append(f"{path.relative_to(home)} {records.sha256_file(path)}")
    for package in _PACKAGES:
        try:
            lines.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{package} missing")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class ItemStore:
    """Records by suite, task and sample: in memory and, with a folder, in its `items.jsonl`."""

    def __init__(self, folder: Path | None, config: EvaluationConfig, is_cacheable: bool):
        self.rows: dict[tuple[str, str, int], Json] = {}
        self.file = folder / "items.jsonl" if folder else None
        self._cached: Path | None = None
        if not folder or not self.file:
            return
        records.RunFolder(folder, config)
        records.drop_cut_line(self.file)
        if is_cacheable:
            name = f"{config.hash()}.jsonl"
            self._cached = records.cache_folder() / "evaluations" / name
            if self._cached.exists() and not self.file.exists():
                shutil.copy(self._cached, self.file)
        if self.file.exists():
            for row in records.read_jsonl(self.file):
                self.rows[_key(row.value)] = row.value

    def add(self, rows: Sequence[Json]) -> None:
        """Keep rows; they are on disk when this returns."""
        for row in rows:
            self.rows[_key(row)] = row
        if not self.file:
            return
        with open(self.file, "ab") as file:
            file.writelines(records.dump_row(row).encode() + b"\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> None:
        """Copy a complete evaluation into the cache: the next one of this model on this data has
        nothing to ask."""
        if self._cached and self.file and self.file.exists():
            with records.atomic_write(self._cached) as file:
                file.write(self.file.read_bytes())


def _key(row: Json) -> tuple[str, str, int]:
    return row["suite"], row["id"], row["sample"]


def collect_items(
    store: ItemStore,
    suite: Suite,
    tasks: Sequence[Task],
    open_policy: Callable[[], Policy],
    how: PlaySettings,
) -> list[Json]:
    """Returns the records of all samples of the tasks, after playing those that are missing."""
    if not tasks:
        raise SharpenError(f"{suite.name}: there are no tasks to evaluate")
    numbers = range(how.samples)
    pending = []
    for task in tasks:
        if any((suite.name, task.id, number) not in store.rows for number in numbers):
            pending.append(task)
    if pending:
        for chunk in _answer(open_policy(), suite, pending, how):
            _store_chunk(store, suite, tasks, chunk)
    return [store.rows[suite.name, task.id, number] for task in tasks for number in numbers]


def _answer(
    policy: Policy, suite: Suite, tasks: Sequence[Task], how: PlaySettings
) -> Iterator[list[_Answered]]:
    """Plays and scores as many tasks at a time as keep the policy busy."""
    size = CHUNK
    if isinstance(policy, TokenPolicy):
        size = max(2 * policy.rows // how.samples, 1)
    with progress(suite.name, len(tasks)) as advance:
        for start in range(0, len(tasks), size):
            chunk = tasks[start : start + size]
            trajectories = play(policy, chunk, how)
            repeated = [(task, number) for task in chunk for number in range(how.samples)]
            scores = score_trajectories([task for task, _ in repeated], trajectories, how.reward)
            answered = []
            for (task, number), trajectory, score in zip(
                repeated, trajectories, scores, strict=True
            ):
                answered.append((task, number, trajectory, score))
            yield answered
            advance(len(chunk))


def _store_chunk(
    store: ItemStore, suite: Suite, tasks: Sequence[Task], chunk: Sequence[_Answered]
) -> None:
    """Keep what was answered; a policy that gave no answer stops the evaluation."""
    rows = []
    errors = []
    for task, number, trajectory, score in chunk:
        error = _missing_answer(trajectory)
        if error:
            errors.append(error)
        else:
            rows.append(_item_row(suite.name, task, number, trajectory, score))
    store.add(rows)
    if not errors:
        return
    done = sum((suite.name, task.id, 0) in store.rows for task in tasks)
    advice = "the same command asks for the others" if store.file else "give an output folder"
    raise SharpenError(f"{suite.name}: {errors[-1]}; {done} of {len(tasks)} items done, {advice}")


def _missing_answer(trajectory: Trajectory) -> str:
    """Why there is no answer to score, where that is not the item's own fault; "" otherwise."""
    turn_error = trajectory.turns[-1].error if trajectory.turns else ""
    episode_error = str(trajectory.metadata.get("error", ""))
    if trajectory.stop is StopReason.ENVIRONMENT_ERROR and SIMULATED_USER in episode_error:
        return episode_error
    last_stop = trajectory.turns[-1].stop if trajectory.turns else trajectory.stop
    if last_stop is not StopReason.POLICY_ERROR or _REQUEST_REFUSED.match(turn_error):
        return ""
    return turn_error or episode_error or "no answer"


def _item_row(suite: str, task: Task, sample: int, trajectory: Trajectory, score: Score) -> Json:
    """Returns what is kept of an item: where it belongs, all that was said, every metric."""
    item = Item(task, trajectory, score)
    messages = []
    unparsed = []
    for turn in trajectory.turns:
        messages += [message_to_wire(message) for message in (turn.message, *turn.results)]
        unparsed += [broken.raw for broken in turn.message.unparsed]
    turn_error = trajectory.turns[-1].error if trajectory.turns else ""
    return {
        "suite": suite,
        "id": task.id,
        "sample": sample,
        "part": task.kind,
        "difficulty": task.difficulty,
        "gold_decision": item.gold_decision,
        "category": str(task.metadata.get("category", "")),
        "decision": item.decision,
        "value": score.value,
        "solved": score.is_solved,
        "parts": dict(score.parts),
        "feedback": score.feedback,
        "stop": trajectory.stop.value,
        "error": turn_error or str(trajectory.metadata.get("error", "")),
        "unparsed": unparsed,
        "metrics": measure_item(item),
        "messages": messages,
    }


def suite_settings(
    suite: Suite,
    sampling: Sampling,
    samples: int,
    perturbation: Perturbation | None,
) -> PlaySettings:
    """Returns how a suite's tasks are played. Broken episodes are scored as they stand."""
    return PlaySettings(
        suite.reward,
        sampling,
        suite.make_environment,
        suite.max_turns,
        samples,
        perturbation,
        excluded_stops=(),
    )
