"""An OpenAPI document → one tool for each of its operations. Remote references are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sharpen.config import read_yaml
from sharpen.tools import recursive_ref
from sharpen.types import Json, SharpenError, ToolSpec

METHODS = ("get", "post", "put", "patch", "delete")


def openapi_tools(path: Path) -> list[ToolSpec]:
    """One tool for each operation: its path, query and body parameters in one schema."""
    document = read_yaml(path)  # JSON is YAML
    if not isinstance(document, dict) or not isinstance(document.get("paths"), dict):
        raise SharpenError(f"{path}: not an OpenAPI document: it has no paths")
    if cycle := recursive_ref(document):
        raise SharpenError(f"{path}: $ref {cycle!r} contains itself")
    found: dict[str, ToolSpec] = {}
    for route, methods in document["paths"].items():
        for method in METHODS:
            operation = (methods or {}).get(method)
            if isinstance(operation, dict):
                shared = methods.get("parameters", [])
                spec = operation_spec(document, f"{method} {route}", operation, shared)
                if spec.name in found:
                    raise SharpenError(f"{path}: two operations are called {spec.name!r}")
                found[spec.name] = spec
    if not found:
        raise SharpenError(f"{path}: it has no operations")
    return list(found.values())


def operation_spec(document: Json, route: str, operation: Json, shared: list[Json]) -> ToolSpec:
    properties, required = {}, []
    for given in (*shared, *operation.get("parameters", [])):
        parameter = inlined(given, document, route)
        schema = parameter.get("schema") or {"type": parameter.get("type", "string")}
        about = parameter.get("description")
        properties[parameter["name"]] = schema | ({"description": about} if about else {})
        required += [parameter["name"]] if parameter.get("required") else []
    body = inlined(operation.get("requestBody") or {}, document, route)
    schema = body.get("content", {}).get("application/json", {}).get("schema", {})
    properties |= schema.get("properties", {})
    required += schema.get("required", [])
    name = operation.get("operationId") or route
    parameters = {"type": "object", "properties": properties, "required": sorted(set(required))}
    about = operation.get("description") or operation.get("summary") or route
    return ToolSpec(re.sub(r"\W+", "_", name).strip("_"), about, parameters)


def inlined(value: Any, document: Json, where: str) -> Any:
    """The value with local references put in their place."""
    if isinstance(value, list):
        return [inlined(item, document, where) for item in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        target: Any = document
        for key in str(value["$ref"]).removeprefix("#/").split("/"):
            target = target.get(key) if isinstance(target, dict) else None
        if target is None:
            raise SharpenError(f"{where}: $ref {value['$ref']!r} leads nowhere in the file")
        return inlined(target, document, where)
    return {key: inlined(item, document, where) for key, item in value.items()}
