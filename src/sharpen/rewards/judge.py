"""Let a language model judge: rubric scores, pairs in both orders, ranked groups.

Any `Policy` can be the judge. A verdict is read strictly or not at all: a reply without a readable
score is asked for again and then reported as a failure of that item, never turned into a number.
What is judged is fenced, and whatever in it could pose as the judge's own instructions is made
harmless. Users and the evaluation of merged models call it.
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
from sharpen.records import STRICT_DECODER
from sharpen.tools import call_with_limit
from sharpen.types import (
    Dialog,
    Message,
    Policy,
    Sampling,
    Score,
    SharpenError,
    Task,
    Trajectory,
    Turn,
)

_DEFAULT_RUBRIC = {
    "correctness": "The task is done, and what is said is true.",
    "usefulness": "It is clear, complete and to the point.",
}
_MAX_REPLY_CHARS = 20_000
_MAX_REASON_CHARS = 500
_MARKERS = re.compile(  # what a chat template or our own fence could take for a marker
    r"<[|｜]|[|｜]>|\[/?INST\]|<</?SYS>>|</?s>|<(?:start|end)_of_turn>|</?think>|<{3,}|>{3,}", re.I
)
_LOOKALIKES = str.maketrans("<>[]|｜", "‹›⟦⟧¦¦")
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")


class JudgeConfig(Config):
    """What the judge scores, on which scale, and how often and how long it is asked."""

    criteria: dict[str, str] = Field(_DEFAULT_RUBRIC, min_length=1)  # name → meaning
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
    def check_scale(self) -> JudgeConfig:
        """Refuse a scale that does not rise, and a criterion that the reply's reason would hide."""
        if "reason" in self.criteria or not self.low < self.high:
            raise ValueError("expected low below high, and no criterion called 'reason'")
        return self


class JudgeError(SharpenError):
    """No verdict on one item, or on too many of a batch."""


class Judge:
    """Scores, compares and ranks.

    The `…_all` forms take many items, put a `JudgeError` where an item failed, and raise when more
    than `max_failed` of the questions did."""

    def __init__(self, policy: Policy, config: JudgeConfig | None = None):
        self.policy = policy
        self.config = config or JudgeConfig()
        self.prompts: dict[str, str] = read_yaml(Path(__file__).with_suffix(".yaml"))
        self.compared = 0
        self.disagreed = 0

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        return self.score_all([(task, trajectory)])[0]

    def compare(self, task: Task, a: Trajectory, b: Trajectory) -> Score:
        """`compare_all` of one pair."""
        return self.compare_all([(task, a, b)])[0]

    def rank(self, task: Task, trajectories: Sequence[Trajectory]) -> list[Score]:
        """`rank_all` of one group."""
        return self.rank_all([(task, trajectories)])[0]

    @property
    def disagreement(self) -> float:
        """The share of the comparisons so far in which the two orders gave different verdicts."""
        return self.disagreed / self.compared if self.compared else 0.0

    def score_all(self, items: Sequence[tuple[Task, Trajectory]]) -> list[Any]:
        """Returns a `Score` per item; its parts are the criteria, from 0 to 1."""
        return self._ask([(task, [trajectory]) for task, trajectory in items])

    def compare_all(self, items: Sequence[tuple[Task, Trajectory, Trajectory]]) -> list[Any]:
        """Returns a `Score` per item: 1 when the first is better, 0 when the second is, 0.5 for a
        tie.

        Each pair is asked in both orders. When they do not agree it is a tie, and the part `agreed`
        is 0."""
        questions: list[tuple[Task, Sequence[Trajectory]]] = []
        for task, a, b in items:
            questions.append((task, [a, b]))
            questions.append((task, [b, a]))
        verdicts = self._ask(questions)
        return [self._settle(*pair) for pair in zip(verdicts[::2], verdicts[1::2], strict=True)]

    def _settle(self, verdict: Score | JudgeError, swapped: Score | JudgeError) -> Any:
        """One verdict from those of both orders."""
        if isinstance(verdict, JudgeError):
            return verdict
        if isinstance(swapped, JudgeError):
            return swapped
        a, b = verdict.parts.values()
        swapped_b, swapped_a = swapped.parts.values()
        agreed = (a > b, a < b) == (swapped_a > swapped_b, swapped_a < swapped_b)
        self.compared += 1
        if not agreed:
            self.disagreed += 1
        value = float(a > b) if agreed and a != b else 0.5
        return Score(value, {"agreed": float(agreed)}, f"{verdict.feedback} / {swapped.feedback}")

    def rank_all(self, groups: Sequence[tuple[Task, Sequence[Trajectory]]]) -> list[Any]:
        """Returns a list of `Score`s per group, from one prompt with the members shuffled and
        nameless."""
        orders = []
        for task, group in groups:
            if len(group) < 2:
                raise SharpenError(f"task {task.id!r}: a group of {len(group)} cannot be ranked")
            rng = random.Random(f"{self.config.seed}:{task.id}:{task.instruction}")
            orders.append(rng.sample(range(len(group)), len(group)))
        questions = []
        for (task, group), order in zip(groups, orders, strict=True):
            questions.append((task, [group[member] for member in order]))
        ranked: list[Any] = []
        for verdict, order in zip(self._ask(questions), orders, strict=True):
            if isinstance(verdict, JudgeError):
                ranked.append(verdict)
                continue
            values = list(verdict.parts.values())
            value_of_member = {order[place]: value for place, value in enumerate(values)}
            members = sorted(order)
            ranked.append([Score(value_of_member[m], {}, verdict.feedback) for m in members])
        return ranked

    # One question: a task, and one response to score or several to compare ------------------------

    def _ask(self, items: Sequence[tuple[Task, Sequence[Trajectory]]]) -> list[Any]:
        """Returns a `Score` or a `JudgeError` per question, after as many attempts as allowed."""
        verdicts: list[Any] = [None] * len(items)
        waiting = list(range(len(items)))
        batch_size = self.config.concurrency
        for attempt in range(self.config.attempts):
            if attempt and waiting:
                time.sleep(self.config.backoff_s * 2 ** (attempt - 1))
            for start in range(0, len(waiting), batch_size):
                batch = waiting[start : start + batch_size]
                dialogs = [
                    self.build_dialog(*items[index], is_repeated=attempt > 0) for index in batch
                ]
                replies = self._get_replies(dialogs, attempt)
                for index, (text, error) in zip(batch, replies, strict=True):
                    verdicts[index] = self._read_reply(*items[index], text, error)
            waiting = [index for index in waiting if isinstance(verdicts[index], JudgeError)]
        if len(waiting) > self.config.max_failed * len(items):
            count = f"{len(waiting)} of {len(items)} questions have no verdict"
            raise JudgeError(f"judge: {count}; the first: {verdicts[waiting[0]]}")
        return verdicts

    def _get_replies(self, dialogs: list[Dialog], attempt: int) -> list[tuple[str, str]]:
        """Returns per dialog what the policy says, and why it said nothing."""
        config = self.config
        sampling = Sampling(config.max_tokens, config.temperature, seed=config.seed + attempt)

        def respond() -> list[Turn]:
            return self.policy.respond(dialogs, sampling)

        turns = call_with_limit(respond, {}, config.timeout_s)
        if isinstance(turns, SharpenError):  # wrong settings: every item would fail alike
            raise turns
        if not isinstance(turns, BaseException):
            return [(turn.message.content, turn.error) for turn in turns]
        if len(dialogs) > 1:  # one of them may have taken the others with it
            replies = []
            for dialog in dialogs:
                replies += self._get_replies([dialog], attempt)
            return replies
        reason = one_line(turns) or f"no answer within {config.timeout_s:g} s"
        return [("", f"{type(turns).__name__}: {reason}")]

    def _read_reply(
        self, task: Task, judged: Sequence[Trajectory], text: str, error: str
    ) -> Score | JudgeError:
        try:
            if not text.strip():
                raise ValueError(error or "empty reply")
            names = self._score_names(judged)
            return read_scores(text, names, self.config.low, self.config.high)
        except ValueError as problem:
            return JudgeError(f"task {task.id!r}: {one_line(problem)}")

    def _score_names(self, judged: Sequence[Trajectory]) -> list[str]:
        """What a reply has to score: the criteria of one response, or each of several."""
        if len(judged) > 1:
            return [str(number) for number in range(1, len(judged) + 1)]
        return list(self.config.criteria)

    def build_dialog(
        self, task: Task, judged: Sequence[Trajectory], is_repeated: bool = False
    ) -> Dialog:
        """Write the question to the judge; a repeated one says that the last reply was unusable."""
        config = self.config
        material = [("TASK", _transcript(task.messages))]
        if config.reference:
            if config.reference not in task.gold:
                raise SharpenError(f"task {task.id!r}: gold has no {config.reference!r}")
            material.append(("REFERENCE", str(task.gold[config.reference])))
        for number, trajectory in enumerate(judged, 1):
            messages = []
            for turn in trajectory.turns:
                messages += [turn.message, *turn.results]
            material.append((f"RESPONSE {number}", _transcript(messages)))
        fences = [fence(label, text, config.max_chars, config.seed) for label, text in material]
        text = self.prompts["one" if len(judged) == 1 else "several"].format(
            low=config.low,
            high=config.high,
            count=len(judged),
            criteria="\n".join(f"- {name}: {what}" for name, what in config.criteria.items()),
            material="\n\n".join(fences),
            shape=", ".join(f'"{name}": number' for name in self._score_names(judged)),
        )
        if is_repeated:
            text += f"\n\n{self.prompts['again']}"
        question = (Message("system", self.prompts["system"]), Message("user", text))
        return Dialog(question, id=task.id)


def fence(label: str, text: str, max_chars: int, seed: int) -> str:
    """Put foreign text between marks that it cannot contain; the middle of a long one is cut."""
    half = max_chars // 2
    left_out = len(text) - 2 * half
    if left_out > 0:
        text = f"{text[:half]}\n[{left_out} characters left out]\n{text[-half:]}"
    text = _UNSEEN.sub("", text)
    text = _MARKERS.sub(lambda marker: marker[0].translate(_LOOKALIKES), text)
    mark = hashlib.sha256(f"{seed}:{text}".encode("utf-8", "replace")).hexdigest()[:12]
    return f"<<<{label} {mark}>>>\n{text}\n<<<END {mark}>>>"


def _transcript(messages: Sequence[Message]) -> str:
    """One message as its text; several as a JSON line each, so that none can fake another one."""
    if len(messages) == 1:
        return assistant_text(messages[0], "")
    lines = []
    for message in messages:
        lines.append(compact_json({"role": message.role, "content": assistant_text(message, "")}))
    return "\n".join(lines)


def read_scores(text: str, names: Sequence[str], low: float, high: float) -> Score:
    """Read a reply's numbers, each within the scale, as parts from 0 to 1 with their mean.

    Raises ValueError where there are none, or several that differ."""
    answer = text.rpartition("</think>")[2][-_MAX_REPLY_CHARS:]
    replies = _objects_with(answer, names)
    values = [[reply[name] for name in names] for reply in replies]
    if not values:
        raise ValueError("no JSON object with scores")
    if any(other_values != values[0] for other_values in values):
        raise ValueError("several scores that differ")
    parts = {}
    for name, value in zip(names, values[0], strict=True):
        if type(value) not in (int, float) or not low <= value <= high:  # True is an int too
            raise ValueError(f"{name}: expected a number from {low:g} to {high:g}, found {value!r}")
        parts[name] = (value - low) / (high - low)
    reason = str(replies[-1].get("reason", ""))[:_MAX_REASON_CHARS]
    return Score(sum(parts.values()) / len(parts), parts, reason)


def _objects_with(text: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """All JSON objects of a text that have every name as a key."""
    objects = []
    position = text.find("{")
    while position >= 0:
        try:
            value, position = STRICT_DECODER.raw_decode(text, position)
            if value.keys() >= set(names):
                objects.append(value)
        except (ValueError, RecursionError):
            position += 1
        position = text.find("{", position)
    return objects
