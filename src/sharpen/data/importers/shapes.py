"""What the importers share: foreign type names → JSON Schema, tools, calls written as Python or
JSON text, and the joining of turns."""

from __future__ import annotations

import ast
import json
import marshal
import operator
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sharpen.types import Json, Message, RowError, SharpenError, ToolCall, ToolSpec

KINDS = {
    "object": "dict hashmap map object json record struct",
    "number": "float double number decimal real",
    "integer": "int integer long short byte bigint",
    "string": "str string char text varchar date datetime time timestamp url uri email enum",
    "boolean": "bool boolean",
    "array": "list array arraylist tuple set sequence",
    "null": "none null",
}
TYPES = {name: kind for kind, names in KINDS.items() for name in names.split()}
GENERIC = re.compile(
    r"(list|array|arraylist|tuple|set|optional)\s*(?:\[|\(|<|\bof\b)\s*(.+?)[\])>]?$"
)
COMPOUND = ("$ref", "anyOf", "oneOf", "allOf")
MAX_KNOWN = 20_000
_known: dict[bytes, ToolSpec] = {}  # rows repeat their tools, and translating one is slow
ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def json_type(name: Any) -> Json:
    """A foreign type name as a schema fragment; a name nobody knows allows anything."""
    if isinstance(name, list):
        known = [json_type(n).get("type") for n in name]
        return {"type": known} if all(known) else {}
    text = str(name).strip().lower()
    if match := GENERIC.match(text):
        inner = json_type(match[2].split(",")[0])
        if match[1] == "optional":
            return inner
        return {"type": "array"} | ({"items": inner} if inner else {})
    return {"type": TYPES[text]} if text in TYPES else {}


def schema(value: Any) -> Any:
    """A schema in a foreign dialect → JSON Schema: type names, `required: true` on a property,
    parts that cannot be a schema."""
    if isinstance(value, str):
        return json_type(value)
    if not isinstance(value, dict):
        return {}
    out = {k: v for k, v in value.items() if k not in ("type", "required", "optional")}
    out |= json_type(value["type"]) if "type" in value else {}
    if isinstance(value.get("items"), (dict, str)):
        out["items"] = schema(value["items"])
    if isinstance(value.get("additionalProperties"), dict):
        out["additionalProperties"] = schema(value["additionalProperties"])
    for key in COMPOUND[1:]:
        if isinstance(value.get(key), list):
            out[key] = [schema(part) for part in value[key]]
    if "examples" in out and not isinstance(out["examples"], list):
        out["examples"] = [out["examples"]]
    if "enum" in out and not (isinstance(out["enum"], list) and out["enum"]):
        del out["enum"]
    if isinstance(value.get("properties"), dict):
        out |= properties(value["properties"], value.get("required"))
    return out


def properties(fields: Mapping[str, Any], required: Any = None) -> Json:
    """Parameters by name → `properties` and `required`. A parameter is a schema, a type's name, or
    text such as `Required. string. The city.`"""
    needed = [name for name in required if name in fields] if isinstance(required, list) else []
    out = {}
    for name, field in fields.items():
        if isinstance(field, str):
            parts = [part.strip() for part in field.split(".")]
            if parts[0].lower() == "required":
                needed.append(name)
                parts = parts[1:]
            kind = json_type(parts[0]) if parts else {}
            out[name] = kind | {"description": field}
            continue
        if isinstance(field, dict) and str(field.get("required")).lower() == "true":
            needed.append(name)
        out[name] = schema(field)
    return {"properties": out} | ({"required": list(dict.fromkeys(needed))} if needed else {})


def parameters(value: Any, required: Any = None) -> Json:
    """A tool's parameters, as a schema or as a plain mapping of names, → an object schema."""
    if not isinstance(value, dict):
        value = {}
    if isinstance(value.get("properties"), dict) or any(key in value for key in COMPOUND):
        return schema(value | ({"required": required} if required else {})) | {"type": "object"}
    if set(value) <= {"type", "required", "properties", "description"} and not isinstance(
        value.get("type"), dict
    ):
        return {"type": "object", "properties": {}}
    return {"type": "object"} | properties(value, required)


def tools_from(value: Any, where: str) -> tuple[ToolSpec, ...]:
    """A list of tools in any dialect, or its JSON text."""
    if isinstance(value, str):
        value = parse_json(value or "[]", where, "tools")
    if isinstance(value, dict):
        value = [value]
    return unique([tool_from(tool, where) for tool in value or []], where)


def tool_from(value: Any, where: str) -> ToolSpec:
    key = marshal.dumps(value)
    if key not in _known:
        if len(_known) >= MAX_KNOWN:
            _known.clear()
        _known[key] = new_tool(value, where)
    return _known[key]


def new_tool(value: Any, where: str) -> ToolSpec:
    if isinstance(value, str):
        value = parse_json(value, where, "tool")
    if not isinstance(value, dict):
        raise RowError(where, f"tool: expected an object, found {type(value).__name__}")
    function = value["function"] if isinstance(value.get("function"), dict) else value
    name, schema_keys = function.get("name"), ("parameters", "inputSchema", "input_schema")
    if not isinstance(name, str) or not name:
        raise RowError(where, "tool: no name")
    given = next((function[k] for k in schema_keys if function.get(k)), {})
    required = function.get("required") or value.get("required")
    return ToolSpec(name, str(function.get("description") or ""), parameters(given, required))


def unique(tools: Iterable[ToolSpec], where: str) -> tuple[ToolSpec, ...]:
    kept: dict[str, ToolSpec] = {}
    for tool in tools:
        if tool.name in kept:
            raise RowError(where, f"two tools are called {tool.name!r}")
        kept[tool.name] = tool
    return tuple(kept.values())


def candidates(
    names: Sequence[str], catalogue: Mapping[str, ToolSpec], key: str, size: int = 10
) -> tuple[ToolSpec, ...]:
    """The tools that are right and, drawn by `key`, enough others of the catalogue to make a
    choice of them."""
    chance = random.Random(key)
    right = list(dict.fromkeys(n for n in names if n in catalogue))
    others = chance.sample(list(catalogue), min(size + len(right), len(catalogue)))
    chosen = right + [n for n in others if n not in right][: max(0, size - len(right))]
    chance.shuffle(chosen)
    return tuple(catalogue[name] for name in chosen)


def parse_json(text: str, where: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(where, f"{what}: not JSON: {error}") from None


def literal(text: str) -> Any:
    """Text as JSON, else as a Python literal; ValueError when it is neither."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"neither JSON nor a literal: {text[:60]!r}") from None


def call_from(value: Any, where: str) -> ToolCall:
    """A call as an object or text, its arguments as an object or text, under any of their usual
    names."""
    if isinstance(value, str):
        try:
            value = literal(value)
        except ValueError as error:
            raise RowError(where, f"call: {error}") from None
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(where, "call: expected an object with a name")
    keys = ("arguments", "parameters", "kwargs", "args")
    arguments = next((function[k] for k in keys if function.get(k) is not None), {})
    if isinstance(arguments, str):
        try:
            arguments = literal(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise RowError(where, f"arguments of {function['name']}: {error}") from None
    if not isinstance(arguments, dict):
        raise RowError(where, f"arguments of {function['name']}: expected an object")
    return ToolCall(function["name"], arguments, str(value.get("id") or ""))


def python_call(text: str, where: str) -> ToolCall:
    """`a.b(c=1, d=[2])` → a call; arithmetic on numbers is worked out."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if not isinstance(node, ast.Call) or node.args:
            raise ValueError("expected name(argument=value, …)")
        return ToolCall(
            ast.unparse(node.func), {str(k.arg): evaluate(k.value) for k in node.keywords}
        )
    except (SyntaxError, ValueError, RecursionError, MemoryError, ZeroDivisionError) as error:
        raise RowError(where, f"call {text[:60]!r}: {error}") from None


def evaluate(node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        sides = evaluate(node.left), evaluate(node.right)
        if not all(isinstance(side, (int, float)) for side in sides):
            raise ValueError("arithmetic on something that is no number")
        return ARITHMETIC[type(node.op)](*sides)
    value = ast.literal_eval(node)
    return list(value) if isinstance(value, (tuple, set)) else value


def calls_to_gold(calls: Iterable[ToolCall]) -> list[Json]:
    return [{"name": c.name, "arguments": c.arguments} for c in calls]


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def joined(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Neighbouring messages of one speaker become one, as chat templates want; a call stays with
    the words that led to it."""
    out: list[Message] = []
    for m in messages:
        last = out[-1] if out else None
        if last and last.role == m.role and m.role in ("user", "assistant") and not last.tool_calls:
            content = "\n".join(part for part in (last.content, m.content) if part)
            out[-1] = Message(m.role, content, m.tool_calls)
        else:
            out.append(m)
    return tuple(out)


def beside(path: Path, *names: str) -> Path:
    """A file that a data set keeps near its rows: in the same folder or up to three above."""
    folder = (path if path.is_dir() else path.parent).resolve()
    for place in (folder, *folder.parents[:3]):
        for name in names:
            if (place / name).exists():
                return place / name
    raise SharpenError(f"{path}: needs {' or '.join(names)} in its folder or above, none is there")
