"""InterCode-SQL's databases, a MySQL dump beside the questions, as SQLite scripts."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path

from sharpen.config import one_line
from sharpen.data.importers.common import beside
from sharpen.types import Json, RowError, Task

START = re.compile(r"(?m)^USE `(\w+)`;$")
STATEMENT = re.compile(r"(?ms)^(?:CREATE TABLE|INSERT INTO) .*?;$")
DROPPED = (  # what SQLite does not know, and what takes its place
    (r"(?m)^\s*(?:UNIQUE |FULLTEXT )?KEY .*$\n?", ""),
    (r"(?m)^\s*CONSTRAINT .*$\n?", ""),
    (r" (?:CHARACTER SET|COLLATE)[ =]\w+| AUTO_INCREMENT| unsigned| COMMENT '[^']*'", ""),
    (r"`\(\d+\)", "`"),  # a key on the first characters of a column
    (r"\) ENGINE=.*;", ");"),
    (r",\s*\)(?=;)", "\n)"),
)
ESCAPED = re.compile(r"\\(.)", re.S)
PLAIN = {"'": "''", "n": "\n", "r": "\r", "t": "\t", "0": ""}


@cache
def scripts(dump: Path) -> dict[str, str]:
    """Database → the script that makes it."""
    _, *parts = START.split(dump.read_text("utf-8"))
    texts = ("\n".join(map(for_sqlite, STATEMENT.findall(text))) for text in parts[1::2])
    return dict(zip(parts[::2], texts, strict=True))


def for_sqlite(statement: str) -> str:
    if statement.startswith("INSERT"):
        return ESCAPED.sub(lambda found: PLAIN.get(found[1], found[1]), statement)
    for pattern, instead in DROPPED:
        statement = re.sub(pattern, instead, statement)
    return re.sub(r"(?i)(?<=` )(?:var)?char\(\d+\)|(?<=` )text", "text COLLATE NOCASE", statement)


@cache
def rows_of(script: str, query: str) -> list[list[object]]:
    with closing(sqlite3.connect(":memory:")) as base:
        base.executescript(script)
        return [list(row) for row in base.execute(query).fetchmany(10_000)]


def sqlite_task(task: Task, raw: Json, path: Path) -> Iterator[Task]:
    """The question with its tables; gold is what the reference query finds."""
    name, query = task.gold["database"], task.gold["sql"]
    known = scripts(beside(path, "databases.sql"))
    if name not in known:
        raise RowError(task.id, f"databases.sql has no {name!r}")
    try:
        result = rows_of(known[name], query)
    except sqlite3.Error as error:
        reason = f"SQLite does not run the reference query: {one_line(error)}"
        raise RowError(task.id, reason) from None
    tables = task.metadata.get("tables") or {}
    told = "\n".join(f"{table}({', '.join(columns)})" for table, columns in tables.items())
    gold = {"sql": query, "result": result, "schema": known[name]}
    yield replace(task, instruction=f"Tables:\n{told}\n\n{task.instruction}", gold=gold)
