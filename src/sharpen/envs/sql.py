"""SQL: a database that is built for each task, and a tool that runs statements in it. Tasks of the
kind `sql` are scored by their last message (a query, or the values that were asked for), those of
the kind `tool_state` by what the statements leave; `gold` is that of `world/sql.py`."""

from __future__ import annotations

from collections.abc import Iterable

from sharpen.envs.python import PythonTools
from sharpen.tools import Tool, tool
from sharpen.types import Json, Task
from sharpen.world.sql import LIMIT_S, Database


class SQL(PythonTools):
    def open(self, task: Task) -> Iterable[Tool]:
        base = Database(task)

        @tool(timeout_s=2 * LIMIT_S)
        def run_sql(query: str) -> Json:
            """Runs one SQL statement (SQLite) and returns its rows.

            Args:
                query: the statement
            """
            return base.run(query)

        return (run_sql,)
