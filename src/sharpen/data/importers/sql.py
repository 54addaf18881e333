"""Questions to a database: InterCode-SQL (gold is a query) and DBBench (gold is the answer: its
reference queries are unreliable)."""

from __future__ import annotations

from sharpen.data.importers import Importer, Rows, has
from sharpen.types import Json, Task


def convert_intercode(row: Json, where: str, side: None) -> Rows:
    gold = {"sql": row["gold"], "database": row["db"]}
    metadata = {"tables": row.get("db_tables")}
    yield Task("", row["query"], (), gold, "sql", row["hardness"], metadata=metadata)


def convert_dbbench(row: Json, where: str, side: None) -> Rows:
    request = "\n".join(t for t in (row["description"], row.get("add_description")) if t)
    changed = {"table_md5": row["answer_md5"]} if row.get("answer_md5") else {}
    gold = {"answers": row["label"]} | changed
    metadata = {"type": row["type"], "table": row["table"], "sql": row.get("sql")}
    yield Task("", request, (), gold, "sql", metadata=metadata)


IMPORTERS = (
    Importer("intercode_sql", has("db", "query", "gold"), convert_intercode),
    Importer("dbbench", has("description", "label", "table"), convert_dbbench),
)
