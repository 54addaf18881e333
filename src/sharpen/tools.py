"""Tools: schemas from typed Python functions, calls checked against them, bounded execution.

A call that is wrong, fails, hangs or answers with a gigabyte becomes a `ToolResult` with an error,
never an exception: what a tool does is data for the policy and for the reward.
"""

from __future__ import annotations

import asyncio
import functools
import graphlib
import importlib.util
import inspect
import json
import re
import sys
import threading
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema_rs
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from sharpen.config import one_line
from sharpen.types import Json, Message, SharpenError, ToolCall, ToolSpec

TIMEOUT_S = 10.0
MAX_RESULT_BYTES = 64 << 10
MOST_OPTIONS = 30  # values that an error names
MAX_STUCK = 64  # threads cannot be killed; with more hanging calls the process is not healthy


@dataclass(frozen=True, slots=True)
class ToolResult:
    content: str
    error: str = ""  # empty, or unknown_tool, invalid_argument, timeout, failed, not_json
    truncated: bool = False

    def message(self, call: ToolCall) -> Message:
        """The tool message that answers `call`."""
        failed = json.dumps({"error": self.error, "message": self.content}, ensure_ascii=False)
        content = failed if self.error else self.content
        return Message("tool", content, name=call.name, tool_call_id=call.id)


class Tool:
    """A Python function with its OpenAI schema. `run` calls it checked and bounded."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None = None,
        timeout_s: float = TIMEOUT_S,
        max_bytes: int = MAX_RESULT_BYTES,
    ):
        self.function, self.timeout_s, self.max_bytes = function, timeout_s, max_bytes
        self.arguments = argument_model(function)
        summary, _ = split_docstring(function)
        self.spec = ToolSpec(name or function.__name__, summary, parameters_schema(self.arguments))
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def run(self, arguments: Json) -> ToolResult:
        """Check, convert, execute with a time limit, and make the answer text of bounded size."""
        problems = check_call(ToolCall(self.spec.name, arguments), self.spec)
        if problems:
            return ToolResult("; ".join(problems), "invalid_argument")
        try:
            values = self.arguments.model_validate(arguments)
        except ValidationError as error:
            text = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            return ToolResult(text, "invalid_argument")
        given = {name: getattr(values, name) for name in type(values).model_fields}
        outcome = call_with_limit(self.function, given, self.timeout_s)
        if isinstance(outcome, TimeoutError):
            return ToolResult(f"no answer within {self.timeout_s:g} s", "timeout")
        if isinstance(outcome, BaseException):
            return ToolResult(f"{type(outcome).__name__}: {one_line(outcome)}"[:2000], "failed")
        return as_result(outcome, self.max_bytes)


def tool(function: Callable[..., Any] | None = None, **settings: Any) -> Any:
    """Make a typed, documented function a `Tool`: `@tool`, or `@tool(…)` with its settings."""
    return Tool(function) if function else functools.partial(Tool, **settings)


def run_call(call: ToolCall, tools: Mapping[str, Tool]) -> ToolResult:
    """Execute one call among the tools on offer."""
    if call.name in tools:
        return tools[call.name].run(call.arguments)
    return ToolResult(f"there is no tool {call.name!r}; tools: {', '.join(tools)}", "unknown_tool")


def load_tools(path: str | Path) -> dict[str, Tool]:
    """Every `@tool` of a Python file, by name."""
    module = load_module(path)
    found = [value for value in vars(module).values() if isinstance(value, Tool)]
    if not found:
        raise SharpenError(f"{path}: no function marked with @tool")
    return {t.spec.name: t for t in found}


def load_object(reference: str) -> Any:
    """`file.py:name` → the object: how a user's own tools, rewards and environments plug in."""
    file, colon, name = reference.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise SharpenError(f"{reference!r}: expected file.py:name")
    module = load_module(file)
    if not hasattr(module, name):
        raise SharpenError(f"{file}: has no {name!r}")
    return getattr(module, name)


def load_module(path: str | Path) -> Any:
    path = Path(path)
    if not path.is_file():
        raise SharpenError(f"{path}: no such file")
    name = "sharpen_user_" + re.sub(r"\W", "_", str(path.resolve()))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SharpenError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickling and dataclasses look the module up by name
    try:
        spec.loader.exec_module(module)
    except SharpenError:
        raise
    except Exception as error:
        del sys.modules[name]
        raise SharpenError(f"{path}: {type(error).__name__}: {one_line(error)}") from error
    return module


# Checking calls --------------------------------------------------------------------------------


def check_call(call: ToolCall, spec: ToolSpec) -> list[str]:
    """Every complaint about a call's arguments by its tool's schema; none when it is valid."""
    try:
        validator = validator_for(json.dumps(spec.parameters, sort_keys=True))
    except (ValueError, RecursionError) as error:
        return [f"schema of {spec.name}: {first_line(error)}"]
    return complaints(validator, call.arguments)


def complaints(validator: Any, arguments: Json) -> list[str]:
    """What a compiled schema has to say about some arguments."""
    try:
        json.dumps(arguments, ensure_ascii=False).encode()  # refuses half a surrogate pair
        errors = [] if validator.is_valid(arguments) else list(validator.iter_errors(arguments))
    except (TypeError, ValueError, RecursionError) as error:
        return [f"not JSON: {first_line(error)}"]
    places = [".".join(map(str, error.instance_path)) for error in errors]
    pairs = zip(places, map(told, errors), strict=True)
    return [f"{at}: {text}" if at else text for at, text in pairs]


def told(error: Any) -> str:
    """With all values that would have been right: who is told can choose again."""
    options = getattr(error.kind, "options", None)
    if not isinstance(options, list) or len(options) > MOST_OPTIONS:
        return error.message
    of = ", ".join(json.dumps(option, ensure_ascii=False) for option in options)
    return f"{json.dumps(error.instance, ensure_ascii=False)} is not one of {of}"


def schema_problem(parameters: Json) -> str | None:
    """Why a parameter schema cannot be used, or None. Remote references are never fetched."""
    try:
        validator_for(json.dumps(parameters, sort_keys=True))
    except (ValueError, TypeError, RecursionError) as error:
        return first_line(error) or type(error).__name__
    if cycle := recursive_ref(parameters):
        return f"$ref {cycle!r} contains itself"
    declared = parameters.get("type", "object")
    return None if declared == "object" else f"type: expected 'object', found {declared!r}"


def recursive_ref(schema: Json) -> str | None:
    """A local `$ref` that leads back to itself: a model cannot be shown such a schema in full."""
    below: dict[str, list[str]] = {}
    waiting = refs_in(schema)
    while waiting:
        if (ref := waiting.pop()) not in below:
            target: Any = schema
            for part in ref.split("/")[1:]:
                target = target.get(part) if isinstance(target, dict) else None
            below[ref] = refs_in(target)
            waiting += below[ref]
    try:
        graphlib.TopologicalSorter(below).prepare()
    except graphlib.CycleError as error:
        return error.args[1][0]
    return None


def refs_in(schema: Any) -> list[str]:
    """Every local reference below a part of a schema."""
    found, todo = [], [schema]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            ref = value.get("$ref")
            found += [ref] if isinstance(ref, str) and ref.startswith("#") else []
            value = list(value.values())
        todo += value if isinstance(value, list) else []
    return found


@functools.lru_cache(maxsize=4096)
def validator_for(schema_text: str) -> Any:
    """A compiled validator. The linear-time regex engine cannot be made to hang by a pattern."""
    schema, patterns = json.loads(schema_text), jsonschema_rs.RegexOptions()
    return jsonschema_rs.validator_for(
        schema, retriever=refuse_remote, pattern_options=patterns, validate_formats=True
    )


def refuse_remote(uri: str) -> Any:
    raise ValueError(f"remote $ref {uri} is refused")


def first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]


# A schema from a signature ---------------------------------------------------------------------


def argument_model(function: Callable[..., Any]) -> type[BaseModel]:
    """A pydantic model of a function's parameters, with descriptions from its docstring."""
    name = getattr(function, "__name__", repr(function))
    _, documented = split_docstring(function)
    hints = typing.get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise SharpenError(f"tool {name}: *args and **kwargs have no schema")
        if parameter.name not in hints:
            raise SharpenError(f"tool {name}: parameter {parameter.name!r} needs a type")
        default = ... if parameter.default is parameter.empty else parameter.default
        description = documented.get(parameter.name)
        fields[parameter.name] = (hints[parameter.name], Field(default, description=description))
    return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)


def parameters_schema(arguments: type[BaseModel]) -> Json:
    """The JSON schema as function-calling models expect it: no titles, references put in place."""
    schema = arguments.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inline(value: Any, inside: tuple[str, ...] = ()) -> Any:
        if isinstance(value, list):
            return [inline(item, inside) for item in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            target = value["$ref"].rsplit("/", 1)[-1]
            if target in inside:
                raise SharpenError(f"tool {arguments.__name__}: type {target} contains itself")
            rest = {k: v for k, v in value.items() if k != "$ref"}
            return inline(definitions[target], (*inside, target)) | rest
        return {
            key: {name: inline(item, inside) for name, item in item_map.items()}
            if key == "properties"
            else inline(item_map, inside)
            for key, item_map in value.items()
            if key != "title" or not isinstance(item_map, str)
        }

    return inline(schema)


def split_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """A docstring's summary and its parameters (Google `Args:` or `:param x:` style)."""
    text = inspect.getdoc(function) or ""
    head = re.split(r"(?m)^\s*(?:Args|Arguments|Parameters|Returns|Raises|Yields):|^\s*:", text)[0]
    described = re.findall(r"(?ms)^\s*:param (\w+):\s*(.+?)(?=^\s*:|\Z)", text)
    if section := re.search(r"(?ms)^(?:Args|Arguments|Parameters):\n(.+?)(?=^\S|\Z)", text):
        entry = r"(?ms)^ {2,8}(\w+)(?: *\([^)]*\))?:\s*(.+?)(?=^ {2,8}\w+(?: *\([^)]*\))?:|\Z)"
        described += re.findall(entry, section[1])
    return " ".join(head.split()), {name: " ".join(about.split()) for name, about in described}


# Bounded execution -----------------------------------------------------------------------------

_stuck: set[threading.Thread] = set()


def call_with_limit(function: Callable[..., Any], values: Json, timeout_s: float) -> Any:
    """Call in a daemon thread and wait so long; returns the value, or the exception that came. A
    hanging call is left behind and counted. Code that is not trusted belongs in the sandbox."""
    _stuck.difference_update([t for t in _stuck if not t.is_alive()])
    if len(_stuck) >= MAX_STUCK:
        raise SharpenError(f"{len(_stuck)} tool calls hang at once; fix the tool or isolate it")
    outcome: list[Any] = []

    def work() -> None:
        try:
            value = function(**values)
            if inspect.isawaitable(value):
                value = asyncio.run(asyncio.wait_for(value, timeout_s))
            outcome.append(value)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work, daemon=True, name=f"tool-{function.__name__}")
    thread.start()
    thread.join(timeout_s)
    if not outcome:
        _stuck.add(thread)
        return TimeoutError()
    return outcome[0]


def as_result(value: Any, max_bytes: int) -> ToolResult:
    """A tool's return value as text: a string as it is, all else as JSON; cut to `max_bytes`."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        encoded = text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        return ToolResult(f"the tool's answer is not JSON: {one_line(error)}", "not_json")
    if len(encoded) <= max_bytes:
        return ToolResult(text)
    kept = encoded[:max_bytes].decode("utf-8", "ignore")
    return ToolResult(f"{kept}\n[cut: {max_bytes} of {len(encoded)} bytes]", truncated=True)
