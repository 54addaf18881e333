"""Rewards that can be checked: mathematics, code, SQL, JSON, exact and set answers, end states.

Correctness is 0.9 of a reward and format 0.1. A program that fails some tests gets nothing for its
format, so that a worse answer never wins by its looks. A response can be anything: what is wrong
with it is a reward of 0 with a reason. A task whose gold cannot be used is an error.
Training, evaluation and `sharpen reward try` use it.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sharpen.config import one_line
from sharpen.rewards.code import fenced_blocks
from sharpen.rewards.math import MathJudge, final_answer, text_after_thoughts
from sharpen.rewards.verifiers import VERIFIERS
from sharpen.sandbox import Sandbox
from sharpen.types import Json, RowError, Score, Task, Trajectory

_MAX_RESPONSE = 1 << 17  # characters; of a longer one the end counts
_CORRECTNESS_WEIGHT = 0.9
_FORMAT_WEIGHT = 0.1
_STEP = re.compile(r"第[一二三四五六七八九十\d]+步|步骤\s*\d|\b[Ss]tep\s+\d")
# kind → the field of gold that a plain ground truth is stored in; "answers" for all others
# kinds that are played in other environments and verified alike
_VERIFIED_AS = {"code_session": "code", "sql_session": "sql", "database_state": "tool_state"}
GOLD_KEYS = {"math": "answer", "choice": "answer", "code": "tests", "json": "json", "sql": "sql"}


class VerifiableRewardCalculator(contextlib.AbstractContextManager):
    """`VerifiableRewardCalculator("math").calculate_reward(question, response, truth)`, and a
    `Reward` for tasks whose `kind` and `gold` say what is right.

    `end_state` scores tasks of the kind `tool_state`, by default in the tool world. The sandbox and
    the judge are started when first needed; `close` ends them."""

    def __init__(
        self,
        task_type: str = "math",
        sandbox: Sandbox | None = None,
        workers: int = 2,
        end_state: Callable[[Task, Trajectory], float] | None = None,
    ):
        self.task_type = _check_kind(task_type, "")
        self.workers = workers
        self.end_state = end_state
        self.judge = MathJudge(workers)
        self._given_sandbox = sandbox
        self._sandbox = sandbox
        self._lock = threading.Lock()

    @property
    def sandbox(self) -> Sandbox:
        """The given sandbox, or one of our own that is started at first use."""
        with self._lock:
            if not self._sandbox:
                self._sandbox = Sandbox(self.workers)
            return self._sandbox

    def calculate_reward(self, question: str, response: str, ground_truth: Any) -> Json:
        """Score one response; returns `total` and `components`.

        The ground truth is text, a list, or a task's gold."""
        if isinstance(ground_truth, dict):
            gold = ground_truth
        else:
            gold = {GOLD_KEYS.get(self.task_type, "answers"): ground_truth}
        score = self._score_response(self.task_type, response, gold, str(question)[:60])
        return {"total": score.value, "components": dict(score.parts)}

    def calculate_rewards(
        self, questions: Sequence[str], responses: Sequence[str], ground_truths: Sequence[Any]
    ) -> list[Json]:
        """`calculate_reward` of many, in parallel."""
        return self._map_in_threads(self.calculate_reward, questions, responses, ground_truths)

    def score_many(self, tasks: Sequence[Task], trajectories: Sequence[Trajectory]) -> list[Score]:
        """`score` of many, in parallel."""
        return self._map_in_threads(self.score, tasks, trajectories)

    def _map_in_threads(self, function: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
        rows = list(zip(*columns, strict=True))
        with ThreadPoolExecutor(self.workers) as threads:
            return list(threads.map(lambda row: function(*row), rows))

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        kind = _check_kind(_VERIFIED_AS.get(task.kind, task.kind) or self.task_type, task.id)
        if kind == "tool_state":
            return self._score_end_state(task, trajectory)
        response = trajectory.turns[-1].message.content if trajectory.turns else ""
        return self._score_response(kind, response, task.gold, task.id)

    def _score_end_state(self, task: Task, trajectory: Trajectory) -> Score:
        if self.end_state is None:
            self.end_state = _completion_in_the_world()
        value = float(self.end_state(task, trajectory))
        if not math.isfinite(value):
            raise RowError(task.id, f"end_state gave {value}")
        return Score(value, {"correctness": value}, solved=value >= 1)

    def _score_response(self, kind: str, response: Any, gold: Json, where: str) -> Score:
        text = response[-_MAX_RESPONSE:] if isinstance(response, str) else ""
        answer = text_after_thoughts(text)
        correctness = 0.0
        problem = "empty"
        try:
            if answer.strip():
                correctness, problem = VERIFIERS[kind](self, answer, gold, where)
        except (RecursionError, ValueError, OverflowError) as error:
            problem = f"the answer cannot be read: {one_line(error)[:200]}"
        is_broken_program = kind == "code" and correctness != 1
        form = 0.0 if is_broken_program else _format_score(kind, text)
        value = _CORRECTNESS_WEIGHT * correctness + _FORMAT_WEIGHT * form
        parts = {"correctness": correctness, "format": form}
        return Score(value, parts, problem, solved=correctness == 1)

    def close(self) -> None:
        self.judge.close()
        if self._sandbox and not self._given_sandbox:
            self._sandbox.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_kind(kind: str, where: str) -> str:
    if kind not in VERIFIERS and kind != "tool_state":
        kinds = ", ".join(sorted([*VERIFIERS, "tool_state"]))
        raise RowError(where, f"no verifier for kind {kind!r}; kinds: {kinds}")
    return kind


def _format_score(kind: str, text: str) -> float:
    """For mathematics 0.3 for thoughts, 0.3 for steps, 0.4 for a marked answer.

    For other kinds 1 for a marked or fenced answer, 0.5 for any other text."""
    is_marked = final_answer(text) is not None
    if kind != "math":
        if is_marked or fenced_blocks(text, kind, "python"):
            return 1.0
        return 0.5 if text.strip() else 0.0
    score = 0.0
    if "<think>" in text or "让我思考" in text:
        score += 0.3
    if _STEP.search(text):
        score += 0.3
    if is_marked:
        score += 0.4
    return score


def _completion_in_the_world() -> Callable[[Task, Trajectory], float]:
    """Returns a function that tells whether a trajectory's calls, executed, leave what gold's calls
    or statements leave."""
    from sharpen.rewards.agent import AgentRewardModel
    from sharpen.world import sql

    model = AgentRewardModel()

    def score_completion(task: Task, trajectory: Trajectory) -> float:
        if "schema" in task.gold:
            return sql.end_state_reached(task, trajectory)
        if "calls" not in task.gold:
            raise RowError(task.id, "gold.calls: missing; or give an end_state to judge the task")
        return model.score(task, trajectory).parts.get("task_completion", 0.0)

    return score_completion
