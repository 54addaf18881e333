"""A small SQL database in memory that nothing leaves: no files, bounded time, rows and size.

`Task.gold` is `{"schema": script, "writable"?: true, "sql": statement or list}`; `envs/sql.py` acts
in it, and what the statements of a trajectory leave is compared with what gold's leave."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from sharpen.config import one_line
from sharpen.types import Json, RowError, Task, Trajectory

MAX_ROWS, LIMIT_S, BUILD_S = 50, 2.0, 10.0
MAX_VALUE, MAX_PAGES = 1 << 17, 1 << 14  # bytes of a value, pages of 4 KB
OUTSIDE = (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH)
LIMITED = '{"error": "call_limit"'


class Database:
    """That of a task; `run` takes one statement at a time."""

    def __init__(self, task: Task):
        schema = task.gold.get("schema")
        if not isinstance(schema, str) or not schema.strip():
            raise RowError(task.id, "gold.schema: expected a script that builds the database")
        self.base = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self.base.text_factory = lambda text: text.decode("utf-8", "replace")
        self.base.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE)
        self.base.execute(f"pragma max_page_count = {MAX_PAGES}")
        self.base.set_authorizer(lambda action, *_: int(action in OUTSIDE))
        self.start_clock(BUILD_S)
        try:
            self.base.executescript(schema)
            self.base.execute(f"pragma query_only = {int(not task.gold.get('writable'))}")
        except (sqlite3.Error, ValueError) as error:
            raise RowError(task.id, f"gold.schema: {one_line(error)}") from None
        forbidden = (*OUTSIDE, sqlite3.SQLITE_PRAGMA)
        self.base.set_authorizer(lambda action, *_: int(action in forbidden))

    def start_clock(self, limit_s: float) -> float:
        end = time.monotonic() + limit_s
        self.base.set_progress_handler(lambda: int(time.monotonic() > end), 1000)
        return end

    def run(self, statement: str, max_rows: int = MAX_ROWS, limit_s: float = LIMIT_S) -> Json:
        """`{"columns", "rows"}` with `more` where rows were left out, or an error."""
        end = self.start_clock(limit_s)
        try:
            found = self.base.execute(statement)
            rows = [[plain(cell) for cell in row] for row in found.fetchmany(max_rows + 1)]
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
            late = time.monotonic() > end
            text = f"it took longer than {limit_s:g} s" if late else one_line(error)
            return {"error": "timeout" if late else "sql", "message": text}
        if found.description is None:
            return {"changed": found.rowcount}
        answer: Json = {"columns": [column[0] for column in found.description]}
        answer["rows"] = rows[:max_rows]
        return answer | ({"more": True} if len(rows) > max_rows else {})

    def state(self) -> dict[str, Counter[Any]]:
        """Every table's rows, in no order."""
        self.base.set_progress_handler(None, 0)
        listed = self.base.execute("select name from sqlite_master where type = 'table'")
        names = [name for (name,) in listed if not name.startswith("sqlite_")]
        quoted = {name: name.replace('"', '""') for name in names}
        return {n: Counter(self.base.execute(f'select * from "{q}"')) for n, q in quoted.items()}


def plain(cell: Any) -> Any:
    return cell.hex() if isinstance(cell, bytes) else cell


def left_by(task: Task, statements: Sequence[Any]) -> tuple[dict[str, Counter[Any]], list[Json]]:
    """What statements leave in the task's database, and what they answered."""
    base = Database(task)
    answers = [base.run(str(statement)) for statement in statements]
    return base.state(), answers


def end_state_reached(task: Task, trajectory: Trajectory) -> float:
    """1 where the trajectory's `run_sql` calls leave what gold's statements leave. A call past a
    limit was answered and not run."""
    gold = task.gold.get("sql") or []
    wanted, answers = left_by(task, [gold] if isinstance(gold, str) else gold)
    if not answers or any("error" in answer for answer in answers):
        raise RowError(task.id, f"gold.sql: {answers or 'missing'}"[:300])
    said = []
    for turn in trajectory.turns:
        for call, result in zip_longest(turn.message.tool_calls, turn.results):
            limited = result and result.content.startswith(LIMITED)
            if call and call.name == "run_sql" and not limited:
                said.append(call.arguments.get("query", ""))
    return float(left_by(task, said)[0] == wanted)
