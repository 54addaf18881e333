"""TaskBench and UltraTool plans: steps, tools as nodes, links between them; tools come from
`tool_desc.json`."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from sharpen.data.importers import Importer, Rows
from sharpen.data.importers.reading import below
from sharpen.data.importers.shapes import beside, candidates, literal, properties
from sharpen.records import read_json
from sharpen.types import Json, RowError, Task, ToolSpec


def catalogue(path: Path) -> dict[str, ToolSpec]:
    return {node["id"]: tool(node) for node in read_json(beside(path, *PLACES))["nodes"]}


PLACES = ("tool_desc.json", "data/ultratool/tool_desc.json")


def tool(node: Json) -> ToolSpec:
    fields = {
        p["name"]: {"type": p["type"], "description": p.get("desc", "")}
        for p in node.get("parameters") or []
    }
    return ToolSpec(node["id"], node["desc"], {"type": "object"} | properties(fields))


def part(row: Json, name: str) -> Any:
    """`task_…` or `tool_…`, as a list or as its JSON text."""
    value = row.get(f"task_{name}", row.get(f"tool_{name}", []))
    return literal(value) if isinstance(value, str) else value


def convert(row: Json, where: str, tools: dict[str, ToolSpec]) -> Rows:
    nodes, links = part(row, "nodes"), part(row, "links")
    names = [node["task"] for node in nodes]
    if missing := [name for name in names if name not in tools]:
        raise RowError(where, f"no tool {missing[0]!r} in tool_desc.json")
    named = [(link["source"], link["target"]) for link in links]
    if named == list(pairwise(names)):  # a chain, which may use a tool twice
        edges = [[str(i), str(i + 1)] for i in range(1, len(names))]
    else:
        edges = [[str(names.index(a) + 1), str(names.index(b) + 1)] for a, b in named]
    graph = [
        {"id": str(i), "tool": node["task"]}
        | ({"arguments": node["arguments"]} if node.get("arguments") else {})
        for i, node in enumerate(nodes, 1)
    ]
    request = row.get("user_request") or row["instruction"]
    metadata = {"steps": part(row, "steps"), "type": row.get("type", "")}
    yield Task(
        str(row["id"]),
        request.strip(),
        candidates(names, tools, str(row["id"])),
        {"nodes": graph, "edges": edges},
        "planning",
        metadata=metadata,
    )


def detect(row: Json) -> bool:
    return "task_nodes" in row or "tool_nodes" in row


IMPORTERS = (Importer("taskbench", detect, convert, below(r"jsonl?$"), catalogue),)
