"""InterCode-SQL's databases, a MySQL dump beside the questions, as SQLite scripts."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from functools import cache
from pathlib import Path

_DATABASE = re.compile(r"(?m)^USE `(\w+)`;$")
_STATEMENT = re.compile(r"(?ms)^(?:CREATE TABLE|INSERT INTO) .*?;$")
# what SQLite does not know, and what takes its place
_REPLACEMENTS = (
    (r"(?m)^\s*(?:UNIQUE |FULLTEXT )?KEY .*$\n?", ""),
    (r"(?m)^\s*CONSTRAINT .*$\n?", ""),
    (r" (?:CHARACTER SET|COLLATE)[ =]\w+| AUTO_INCREMENT| unsigned| COMMENT '[^']*'", ""),
    (r"`\(\d+\)", "`"),  # a key on the first characters of a column
    (r"\) ENGINE=.*;", ");"),
    (r",\s*\)(?=;)", "\n)"),
)
_TEXT_COLUMN = re.compile(r"(?i)(?<=` )(?:var)?char\(\d+\)|(?<=` )text")
_ESCAPED = re.compile(r"\\(.)", re.S)
_PLAIN_CHARACTERS = {"'": "''", "n": "\n", "r": "\r", "t": "\t", "0": ""}
_MAX_ROWS = 10_000


@cache
def scripts(dump: Path) -> dict[str, str]:
    """Returns database → the script that makes it."""
    _, *parts = _DATABASE.split(dump.read_text("utf-8"))
    script_of = {}
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        script_of[name] = "\n".join(_for_sqlite(s) for s in _STATEMENT.findall(text))
    return script_of


@cache
def rows_of(script: str, query: str) -> list[list[object]]:
    """Returns what a query finds in the database that a script makes."""
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(script)
        return [list(row) for row in database.execute(query).fetchmany(_MAX_ROWS)]


def _for_sqlite(statement: str) -> str:
    if statement.startswith("INSERT"):
        return _ESCAPED.sub(lambda match: _PLAIN_CHARACTERS.get(match[1], match[1]), statement)
    for pattern, replacement in _REPLACEMENTS:
        statement = re.sub(pattern, replacement, statement)
    return _TEXT_COLUMN.sub("text COLLATE NOCASE", statement)
