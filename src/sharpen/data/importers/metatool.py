"""MetaTool: which tool a query needs, chosen among ten; descriptions come from
`plugin_des.json`."""

from __future__ import annotations

from pathlib import Path

from sharpen.data.importers import Importer, Rows, has
from sharpen.data.importers.reading import below
from sharpen.data.importers.shapes import beside, candidates
from sharpen.records import read_json
from sharpen.types import Json, RowError, Task, ToolSpec


def catalogue(path: Path) -> dict[str, ToolSpec]:
    described = read_json(beside(path, "plugin_des.json"))
    return {name: ToolSpec(name, text) for name, text in described.items()}


def convert(row: Json, where: str, tools: dict[str, ToolSpec]) -> Rows:
    name = row["Tool"]
    if name not in tools:
        raise RowError(where, f"no tool {name!r} in plugin_des.json")
    listed = candidates([name], tools, row["Query"])
    yield Task("", row["Query"], listed, {"tools": [name]}, "selection")


IMPORTERS = (Importer("metatool", has("Query", "Tool"), convert, below("query|clean"), catalogue),)
