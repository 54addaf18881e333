"""One verifier for each kind of checkable task: is this answer right, and if not, why not.

`rewards/verifiable.py` calls them with an answer that is not blank, the task's gold, and the name
of the task for errors. An answer can be anything; gold that cannot be used is an error.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from sharpen.config import one_line
from sharpen.rewards.code import extract_code, fenced_blocks, read_tests, run_tests
from sharpen.rewards.math import MathJudge, final_answer, math_answer, normalize_text, same_text
from sharpen.sandbox import Sandbox
from sharpen.tools import argument_problems, validator_for
from sharpen.types import Json, RowError

_MAX_ITEMS = 1000  # of a list in an answer
_LETTER = re.compile(r"(?<![A-Za-z])([A-J])(?![A-Za-z'])")
_SEPARATOR = re.compile(r"[,，、;；\n]|\band\b|和")
_SQL_RUNNER = """
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
_Verdict = tuple[float, str]  # how right an answer is, and what is wrong with it


class _Verification(Protocol):
    """What runs formulas and code: the calculator that calls a verifier."""

    judge: MathJudge

    @property
    def sandbox(self) -> Sandbox:
        """Untrusted code runs in it."""
        ...


def _verify_math(by: _Verification, text: str, gold: Json, where: str) -> _Verdict:
    """The same number or formula as `gold.answer`."""
    gold_text = str(_require_gold(gold, "answer", where))
    gold_answer = math_answer(gold_text) or gold_text
    answer = math_answer(text)
    if not answer:
        return 0.0, "no answer"
    equal = by.judge.equal(gold_answer, answer)
    if equal is None:
        return 0.0, "no verdict in time"
    return float(equal), "" if equal else f"{answer!r} is not {gold_answer!r}"


def _verify_code(by: _Verification, text: str, gold: Json, where: str) -> _Verdict:
    """The share of `gold.tests` that pass."""
    tests = read_tests(gold, where)
    code = extract_code(text, tests.names)
    if gold.get("entry_point"):  # the setup is a prompt, and the answer may be its rest
        code = f"{gold.get('setup') or ''}\n{code}"
    problems = run_tests(by.sandbox, code, tests)
    distinct_problems = dict.fromkeys(problem for problem in problems if problem)
    return problems.count("") / len(problems), "; ".join(distinct_problems)


def _verify_sql(by: _Verification, text: str, gold: Json, where: str) -> _Verdict:
    """The same rows as `gold.sql` gives, or as `gold.result`, in the database of `gold.schema`.

    With `gold.answers` the task asks for what is in a table, not for a query."""
    if "answers" in gold:
        return _verify_set(by, text, gold, where)
    gold_statements = [] if "result" in gold else [_require_gold(gold, "sql", where)]
    query = (fenced_blocks(text, "sql", "sqlite") or [text])[-1].strip()
    job = {
        "schema": _require_gold(gold, "schema", where),
        "statements": [*gold_statements, query],
    }
    limits = by.sandbox.limits.model_copy(update={"output_kb": 4096})
    result = by.sandbox.run(_SQL_RUNNER, stdin=json.dumps(job), limits=limits)
    outputs = [json.loads(line) for line in result.stdout.splitlines()]  # rows or an error each
    if "result" in gold:
        gold_rows = gold["result"]
    else:
        gold_rows = outputs.pop(0) if outputs else result.stopped
    if isinstance(gold_rows, str):
        raise RowError(where, f"gold.sql: {one_line(gold_rows)}")
    rows = outputs[0] if outputs else result.stopped or "no result"
    if isinstance(rows, str):
        return 0.0, rows
    same = _same_rows(gold_rows, rows, ordered=is_ordered(gold.get("sql") or ""))
    return float(same), "" if same else f"{len(rows)} other rows"


def _verify_json(by: _Verification, text: str, gold: Json, where: str) -> _Verdict:
    """Valid by `gold.schema` and equal to `gold.json`, as far as they are given."""
    if "schema" not in gold and "json" not in gold:
        raise RowError(where, "gold: expected a schema or a json value")
    value = _first_json_value((fenced_blocks(text, "json") or [text])[-1])
    try:
        schema = validator_for(json.dumps(gold.get("schema", {}), sort_keys=True))
    except ValueError as error:
        raise RowError(where, f"gold.schema: {one_line(error)[:200]}") from None
    problems = argument_problems(schema, value)
    if "json" in gold and _canonical_json(value) != _canonical_json(gold["json"]):
        problems.append("another value")
    return float(not problems), "; ".join(problems)[:500]


def _first_json_value(text: str) -> Any:
    """Read the value that begins at the first bracket; raises ValueError where it is no JSON."""
    starts = [text.find(bracket) for bracket in "{[" if bracket in text]
    start = min(starts, default=0)
    value, _ = json.JSONDecoder().raw_decode(text[start:].strip())
    return value


def _verify_exact(by: _Verification, text: str, gold: Json, where: str) -> _Verdict:
    """Equal to one of `gold.answers`, without case, punctuation, articles and blanks."""
    answer = final_answer(text) or text.strip()
    right = any(same_text(gold_answer, answer) for gold_answer in _gold_answers(gold, where))
    return float(right), "" if right else f"{answer[:100]!r} is not the answer"


def _verify_set(by: _Verification, text: str, gold: Json, where: str) -> _Verdict:
    """The same set as `gold.answers`, written as a list in any order."""
    answer = (final_answer(text) or text).strip(" []{}\n")
    items = [item for item in _SEPARATOR.split(answer, _MAX_ITEMS) if normalize_text(item)]
    gold_items = _gold_answers(gold, where)
    missing = [g for g in gold_items if not any(same_text(g, item) for item in items)]
    extra = [item for item in items if not any(same_text(g, item) for g in gold_items)]
    if missing or extra:
        return 0.0, f"missing {missing}, extra {extra}"[:500]
    return 1.0, ""


def _verify_choice(by: _Verification, text: str, gold: Json, where: str) -> _Verdict:
    """The letter of `gold.answer`: the first of a marked answer, or the last of the text."""
    marked = final_answer(text)
    letters = _LETTER.findall(marked or text) or [""]
    letter = letters[0] if marked else letters[-1]
    right = letter == str(_require_gold(gold, "answer", where)).strip().upper()
    return float(right), "" if right else f"{letter!r} is not the answer"


_Verifier = Callable[[_Verification, str, Json, str], _Verdict]
VERIFIERS: dict[str, _Verifier] = {
    "math": _verify_math,
    "code": _verify_code,
    "sql": _verify_sql,
    "json": _verify_json,
    "set": _verify_set,
    "choice": _verify_choice,
    "exact": _verify_exact,
    "qa": _verify_exact,
}


# Gold ---------------------------------------------------------------------------------------------


def _require_gold(gold: Json, key: str, where: str) -> Any:
    """Returns a field of gold; a missing or empty one is an error that names the task."""
    if gold.get(key) in (None, "", []):
        raise RowError(where, f"gold.{key}: missing")
    return gold[key]


def _gold_answers(gold: Json, where: str) -> list[str]:
    answers = gold.get("answer") or _require_gold(gold, "answers", where)
    if not isinstance(answers, list):
        answers = [answers]
    return [str(answer) for answer in answers]


# Comparison of rows and values --------------------------------------------------------------------


def is_ordered(query: str) -> bool:
    """Whether the outermost query has an ORDER BY."""
    query = re.sub(r"'[^']*'", "", query)
    previous = ""
    while query != previous:  # take away one level of brackets after the other
        previous = query
        query = re.sub(r"\([^()]*\)", "", query)
    return re.search(r"\border\s+by\b", query, re.IGNORECASE) is not None


def _same_rows(gold_rows: list[Any], rows: list[Any], ordered: bool) -> bool:
    gold_tuples = [_rounded(row) for row in gold_rows]
    tuples = [_rounded(row) for row in rows]
    if ordered:
        return gold_tuples == tuples
    return Counter(gold_tuples) == Counter(tuples)


def _rounded(row: list[Any]) -> tuple[Any, ...]:
    return tuple(round(cell, 6) if isinstance(cell, float) else cell for cell in row)


def _canonical_json(value: Any) -> str:
    """One text for equal JSON values: key order does not matter, 2.0 is 2, true is not 1."""
    plain_value = json.loads(json.dumps(value), parse_float=_read_number)
    return json.dumps(plain_value, sort_keys=True)


def _read_number(text: str) -> int | float:
    return int(text[:-2]) if text.endswith(".0") else float(text)
