"""Reads foreign tool definitions as `ToolSpec`s with a JSON Schema, and catalogues of tools.

All importers use it. Foreign type names (`dict`, `HashMap`, `List[int]`, …) become JSON Schema; a
name that nobody knows allows anything.
"""

from __future__ import annotations

import marshal
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from sharpen.data.importers.common import find_side_file, first_filled, parse_literal, require
from sharpen.data.reading import read_file
from sharpen.types import Json, ToolSpec

ToolCatalogue = dict[str, ToolSpec]
Entry = TypeVar("Entry")

_OFFERED_TOOLS = 10
_FOREIGN_NAMES = {
    "object": "dict hashmap map object json record struct",
    "number": "float double number decimal real",
    "integer": "int integer long short byte bigint",
    "string": "str string char text varchar date datetime time timestamp url uri email enum",
    "boolean": "bool boolean",
    "array": "list array arraylist tuple set sequence",
    "null": "none null",
}
_JSON_TYPES = {
    foreign: json_name for json_name, names in _FOREIGN_NAMES.items() for foreign in names.split()
}
_GENERIC_TYPE = re.compile(r"(\w+)\s*(?:[\[(<]|\bof\b)\s*(.+?)[\])>]?$")
_PARAMETER_FIELDS = ("parameters", "inputSchema", "input_schema", "query_parameters")
_SUBSCHEMA_FIELDS = ("items", "additionalProperties")


# Schemas -----------------------------------------------------------------------------------------


def json_type(name: Any) -> Json:
    """Return the schema of a foreign type name, or of a list of them; `{}` allows anything."""
    if isinstance(name, list):
        types = [json_type(part).get("type") for part in name]
        return {"type": types} if all(types) else {}
    text = str(name).strip().lower()
    match = _GENERIC_TYPE.match(text)
    if match:
        outer_name = match[1]
        inner_name = match[2].split(",")[0]
        if outer_name == "optional":
            return json_type(inner_name)
        if _JSON_TYPES.get(outer_name) == "array":
            inner_schema = json_type(inner_name)
            return {"type": "array", "items": inner_schema} if inner_schema else {"type": "array"}
    return {"type": _JSON_TYPES[text]} if text in _JSON_TYPES else {}


def to_json_schema(value: Any) -> Any:
    """Return a schema of a foreign dialect as JSON Schema."""
    if isinstance(value, str):
        return json_type(value)
    if not isinstance(value, dict):
        return {}
    schema = {}
    for key, field in value.items():
        if key not in ("type", "required", "optional"):
            schema[key] = field
    if "type" in value:
        schema |= json_type(value["type"])
    for key in _SUBSCHEMA_FIELDS:
        if isinstance(value.get(key), (dict, str)):
            schema[key] = to_json_schema(value[key])
    if "examples" in schema and not isinstance(schema["examples"], list):
        schema["examples"] = [schema["examples"]]
    if isinstance(value.get("properties"), dict):
        schema |= to_properties(value["properties"], value.get("required"))
    return schema


def to_properties(fields: Mapping[str, Any], required: Any = None) -> Json:
    """Return `properties` and `required` of parameters by name.

    A parameter is a schema, the name of a type, or text such as `Required. string. The city.`
    """
    required_names = []
    if isinstance(required, list):
        required_names = [name for name in required if name in fields]
    properties = {}
    for name, field in fields.items():
        if isinstance(field, str):
            is_required, properties[name] = _schema_from_text(field)
        else:
            is_required = isinstance(field, dict) and str(field.get("required")).lower() == "true"
            properties[name] = to_json_schema(field)
        if is_required:
            required_names.append(name)
    if not required_names:
        return {"properties": properties}
    return {"properties": properties, "required": list(dict.fromkeys(required_names))}


def _schema_from_text(text: str) -> tuple[bool, Json]:
    """Read `Required. string. The city.`: whether it is required, and its schema."""
    words = [part.strip() for part in text.split(".")]
    is_required = words[0].lower() == "required"
    if is_required:
        words = words[1:]
    type_name = words[0] if words else ""
    return is_required, json_type(type_name) | {"description": text}


def to_parameters(value: Any, required: Any = None) -> Json:
    """Return the schema of a tool's parameters, from a schema or a plain mapping of names."""
    if not isinstance(value, dict):
        value = {}
    is_combination = {"$ref", "anyOf", "oneOf", "allOf"} & set(value)
    if is_combination or isinstance(value.get("properties"), dict):
        if required:
            value = value | {"required": required}
        return to_json_schema(value) | {"type": "object"}
    # an object schema without properties, unless one of its fields is a parameter called `type`
    is_empty_schema = set(value) <= {"type", "required", "properties", "description"}
    if is_empty_schema and not isinstance(value.get("type"), dict):
        return {"type": "object", "properties": {}}
    return {"type": "object"} | to_properties(value, required)


# Tools -------------------------------------------------------------------------------------------


def tools_from(value: Any) -> tuple[ToolSpec, ...]:
    """Return a list of tools in any dialect, a single one, or the JSON text of either."""
    if isinstance(value, str):
        value = parse_literal(value or "[]")
    definitions = [value] if isinstance(value, dict) else value or ()
    return tuple(_tool_from(marshal.dumps(definition)) for definition in definitions)


@lru_cache(20_000)  # rows repeat their tools, and translating one is slow
def _tool_from(dumped_definition: bytes) -> ToolSpec:
    definition = marshal.loads(dumped_definition)
    if isinstance(definition, str):
        definition = parse_literal(definition)
    kind = type(definition).__name__
    require(isinstance(definition, dict), f"tool: expected an object, found {kind}")
    function = definition
    if isinstance(definition.get("function"), dict):
        function = definition["function"]
    name = first_filled(function, "name", "api_name", "id")
    require(name and isinstance(name, str), "tool: no name")
    fields = first_filled(function, *_PARAMETER_FIELDS)
    if isinstance(fields, list):
        fields = {
            field["name"]: {"type": field["type"], "description": field.get("desc", "")}
            for field in fields
        }
    required = function.get("required") or definition.get("required")
    description = first_filled(function, "description", "api_description", "desc")
    return ToolSpec(name, str(description or ""), to_parameters(fields, required))


def read_tools(path: Path, *names: str) -> Iterator[ToolSpec]:
    """Yield the tools of a file beside the rows, of the first of these names that is there."""
    for record in read_file(find_side_file(path, *names)):
        tools = record.value.get("nodes", record.value)
        if isinstance(tools, dict) and all(isinstance(text, str) for text in tools.values()):
            tools = [{"name": name, "description": text} for name, text in tools.items()]
        yield from tools_from(tools)


def catalogue(*names: str) -> Callable[[Path], ToolCatalogue]:
    """Return a loader for `Importer.side`: the tools of a file beside the rows, by name."""

    def load(path: Path) -> ToolCatalogue:
        return {tool.name: tool for tool in read_tools(path, *names)}

    return load


def look_up(names: Iterable[str], known: Mapping[str, Entry], file: str) -> tuple[Entry, ...]:
    """Return what is `known` by these names, each once. An unknown name is an error that names
    the `file`."""
    unique_names = dict.fromkeys(names)
    for name in unique_names:
        require(name in known, f"{name!r} is not in {file}")
    return tuple(known[name] for name in unique_names)


def offer_tools(gold: Iterable[ToolSpec], tools: ToolCatalogue, key: str) -> tuple[ToolSpec, ...]:
    """Return the gold tools and others of the catalogue, ten in all, drawn and shuffled by
    `key`."""
    rng = random.Random(key)
    names = [tool.name for tool in gold]
    drawn = rng.sample(list(tools), min(_OFFERED_TOOLS + len(names), len(tools)))
    others = [name for name in drawn if name not in names]
    names += others[: max(0, _OFFERED_TOOLS - len(names))]
    rng.shuffle(names)
    return tuple(tools[name] for name in names)
