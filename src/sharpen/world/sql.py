"""A small SQL database in memory. Statements cannot leave it: no files, and limits on time, rows
and size.

`Task.gold` is `{"schema": script, "writable"?: true, "sql": statement or list}`. `envs/sql.py` acts
in the database, and the SQL reward compares what a trajectory leaves with what gold leaves.
"""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from sharpen.config import one_line
from sharpen.types import Json, RowError, Task, Trajectory

LIMIT_S = 2.0  # per statement
_BUILD_LIMIT_S = 10.0
_MAX_ROWS = 50
_MAX_VALUE_BYTES = 1 << 17
_MAX_PAGES = 1 << 14  # of 4 KB
_CLOCK_EVERY = 1000  # instructions of SQLite's virtual machine
_ATTACH_ACTIONS = (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH)
_STATEMENT_ACTIONS = (*_ATTACH_ACTIONS, sqlite3.SQLITE_PRAGMA)
_CALL_LIMIT_ERROR = '{"error": "call_limit"'

_TableRows = dict[str, Counter[Any]]  # table → row → how often it is there


class Database:
    """The database of a task."""

    def __init__(self, task: Task):
        schema = task.gold.get("schema")
        if not isinstance(schema, str) or not schema.strip():
            raise RowError(task.id, "gold.schema: expected a script that builds the database")
        self._base = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._base.text_factory = lambda text: text.decode("utf-8", "replace")
        self._base.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
        self._base.execute(f"pragma max_page_count = {_MAX_PAGES}")
        self._forbid(_ATTACH_ACTIONS)
        self._start_clock(_BUILD_LIMIT_S)
        is_read_only = not task.gold.get("writable")
        try:
            self._base.executescript(schema)
            self._base.execute(f"pragma query_only = {int(is_read_only)}")
        except (sqlite3.Error, ValueError) as error:
            raise RowError(task.id, f"gold.schema: {one_line(error)}") from None
        self._forbid(_STATEMENT_ACTIONS)

    def _forbid(self, actions: Sequence[int]) -> None:
        def authorize(action: int, *_: Any) -> int:
            return sqlite3.SQLITE_DENY if action in actions else sqlite3.SQLITE_OK

        self._base.set_authorizer(authorize)

    def _start_clock(self, limit_s: float) -> float:
        """Interrupt whatever runs longer than this; return the end on the monotonic clock."""
        end = time.monotonic() + limit_s

        def is_late() -> int:
            return int(time.monotonic() > end)

        self._base.set_progress_handler(is_late, _CLOCK_EVERY)
        return end

    def run(self, statement: str, max_rows: int = _MAX_ROWS, limit_s: float = LIMIT_S) -> Json:
        """Run one statement.

        Returns `{"columns", "rows"}`, with `more` if rows were left out, `{"changed"}` for a
        statement without rows, or an error.
        """
        end = self._start_clock(limit_s)
        try:
            cursor = self._base.execute(statement)
            rows = [[_plain_cell(cell) for cell in row] for row in cursor.fetchmany(max_rows + 1)]
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
            if time.monotonic() > end:
                return {"error": "timeout", "message": f"it took longer than {limit_s:g} s"}
            return {"error": "sql", "message": one_line(error)}
        if cursor.description is None:
            return {"changed": cursor.rowcount}
        answer: Json = {
            "columns": [column[0] for column in cursor.description],
            "rows": rows[:max_rows],
        }
        if len(rows) > max_rows:
            answer["more"] = True
        return answer

    def state(self) -> _TableRows:
        """Returns the rows of every table, in no order."""
        self._base.set_progress_handler(None, 0)
        tables = self._base.execute("select name from sqlite_master where type = 'table'")
        names = [name for (name,) in tables if not name.startswith("sqlite_")]
        state: _TableRows = {}
        for name in names:
            quoted = name.replace('"', '""')
            state[name] = Counter(self._base.execute(f'select * from "{quoted}"'))
        return state


def _plain_cell(cell: Any) -> Any:
    return cell.hex() if isinstance(cell, bytes) else cell


def _run_statements(task: Task, statements: Sequence[Any]) -> tuple[_TableRows, list[Json]]:
    """Returns the end state of the task's database after the statements, and their answers."""
    database = Database(task)
    answers = [database.run(str(statement)) for statement in statements]
    return database.state(), answers


def end_state_reached(task: Task, trajectory: Trajectory) -> float:
    """Returns 1 if the `run_sql` calls of a trajectory leave what the gold statements leave."""
    gold_statements = task.gold.get("sql") or []
    if isinstance(gold_statements, str):
        gold_statements = [gold_statements]
    gold_state, answers = _run_statements(task, gold_statements)
    if not answers or any("error" in answer for answer in answers):
        raise RowError(task.id, f"gold.sql: {answers or 'missing'}"[:300])
    state, _ = _run_statements(task, _executed_statements(trajectory))
    return float(state == gold_state)


def _executed_statements(trajectory: Trajectory) -> list[Any]:
    """Returns the statements of a trajectory, without calls that the call limit refused."""
    statements = []
    for turn in trajectory.turns:
        for call, result in zip_longest(turn.message.tool_calls, turn.results):
            was_refused = result and result.content.startswith(_CALL_LIMIT_ERROR)
            if call and call.name == "run_sql" and not was_refused:
                statements.append(call.arguments.get("query", ""))
    return statements
