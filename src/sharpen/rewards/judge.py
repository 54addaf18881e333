"""An LLM as a judge, behind any `Policy`: rubric scores, pairs in both orders, ranked groups.

A verdict is read strictly or not at all: a reply without a readable score is asked for again and
then reported as a failure of that item, never turned into a number. What is judged is fenced, and
whatever in it could pose as the judge's own instructions is made harmless.
"""

from __future__ import annotations

import hashlib
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from sharpen.calls import assistant_text, compact_json
from sharpen.config import Config, one_line, read_yaml
from sharpen.records import DECODER
from sharpen.tools import call_with_limit
from sharpen.types import Dialog, Message, Policy, Sampling, Score, SharpenError, Task, Trajectory

RUBRIC = {"correctness": "The task is done, and what is said is true."}
RUBRIC |= {"usefulness": "It is clear, complete and to the point."}
MAX_REPLY = 20_000
MARKERS = re.compile(  # what a chat template or our own fence could take for a marker
    r"<[|｜]|[|｜]>|\[/?INST\]|<</?SYS>>|</?s>|<(?:start|end)_of_turn>|</?think>|<{3,}|>{3,}", re.I
)
HARMLESS = str.maketrans("<>[]|｜", "‹›⟦⟧¦¦")
UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")


class JudgeConfig(Config):
    criteria: dict[str, str] = Field(RUBRIC, min_length=1)  # name → what the judge is told
    low: float = 1
    high: float = 10
    reference: str = ""  # a field of the task's gold that the judge may see
    attempts: int = Field(3, ge=1)
    backoff_s: float = Field(0.5, ge=0)  # before the second attempt; doubled before each later one
    timeout_s: float = Field(300.0, gt=0)  # one call of the policy, with up to `concurrency` items
    concurrency: int = Field(8, ge=1)  # items that the policy gets at once
    max_failed: float = Field(0.1, ge=0, lt=1)  # a batch with a larger share of failures raises
    max_chars: int = Field(20_000, ge=100)  # of one judged text; the middle of a longer one is cut
    max_tokens: int = Field(512, ge=1)
    temperature: float = Field(0.0, ge=0)
    seed: int = 0

    @model_validator(mode="after")
    def sensible(self) -> JudgeConfig:
        if "reason" in self.criteria or not self.low < self.high:
            raise ValueError("expected low below high, and no criterion called 'reason'")
        return self


class JudgeError(SharpenError):
    """No verdict on one item, or on too many of a batch."""


class Judge:
    """Scores, compares and ranks. The `…_all` forms take many items, put a `JudgeError` where an
    item failed, and raise when more than `max_failed` of the questions did."""

    def __init__(self, policy: Policy, config: JudgeConfig | None = None):
        self.policy, self.config = policy, config or JudgeConfig()
        self.prompts = read_yaml(Path(__file__).with_suffix(".yaml"))
        self.compared = self.disagreed = 0

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        return self.score_all([(task, trajectory)])[0]

    def compare(self, task: Task, a: Trajectory, b: Trajectory) -> Score:
        return self.compare_all([(task, a, b)])[0]

    def rank(self, task: Task, trajectories: Sequence[Trajectory]) -> list[Score]:
        return self.rank_all([(task, trajectories)])[0]

    @property
    def disagreement(self) -> float:
        """Share of the comparisons so far in which the two orders gave different verdicts."""
        return self.disagreed / self.compared if self.compared else 0.0

    def score_all(self, items: Sequence[tuple[Task, Trajectory]]) -> list[Any]:
        """A `Score` an item; its parts are the criteria, from 0 to 1."""
        return self.ask([(task, [made]) for task, made in items])

    def compare_all(self, items: Sequence[tuple[Task, Trajectory, Trajectory]]) -> list[Any]:
        """A `Score` an item: 1 when the first is better, 0 when the second is, 0.5 for a tie. Each
        is asked in both orders; when they do not agree it is a tie, and the part `agreed` is 0."""
        verdicts = self.ask([(t, pair) for t, a, b in items for pair in ([a, b], [b, a])])
        settled: list[Any] = []
        for pair in zip(verdicts[::2], verdicts[1::2], strict=True):
            if failed := [verdict for verdict in pair if isinstance(verdict, JudgeError)]:
                settled.append(failed[0])
                continue
            (a, b), (swapped_b, swapped_a) = (verdict.parts.values() for verdict in pair)
            agreed = (a > b, a < b) == (swapped_a > swapped_b, swapped_a < swapped_b)
            self.compared, self.disagreed = self.compared + 1, self.disagreed + (not agreed)
            value = 0.5 if not agreed or a == b else float(a > b)
            said = " / ".join(verdict.feedback for verdict in pair)
            settled.append(Score(value, {"agreed": float(agreed)}, said))
        return settled

    def rank_all(self, groups: Sequence[tuple[Task, Sequence[Trajectory]]]) -> list[Any]:
        """A list of `Score`s a group, from one prompt with the members shuffled and nameless."""
        orders = []
        for task, group in groups:
            if len(group) < 2:
                raise SharpenError(f"task {task.id!r}: a group of {len(group)} cannot be ranked")
            chance = random.Random(f"{self.config.seed}:{task.id}:{task.instruction}")
            orders.append(chance.sample(range(len(group)), len(group)))
        pairs = zip(groups, orders, strict=True)
        ranked = self.ask([(task, [group[i] for i in order]) for (task, group), order in pairs])
        for number, order in enumerate(orders):
            if isinstance(verdict := ranked[number], Score):
                value = dict(zip(order, verdict.parts.values(), strict=True))
                ranked[number] = [Score(value[i], {}, verdict.feedback) for i in sorted(order)]
        return ranked

    def ask(self, items: Sequence[tuple[Task, Sequence[Trajectory]]]) -> list[Any]:
        """A verdict or a `JudgeError` an item, after as many attempts as are allowed."""
        verdicts: list[Any] = [None] * len(items)
        waiting, size = list(range(len(items))), self.config.concurrency
        for attempt in range(self.config.attempts):
            if attempt and waiting:
                time.sleep(self.config.backoff_s * 2 ** (attempt - 1))
            for chunk in [waiting[i : i + size] for i in range(0, len(waiting), size)]:
                dialogs = [self.dialog(*items[i], verdicts[i]) for i in chunk]
                for index, reply in zip(chunk, self.replies(dialogs, attempt), strict=True):
                    verdicts[index] = self.verdict(*items[index], *reply)
            waiting = [index for index in waiting if isinstance(verdicts[index], JudgeError)]
        if len(waiting) > self.config.max_failed * len(items):
            count = f"{len(waiting)} of {len(items)} questions have no verdict"
            raise JudgeError(f"judge: {count}; the first: {verdicts[waiting[0]]}")
        return verdicts

    def replies(self, dialogs: list[Dialog], attempt: int) -> list[tuple[str, str]]:
        """What the policy says to each, and why it said nothing."""
        config = self.config
        sampling = Sampling(config.max_tokens, config.temperature, seed=config.seed + attempt)
        call = lambda: self.policy.respond(dialogs, sampling)  # noqa: E731
        turns = call_with_limit(call, {}, config.timeout_s)
        if isinstance(turns, SharpenError):  # wrong settings: every item would fail alike
            raise turns
        if not isinstance(turns, BaseException):
            return [(turn.message.content, turn.error) for turn in turns]
        if len(dialogs) > 1:  # one of them may have taken the others with it
            return [reply for dialog in dialogs for reply in self.replies([dialog], attempt)]
        why = one_line(turns) or f"no answer within {config.timeout_s:g} s"
        return [("", f"{type(turns).__name__}: {why}")]

    def verdict(self, task: Task, judged: Sequence[Any], text: str, error: str) -> Any:
        try:
            if not text.strip():
                raise ValueError(error or "empty reply")
            return read_scores(text, self.wanted(judged), self.config.low, self.config.high)
        except ValueError as problem:
            return JudgeError(f"task {task.id!r}: {one_line(problem)}")

    def wanted(self, judged: Sequence[Trajectory]) -> list[str]:
        """What a reply has to score: the criteria of one response, or each of several."""
        several = [str(number) for number in range(1, len(judged) + 1)]
        return several if len(judged) > 1 else list(self.config.criteria)

    def dialog(self, task: Task, judged: Sequence[Trajectory], failure: Any) -> Dialog:
        config = self.config
        material = [("TASK", transcript(task.messages))]
        if config.reference:
            if config.reference not in task.gold:
                raise SharpenError(f"task {task.id!r}: gold has no {config.reference!r}")
            material.append(("REFERENCE", str(task.gold[config.reference])))
        for number, made in enumerate(judged, 1):
            said = [m for turn in made.turns for m in (turn.message, *turn.results)]
            material.append((f"RESPONSE {number}", transcript(said)))
        text = self.prompts["one" if len(judged) == 1 else "several"].format(
            low=config.low,
            high=config.high,
            count=len(judged),
            criteria="\n".join(f"- {name}: {what}" for name, what in config.criteria.items()),
            material="\n\n".join(fence(*part, config.max_chars, config.seed) for part in material),
            shape=", ".join(f'"{name}": number' for name in self.wanted(judged)),
        )
        text += f"\n\n{self.prompts['again']}" if failure else ""
        messages = (Message("system", self.prompts["system"]), Message("user", text))
        return Dialog(messages, id=task.id)


def fence(label: str, text: str, max_chars: int, seed: int) -> str:
    """Foreign text between marks that it cannot contain; the middle of a long one is cut."""
    half = max_chars // 2
    if (spare := len(text) - 2 * half) > 0:
        text = f"{text[:half]}\n[{spare} characters left out]\n{text[-half:]}"
    text = MARKERS.sub(lambda found: found[0].translate(HARMLESS), UNSEEN.sub("", text))
    mark = hashlib.sha256(f"{seed}:{text}".encode("utf-8", "replace")).hexdigest()[:12]
    return f"<<<{label} {mark}>>>\n{text}\n<<<END {mark}>>>"


def transcript(messages: Sequence[Message]) -> str:
    """One message as its text; several as a JSON line each, so that none can write another's."""
    if len(messages) == 1:
        return assistant_text(messages[0], "")
    rows = ({"role": m.role, "content": assistant_text(m, "")} for m in messages)
    return "\n".join(map(compact_json, rows))


def read_scores(text: str, names: Sequence[str], low: float, high: float) -> Score:
    """A reply's numbers, each within the scale → parts from 0 to 1, and their mean."""
    found, position, text = [], 0, text.rpartition("</think>")[2][-MAX_REPLY:]
    while (position := text.find("{", position)) >= 0:
        try:
            value, position = DECODER.raw_decode(text, position)
            found += [value] if value.keys() >= set(names) else []
        except (ValueError, RecursionError):
            position += 1
    values = [[reply[name] for name in names] for reply in found]
    if not values or any(other != values[0] for other in values):
        raise ValueError("several scores that differ" if values else "no JSON object with scores")
    parts = dict(zip(names, values[0], strict=True))
    for name, value in parts.items():
        if type(value) not in (int, float) or not low <= value <= high:  # True is an int too
            raise ValueError(f"{name}: expected a number from {low:g} to {high:g}, found {value!r}")
        parts[name] = (value - low) / (high - low)
    return Score(sum(parts.values()) / len(parts), parts, str(found[-1].get("reason", ""))[:500])
