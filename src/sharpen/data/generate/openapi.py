"""Read an OpenAPI file as tool specs, one per operation. `user_tools.py` builds data for them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sharpen.config import read_yaml
from sharpen.data.generate.plans import value_at
from sharpen.tools import recursive_ref
from sharpen.types import Json, SharpenError, ToolSpec

_METHODS = ("get", "post", "put", "patch", "delete")


def openapi_tools(path: Path) -> list[ToolSpec]:
    """Returns a tool for each operation, with all its parameters in one schema."""
    document = read_yaml(path)  # JSON is YAML
    if not isinstance(document, dict) or not isinstance(document.get("paths"), dict):
        raise SharpenError(f"{path}: not an OpenAPI document: it has no paths")
    cycle = recursive_ref(document)
    if cycle:
        raise SharpenError(f"{path}: $ref {cycle!r} contains itself; break the cycle")
    specs: dict[str, ToolSpec] = {}
    for route, path_item in document["paths"].items():
        path_item = path_item or {}
        for method in _METHODS:
            operation = path_item.get(method)
            if not isinstance(operation, dict):
                continue
            shared_parameters = path_item.get("parameters", [])
            spec = _operation_spec(document, f"{method} {route}", operation, shared_parameters)
            if spec.name in specs:
                raise SharpenError(
                    f"{path}: two operations are called {spec.name!r}; give each its own "
                    "operationId"
                )
            specs[spec.name] = spec
    if not specs:
        raise SharpenError(f"{path}: it has no operations under its paths")
    return list(specs.values())


def _operation_spec(
    document: Json, route: str, operation: Json, shared_parameters: list[Json]
) -> ToolSpec:
    """Returns the tool of one operation: its parameters and the fields of its JSON body."""
    parameters = _resolve_refs(
        [*shared_parameters, *operation.get("parameters", [])], document, route
    )
    body = _resolve_refs(operation.get("requestBody") or {}, document, route)
    body_schema = body.get("content", {}).get("application/json", {}).get("schema", {})

    properties = {}
    required = set(body_schema.get("required", []))
    for parameter in parameters:
        name = parameter["name"]
        schema = dict(parameter.get("schema") or {"type": parameter.get("type", "string")})
        if parameter.get("description"):
            schema["description"] = parameter["description"]
        properties[name] = schema
        if parameter.get("required"):
            required.add(name)
    properties |= body_schema.get("properties", {})

    name = operation.get("operationId") or route
    return ToolSpec(
        name=re.sub(r"\W+", "_", name).strip("_"),
        description=operation.get("description") or operation.get("summary") or route,
        parameters={"type": "object", "properties": properties, "required": sorted(required)},
    )


def _resolve_refs(value: Any, document: Json, where: str) -> Any:
    """Returns the value with every local `$ref` replaced by what it points to."""
    if isinstance(value, list):
        return [_resolve_refs(item, document, where) for item in value]
    if not isinstance(value, dict):
        return value
    if "$ref" not in value:
        return {key: _resolve_refs(item, document, where) for key, item in value.items()}
    reference = str(value["$ref"])
    target = value_at(document, reference.removeprefix("#/").split("/"))
    if target is None:
        raise SharpenError(
            f"{where}: $ref {reference!r} leads nowhere in the file; only local references work"
        )
    return _resolve_refs(target, document, where)
