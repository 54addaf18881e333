"""What the importers share: the list of formats, foreign type names → JSON Schema, tools, calls
written as objects, JSON or Python text, and the joining of turns."""

from __future__ import annotations

import ast
import json
import marshal
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import add, mul, sub, truediv
from pathlib import Path
from typing import Any

from sharpen.data.check import Noun
from sharpen.data.reading import Split, read_file
from sharpen.types import Json, Message, RowError, SharpenError, Task, ToolCall, ToolSpec

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
GENERIC = re.compile(r"(\w+)\s*(?:[\[(<]|\bof\b)\s*(.+?)[\])>]?$")
Tools = dict[str, ToolSpec]
FIELDS = ("parameters", "inputSchema", "input_schema", "query_parameters")
SIGNS = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv}


@dataclass(frozen=True)
class Importer:
    """One format, and the decorator that makes it of a converter. `names` are its files in a
    folder. `side` loads what stands beside the rows (tools, answers) once; `convert` gets it with
    every record, and before it, if `placed`, where the record is."""

    detect: Callable[[Any], object]
    names: str = ""
    side: Callable[[Path], Any] | None = None
    split: Split | None = None
    placed: bool = False
    name: str = ""
    convert: Any = None

    def __call__(self, convert: Callable[..., Noun]) -> Any:
        name = convert.__name__
        FORMATS[name] = replace(self, name=name, convert=convert)
        return convert

    def recognises(self, value: Any) -> bool:
        try:
            return bool(self.detect(value))
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            return False  # it looked for something that another format does not have


FORMATS: dict[str, Importer] = {}


def has(fields: str) -> Callable[[Any], bool]:
    """A detector: an object with all these fields, or with those of an alternative behind `|`."""
    wanted = [set(each.split()) for each in fields.split("|")]
    return lambda value: isinstance(value, dict) and any(each <= set(value) for each in wanted)


def require(held: object, reason: str) -> None:
    """What a record must be; the driver knows where the record is."""
    if not held:
        raise RowError("", reason)


def first(row: Json, *keys: str) -> Any:
    """The first of these fields that is filled."""
    return next((row[key] for key in keys if row.get(key)), None)


def json_type(name: Any) -> Json:
    """A foreign type name as a schema fragment; a name nobody knows allows anything."""
    if isinstance(name, list):
        known = [json_type(n).get("type") for n in name]
        return {"type": known} if all(known) else {}
    text = str(name).strip().lower()
    match = GENERIC.match(text)
    if match and (match[1] == "optional" or TYPES.get(match[1]) == "array"):
        inner = json_type(match[2].split(",")[0])
        array = {"type": "array"} | ({"items": inner} if inner else {})
        return inner if match[1] == "optional" else array
    return {"type": TYPES[text]} if text in TYPES else {}


def schema(value: Any) -> Any:
    """A schema in a foreign dialect → JSON Schema."""
    if isinstance(value, str):
        return json_type(value)
    if not isinstance(value, dict):
        return {}
    out = {k: v for k, v in value.items() if k not in ("type", "required", "optional")}
    out |= json_type(value["type"]) if "type" in value else {}
    for key in ("items", "additionalProperties"):
        if isinstance(value.get(key), (dict, str)):
            out[key] = schema(value[key])
    if "examples" in out and not isinstance(out["examples"], list):
        out["examples"] = [out["examples"]]
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
            words = [*(part.strip() for part in field.split(".")), ""]
            marked = words[0].lower() == "required"
            out[name] = json_type(words[marked]) | {"description": field}
        else:
            marked = isinstance(field, dict) and str(field.get("required")).lower() == "true"
            out[name] = schema(field)
        needed += [name] if marked else []
    return {"properties": out} | ({"required": list(dict.fromkeys(needed))} if needed else {})


def parameters(value: Any, required: Any = None) -> Json:
    """A tool's parameters, as a schema or as a plain mapping of names, → an object schema."""
    if not isinstance(value, dict):
        value = {}
    combined = {"$ref", "anyOf", "oneOf", "allOf"} & set(value)
    if combined or isinstance(value.get("properties"), dict):
        return schema(value | ({"required": required} if required else {})) | {"type": "object"}
    plain = set(value) <= {"type", "required", "properties", "description"}
    if plain and not isinstance(value.get("type"), dict):
        return {"type": "object", "properties": {}}
    return {"type": "object"} | properties(value, required)


def tools_from(value: Any) -> tuple[ToolSpec, ...]:
    """A list of tools in any dialect, one alone, or the JSON text of either."""
    value = literal(value or "[]") if isinstance(value, str) else value
    listed = [value] if isinstance(value, dict) else value or ()
    return tuple(tool_from(marshal.dumps(tool)) for tool in listed)


@lru_cache(20_000)  # rows repeat their tools, and translating one is slow
def tool_from(dumped: bytes) -> ToolSpec:
    value = marshal.loads(dumped)
    value = literal(value) if isinstance(value, str) else value
    require(isinstance(value, dict), f"tool: expected an object, found {type(value).__name__}")
    function = value["function"] if isinstance(value.get("function"), dict) else value
    name, given = first(function, "name", "api_name", "id"), first(function, *FIELDS)
    require(name and isinstance(name, str), "tool: no name")
    if isinstance(given, list):
        given = {p["name"]: {"type": p["type"], "description": p.get("desc", "")} for p in given}
    required = function.get("required") or value.get("required")
    text = str(first(function, "description", "api_description", "desc") or "")
    return ToolSpec(name, text, parameters(given, required))


def read_tools(path: Path, *places: str) -> Iterator[ToolSpec]:
    """The tools of a file that a data set keeps beside its rows: listed, or texts by name."""
    for record in read_file(beside(path, *places)):
        found = record.value.get("nodes", record.value)
        if isinstance(found, dict) and all(isinstance(text, str) for text in found.values()):
            found = [{"name": name, "description": text} for name, text in found.items()]
        yield from tools_from(found)


def catalogue(*places: str) -> Callable[[Path], Tools]:
    return lambda path: {tool.name: tool for tool in read_tools(path, *places)}


def beside(path: Path, *names: str) -> Path:
    """A file that a data set keeps near its rows: in the same folder or up to three above."""
    folder = (path if path.is_dir() else path.parent).resolve()
    for place in (folder, *folder.parents[:3]):
        for name in names:
            if (place / name).exists():
                return place / name
    raise SharpenError(f"{path}: needs {' or '.join(names)} in its folder or above, none is there")


def listed(names: Iterable[str], tools: Mapping[str, Any], file: str) -> tuple[Any, ...]:
    """These tools, each once; a name that the catalogue does not have is an error."""
    found = dict.fromkeys(names)
    for name in found:
        require(name in tools, f"{name!r} is not in {file}")
    return tuple(tools[name] for name in found)


def candidates(right: Iterable[ToolSpec], tools: Tools, key: str) -> tuple[ToolSpec, ...]:
    """The tools that are right and, drawn by `key`, enough others to make a choice of ten."""
    chance, chosen = random.Random(key), [tool.name for tool in right]
    others = chance.sample(list(tools), min(10 + len(chosen), len(tools)))
    chosen += [n for n in others if n not in chosen][: max(0, 10 - len(chosen))]
    chance.shuffle(chosen)
    return tuple(tools[name] for name in chosen)


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


def call_from(value: Any) -> ToolCall:
    """A call as an object, JSON or Python text, its arguments under any of their usual names."""
    if isinstance(value, str):
        try:
            value = literal(value)
        except ValueError:
            return python_call(value)
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError("", "call: expected an object with a name")
    arguments = first(function, "arguments", "parameters", "kwargs", "args") or {}
    arguments = literal(arguments) if isinstance(arguments, str) else arguments
    require(isinstance(arguments, dict), f"arguments of {function['name']}: expected an object")
    return ToolCall(function["name"], arguments, str(value.get("id") or ""))


def python_call(text: str) -> ToolCall:
    """`a.b(c=1, d=[2])` → a call; arithmetic on numbers is worked out."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if not isinstance(node, ast.Call) or node.args:
            raise ValueError("expected name(argument=value, …)")
        arguments = {str(k.arg): evaluate(k.value) for k in node.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError, ZeroDivisionError) as error:
        raise RowError("", f"call {text[:60]!r}: {error}") from None
    return ToolCall(ast.unparse(node.func), arguments)


def evaluate(node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
        sides = evaluate(node.left), evaluate(node.right)
        if not all(isinstance(side, (int, float)) for side in sides):
            raise ValueError("arithmetic on something that is no number")
        return SIGNS[type(node.op)](*sides)
    value = ast.literal_eval(node)
    return list(value) if isinstance(value, (tuple, set)) else value


def task(
    kind: str, instruction: str, gold: Json, *, tools: Any = (), difficulty: str = "", **more: Any
) -> Task:
    """A task; besides its id, what is not named here is metadata."""
    return Task(str(more.pop("id", "")), instruction, tools, gold, kind, difficulty, metadata=more)


def gold_calls(values: Iterable[Any]) -> list[Json]:
    return [{"name": call.name, "arguments": call.arguments} for call in map(call_from, values)]


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def step(call: ToolCall, answer: Any, thought: str = "") -> list[Message]:
    said = Message("assistant", thought, (call,))
    return [said, Message("tool", as_text(answer), name=call.name)]


def joined(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Neighbouring messages of one speaker become one; a call stays with the words before it."""
    out: list[Message] = []
    for m in messages:
        last = out[-1] if out else None
        alike = last and (last.role, last.trained) == (m.role, m.trained)
        if last and alike and m.role in ("user", "assistant") and not last.tool_calls:
            content = "\n".join(part for part in (last.content, m.content) if part)
            out[-1] = replace(m, content=content)
        else:
            out.append(m)
    return tuple(out)


def picked(row: Json, *keys: str) -> Json:
    return {key: row[key] for key in keys if key in row}


def rest(row: Json, *known: str) -> Json:
    """The fields that have no place of their own: a row's metadata."""
    return {key: value for key, value in row.items() if key not in known}
