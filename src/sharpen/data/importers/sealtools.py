"""Seal-Tools: a query with its calls; the catalogue is `tool.jsonl`.

An argument `API_call_N` stands for an earlier call's response and is kept in the gold.
"""

from __future__ import annotations

from pathlib import Path

from sharpen.data.importers import Importer, Rows, has
from sharpen.data.importers.reading import below, read_file
from sharpen.data.importers.shapes import beside, candidates, parameters
from sharpen.types import Json, RowError, Task, ToolSpec


def catalogue(path: Path) -> dict[str, ToolSpec]:
    rows = [record.value for record in read_file(beside(path, "tool.jsonl"))]
    return {
        row["api_name"]: ToolSpec(
            row["api_name"],
            row["api_description"],
            parameters(row["parameters"], row.get("required")),
        )
        for row in rows
    }


def convert(row: Json, where: str, tools: dict[str, ToolSpec]) -> Rows:
    calls = [
        {"name": c["api"], "arguments": c["parameters"], "responses": c.get("responses", [])}
        for c in row["calling"]
    ]
    names = [call["name"] for call in calls]
    if missing := [name for name in names if name not in tools]:
        raise RowError(where, f"no tool {missing[0]!r} in tool.jsonl")
    difficulty = next((level for level in ("easy", "difficult") if level in row["id"]), "")
    yield Task(
        row["id"],
        row["query"],
        candidates(names, tools, row["id"]),
        {"calls": calls},
        "calls",
        "hard" if difficulty == "difficult" else difficulty,
    )


IMPORTERS = (
    Importer("sealtools", has("query", "calling"), convert, below("dev|test|train"), catalogue),
)
