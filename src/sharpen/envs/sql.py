"""The environment of database tasks (`sql_session` and `database_state`).

`gold.schema` builds a database for each task (`world/sql.py`). `sql_session` is scored by the last
message: a query, or the values that were asked for. `database_state` is scored by what the model's
statements left in the database.
"""

from __future__ import annotations

from collections.abc import Iterable

from sharpen.envs.python import PythonTools
from sharpen.tools import Tool, tool
from sharpen.types import Json, Task
from sharpen.world.sql import LIMIT_S, Database


class SQL(PythonTools):
    """The model runs statements in the task's database with `run_sql`, one per call.

    The episode ends with the first message without a call, which is the answer, or at the limits
    of `PythonTools`.
    """

    def episode_tools(self, task: Task) -> Iterable[Tool]:
        """Returns `run_sql`, in a database that is built anew for every episode."""
        database = Database(task)

        # twice the limit of the database, so that its own error comes first
        @tool(timeout_s=2 * LIMIT_S)
        def run_sql(query: str) -> Json:
            """Runs one SQL statement (SQLite) and returns its rows.

            Args:
                query: the statement
            """
            return database.run(query)

        return (run_sql,)
