"""Rewards that can be checked: mathematics, code, SQL, JSON, exact and set answers, end states.

Correctness is 0.9 of a reward and form 0.1; a program that fails some tests gets nothing for form,
so that no dress makes a worse answer win. A response can be anything: what is wrong with it is a
reward of 0 with a reason. A task whose gold cannot be used is an error.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sharpen.config import one_line
from sharpen.rewards.code import code_in, fenced, problems, read_tests
from sharpen.rewards.math import MathJudge, final_answer, folded, math_answer, same_text, spoken
from sharpen.sandbox import Sandbox
from sharpen.tools import complaints, validator_for
from sharpen.types import Json, RowError, Score, Task, Trajectory

MAX_RESPONSE = 1 << 17  # characters; of a longer one the end counts
CORRECTNESS, FORMAT, MAX_ITEMS = 0.9, 0.1, 1000
STEP = re.compile(r"第[一二三四五六七八九十\d]+步|步骤\s*\d|\b[Ss]tep\s+\d")
LETTER = re.compile(r"(?<![A-Za-z])([A-J])(?![A-Za-z'])")
LIST_MARK = re.compile(r"[,，、;；\n]|\band\b|和")
SQL_RUNNER = """
import json, sqlite3, sys
job = json.load(sys.stdin)
forbidden = (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH, sqlite3.SQLITE_PRAGMA)
for statement in job["statements"]:
    base = sqlite3.connect(":memory:")
    base.text_factory = lambda text: text.decode("utf-8", "replace")
    try:
        base.executescript(job["schema"])
        base.set_authorizer(lambda action, *_: int(action in forbidden))
        print(json.dumps(base.execute(statement).fetchmany(10_000), default=bytes.hex), flush=True)
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}: {error}"), flush=True)
"""
Verdict = tuple[float, str]  # how right an answer is, and what is wrong with it


class VerifiableRewardCalculator(contextlib.AbstractContextManager):
    """`VerifiableRewardCalculator("math").calculate_reward(question, response, truth)`, and a
    `Reward` for tasks whose `kind` and `gold` say what is right. `end_state` scores tasks of the
    kind `tool_state`, by default in the tool world. Sandbox and judge are started when first
    needed; `close` ends them."""

    def __init__(
        self,
        task_type: str = "math",
        sandbox: Sandbox | None = None,
        workers: int = 2,
        end_state: Callable[[Task, Trajectory], float] | None = None,
    ):
        self.task_type, self.workers, self.end_state = known_kind(task_type, ""), workers, end_state
        self.judge, self.lock = MathJudge(workers), threading.Lock()
        self.given = self.pool = sandbox

    @property
    def sandbox(self) -> Sandbox:
        with self.lock:
            self.pool = self.pool or Sandbox(self.workers)
            return self.pool

    def calculate_reward(self, question: str, response: str, ground_truth: Any) -> Json:
        """The reward of one response and its parts. The truth is text, a list or a task's gold."""
        gold = {GOLD_KEYS.get(self.task_type, "answers"): ground_truth}
        gold = ground_truth if isinstance(ground_truth, dict) else gold
        score = self.judged(self.task_type, response, gold, str(question)[:60])
        return {"total": score.value, "components": dict(score.parts)}

    def calculate_rewards(
        self, questions: Sequence[str], responses: Sequence[str], ground_truths: Sequence[Any]
    ) -> list[Json]:
        """`calculate_reward` of many, in parallel."""
        return self.each(self.calculate_reward, questions, responses, ground_truths)

    def score_many(self, tasks: Sequence[Task], trajectories: Sequence[Trajectory]) -> list[Score]:
        """`score` of many, in parallel."""
        return self.each(self.score, tasks, trajectories)

    def each(self, function: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
        rows = list(zip(*columns, strict=True))
        with ThreadPoolExecutor(self.workers) as threads:
            return list(threads.map(lambda row: function(*row), rows))

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        kind = known_kind(task.kind or self.task_type, task.id)
        if kind != "tool_state":
            response = trajectory.turns[-1].message.content if trajectory.turns else ""
            return self.judged(kind, response, task.gold, task.id)
        self.end_state = self.end_state or completion_in_the_world()
        if not math.isfinite(value := float(self.end_state(task, trajectory))):
            raise RowError(task.id, f"end_state gave {value}")
        return Score(value, {"correctness": value})

    def judged(self, kind: str, response: Any, gold: Json, where: str) -> Score:
        text = response[-MAX_RESPONSE:] if isinstance(response, str) else ""
        answer = spoken(text)
        right, wrong = 0.0, "empty"
        try:
            if answer.strip():
                right, wrong = VERIFIERS[kind](self, answer, gold, where)
        except (RecursionError, ValueError, OverflowError) as error:
            wrong = f"the answer cannot be read: {one_line(error)[:200]}"
        form = form_of(kind, text) if right == 1 or kind != "code" else 0.0
        parts = {"correctness": right, "format": form}
        return Score(CORRECTNESS * right + FORMAT * form, parts, wrong)

    def close(self) -> None:
        self.judge.close()
        if self.pool and not self.given:
            self.pool.close()

    def __exit__(self, *_: object) -> None:
        self.close()


# Verifiers: an answer that is not blank, the task's gold, where the task stands ----------------


def verify_math(by: VerifiableRewardCalculator, text: str, gold: Json, where: str) -> Verdict:
    wanted = str(needed(gold, "answer", where))
    wanted, found = math_answer(wanted) or wanted, math_answer(text)
    equal = by.judge.equal(wanted, found) if found else False
    wrong = f"{found!r} is not {wanted!r}" if found else "no answer"
    return float(equal or 0), "" if equal else wrong if equal is False else "no verdict in time"


def verify_code(by: VerifiableRewardCalculator, text: str, gold: Json, where: str) -> Verdict:
    tests = read_tests(gold, where)
    code = code_in(text, tests.names)
    if gold.get("entry_point"):  # the setup is a prompt, and the answer may be its rest
        code = f"{gold.get('setup') or ''}\n{code}"
    wrong = problems(by.sandbox, code, tests)
    return wrong.count("") / len(wrong), "; ".join(dict.fromkeys(filter(None, wrong)))


def verify_sql(by: VerifiableRewardCalculator, text: str, gold: Json, where: str) -> Verdict:
    """Rows equal to those of `gold.sql`, or to `gold.result`, in the database of `gold.schema`."""
    if "answers" in gold:  # asked for what is in a table, not for a query
        return verify_set(by, text, gold, where)
    wanted = [] if "result" in gold else [needed(gold, "sql", where)]
    query = (fenced(text, "sql", "sqlite") or [text])[-1].strip()
    job = {"schema": needed(gold, "schema", where), "statements": [*wanted, query]}
    limits = by.sandbox.limits.model_copy(update={"output_kb": 4096})
    result = by.sandbox.run(SQL_RUNNER, stdin=json.dumps(job), limits=limits)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    right = gold["result"] if "result" in gold else next(iter(lines), result.stopped)
    if isinstance(right, str):
        raise RowError(where, f"gold.sql: {one_line(right)}")
    found = lines[len(wanted)] if len(lines) > len(wanted) else result.stopped or "no result"
    if isinstance(found, str):
        return 0.0, found
    same = same_rows(right, found, ordered=is_ordered(gold.get("sql") or ""))
    return float(same), "" if same else f"{len(found)} other rows"


def verify_json(by: VerifiableRewardCalculator, text: str, gold: Json, where: str) -> Verdict:
    """Valid by `gold.schema` and equal to `gold.json`, as far as they are given."""
    if not {"schema", "json"} & gold.keys():
        raise RowError(where, "gold: expected a schema or a json value")
    block = (fenced(text, "json") or [text])[-1]
    start = min((at for at in map(block.find, "{[") if at >= 0), default=0)
    value, _ = json.JSONDecoder().raw_decode(block[start:].strip())
    try:
        schema = validator_for(json.dumps(gold.get("schema", {}), sort_keys=True))
    except ValueError as error:
        raise RowError(where, f"gold.schema: {one_line(error)[:200]}") from None
    wrong = complaints(schema, value)
    if "json" in gold and canonical(value) != canonical(gold["json"]):
        wrong.append("another value")
    return float(not wrong), "; ".join(wrong)[:500]


def verify_exact(by: VerifiableRewardCalculator, text: str, gold: Json, where: str) -> Verdict:
    found = final_answer(text) or text.strip()
    right = any(same_text(each, found) for each in answers_of(gold, where))
    return float(right), "" if right else f"{found[:100]!r} is not the answer"


def verify_set(by: VerifiableRewardCalculator, text: str, gold: Json, where: str) -> Verdict:
    found = (final_answer(text) or text).strip(" []{}\n")
    items = [item for item in LIST_MARK.split(found, MAX_ITEMS) if folded(item)]
    wanted = answers_of(gold, where)
    missing = [each for each in wanted if not any(same_text(each, item) for item in items)]
    extra = [item for item in items if not any(same_text(each, item) for each in wanted)]
    wrong = missing or extra
    return float(not wrong), f"missing {missing}, extra {extra}"[:500] if wrong else ""


def verify_choice(by: VerifiableRewardCalculator, text: str, gold: Json, where: str) -> Verdict:
    marked = final_answer(text)
    letters = LETTER.findall(marked or text) or [""]
    found = letters[0] if marked else letters[-1]
    right = found == str(needed(gold, "answer", where)).strip().upper()
    return float(right), "" if right else f"{found!r} is not the answer"


VERIFIERS = {"math": verify_math, "code": verify_code, "sql": verify_sql, "json": verify_json}
VERIFIERS |= {"set": verify_set, "choice": verify_choice}
VERIFIERS |= dict.fromkeys(("exact", "qa", "retrieval"), verify_exact)
GOLD_KEYS = {"math": "answer", "choice": "answer", "code": "tests", "json": "json", "sql": "sql"}


def completion_in_the_world() -> Callable[[Task, Trajectory], float]:
    """Whether a trajectory's calls, executed, leave what gold's calls or statements leave."""
    from sharpen.rewards.agent import AgentRewardModel
    from sharpen.world import sql

    model = AgentRewardModel()

    def completed(task: Task, trajectory: Trajectory) -> float:
        if "schema" in task.gold:
            return sql.end_state_reached(task, trajectory)
        if "calls" not in task.gold:
            raise RowError(task.id, "gold.calls: missing; or give an end_state to judge the task")
        return model.score(task, trajectory).parts.get("task_completion", 0.0)

    return completed


def known_kind(kind: str, where: str) -> str:
    if kind not in VERIFIERS and kind != "tool_state":
        kinds = ", ".join(sorted([*VERIFIERS, "tool_state"]))
        raise RowError(where, f"no verifier for kind {kind!r}; kinds: {kinds}")
    return kind


def needed(gold: Json, key: str, where: str) -> Any:
    if gold.get(key) in (None, "", []):
        raise RowError(where, f"gold.{key}: missing")
    return gold[key]


def answers_of(gold: Json, where: str) -> list[str]:
    found = gold.get("answer") or needed(gold, "answers", where)
    return [str(each) for each in (found if isinstance(found, list) else [found])]


def form_of(kind: str, text: str) -> float:
    """Mathematics: thoughts, steps, a marked answer; else a marked or fenced one is 1, not 0.5."""
    marked = final_answer(text) is not None
    if kind != "math":
        return 1.0 if marked or fenced(text, kind, "python") else 0.5 * bool(text.strip())
    thinks = "<think>" in text or "让我思考" in text
    return 0.3 * thinks + 0.3 * bool(STEP.search(text)) + 0.4 * marked


def is_ordered(query: str) -> bool:
    """Whether the outermost query has an ORDER BY."""
    query, before = re.sub(r"'[^']*'", "", query), ""
    while query != before:
        query, before = re.sub(r"\([^()]*\)", "", query), query
    return re.search(r"\border\s+by\b", query, re.IGNORECASE) is not None


def same_rows(wanted: list[Any], found: list[Any], ordered: bool) -> bool:
    first, second = (
        [tuple(round(c, 6) if isinstance(c, float) else c for c in row) for row in rows]
        for rows in (wanted, found)
    )
    return first == second if ordered else Counter(first) == Counter(second)


def canonical(value: Any) -> str:
    """One text a JSON value: key order does not matter, 2.0 is 2, true is not 1."""
    plain = json.loads(
        json.dumps(value), parse_float=lambda t: int(t[:-2]) if t[-2:] == ".0" else float(t)
    )
    return json.dumps(plain, sort_keys=True)
