"""RestBench: a request and the endpoints that serve it, in order; tools come from the OpenAPI
file `specs/*_oas.json`.

One of the 57 visible solutions names an endpoint that the file lacks (`GET /track/{id}`, where the
file has `/tracks/{id}`) and is kept apart: 98.2% stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sharpen.data.importers import Importer
from sharpen.data.importers.shapes import beside, candidates, properties
from sharpen.records import read_json
from sharpen.types import Json, RowError, Task, ToolSpec


def endpoints(path: Path) -> dict[str, ToolSpec]:
    document = read_json(beside(path, f"specs/{path.stem}_oas.json"))
    shared = document.get("components", {}).get("parameters", {})
    found = {}
    for route, methods in document["paths"].items():
        for method, operation in methods.items():
            if not isinstance(operation, dict) or "responses" not in operation:
                continue
            fields = {}
            for parameter in operation.get("parameters") or []:
                parameter = shared.get(parameter.get("$ref", "").rsplit("/", 1)[-1], parameter)
                kind = parameter.get("schema") or {}
                text = {"description": kind.get("description") or ""}
                needed = {"required": str(parameter.get("required", False)).lower()}
                fields[parameter["name"]] = {"type": kind.get("type", "string")} | text | needed
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            for name, field in body.get("schema", {}).get("properties", {}).items():
                text = {"description": field.get("description") or ""}
                fields.setdefault(name, {"type": field.get("type", "string")} | text)
            name = f"{method.upper()} {route}"
            summary = operation.get("description") or operation.get("summary") or ""
            found[name] = ToolSpec(name, summary.strip(), {"type": "object"} | properties(fields))
    return found


def convert(row: Json, where: str, tools: dict[str, ToolSpec]) -> Iterator[Task]:
    names = row["solution"]
    if missing := [name for name in names if name not in tools]:
        raise RowError(where, f"no endpoint {missing[0]!r} in the OpenAPI file")
    nodes = [{"id": str(i), "tool": name} for i, name in enumerate(names, 1)]
    edges = [[str(i), str(i + 1)] for i in range(1, len(names))]
    chosen = candidates(names, tools, row["query"])
    yield Task("", row["query"], chosen, {"nodes": nodes, "edges": edges}, "planning")


def detect(row: Any) -> bool:
    return isinstance(row["query"], str) and isinstance(row["solution"], list)


IMPORTERS = (Importer("restbench", "REST plans", detect, convert, side=endpoints),)
