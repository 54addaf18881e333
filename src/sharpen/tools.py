"""Tools: schemas from typed Python functions, checked calls, bounded execution.

Environments, rewards and data checks use this module. A call that is wrong, fails, hangs or answers
with a gigabyte becomes a `ToolResult` with an error, never an exception: what a tool does is data
for the policy and for the reward.
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
from types import ModuleType
from typing import Any

import jsonschema_rs
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from sharpen.config import one_line
from sharpen.types import Json, Message, SharpenError, ToolCall, ToolSpec

TIMEOUT_S = 10.0
_MAX_RESULT_BYTES = 64 << 10
_MAX_FAILURE_CHARS = 2000
_MAX_OPTIONS = 30  # the most allowed values that an error message lists
# Threads cannot be killed. With more hanging calls than this the process is not healthy.
MAX_STUCK = 64


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool call gave: the text of the answer, or an error with its explanation."""

    content: str
    error: str = ""  # empty, or unknown_tool, invalid_argument, timeout, failed, not_json
    truncated: bool = False

    def message(self, call: ToolCall) -> Message:
        """Returns the tool message that answers `call`."""
        content = self.content
        if self.error:
            failure = {"error": self.error, "message": self.content}
            content = json.dumps(failure, ensure_ascii=False)
        return Message("tool", content, name=call.name, tool_call_id=call.id)


class Tool:
    """A Python function with its OpenAI schema. `run` calls it checked and bounded."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None = None,
        timeout_s: float = TIMEOUT_S,
        max_bytes: int = _MAX_RESULT_BYTES,
    ):
        self.function = function
        self.timeout_s = timeout_s
        self.max_bytes = max_bytes
        self.arguments = _argument_model(function)
        summary, _ = _parse_docstring(function)
        schema = _parameters_schema(self.arguments)
        self.spec = ToolSpec(name or function.__name__, summary, schema)
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def run(self, arguments: Json) -> ToolResult:
        """Check and convert the arguments, call within the time limit, and return bounded text."""
        problems = check_call(ToolCall(self.spec.name, arguments), self.spec)
        if problems:
            return ToolResult("; ".join(problems), "invalid_argument")
        try:
            values = self.arguments.model_validate(arguments)
        except ValidationError as error:
            for problem in error.errors():
                location = ".".join(str(part) for part in problem["loc"])
                problems.append(f"{location}: {problem['msg']}")
            return ToolResult("; ".join(problems), "invalid_argument")
        converted = {name: getattr(values, name) for name in type(values).model_fields}
        outcome = call_with_limit(self.function, converted, self.timeout_s)
        if isinstance(outcome, TimeoutError):
            return ToolResult(f"no answer within {self.timeout_s:g} s", "timeout")
        if isinstance(outcome, BaseException):
            text = f"{type(outcome).__name__}: {one_line(outcome)}"
            return ToolResult(text[:_MAX_FAILURE_CHARS], "failed")
        return _value_to_result(outcome, self.max_bytes)


def tool(function: Callable[..., Any] | None = None, **settings: Any) -> Any:
    """Make a typed, documented function a `Tool`: `@tool`, or `@tool(…)` with its settings."""
    return Tool(function) if function else functools.partial(Tool, **settings)


def run_call(call: ToolCall, tools: Mapping[str, Tool]) -> ToolResult:
    """Execute one call with one of the tools on offer."""
    if call.name in tools:
        return tools[call.name].run(call.arguments)
    return ToolResult(f"there is no tool {call.name!r}; tools: {', '.join(tools)}", "unknown_tool")


# Users' own files ------------------------------------------------------------------------------


def load_tools(path: str | Path) -> dict[str, Tool]:
    """Returns every `@tool` of a Python file, by name."""
    module = load_module(path)
    tools = [value for value in vars(module).values() if isinstance(value, Tool)]
    if not tools:
        raise SharpenError(f"{path}: no function marked with @tool")
    return {each.spec.name: each for each in tools}


def load_object(reference: str) -> Any:
    """Load the object that `file.py:name` names.

    This is how a user's own tools, rewards and environments plug in.
    """
    file, colon, name = reference.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise SharpenError(f"{reference!r}: expected file.py:name")
    module = load_module(file)
    if not hasattr(module, name):
        raise SharpenError(f"{file}: has no {name!r}")
    return getattr(module, name)


def load_module(path: str | Path) -> ModuleType:
    """Execute a Python file as a module; what it raises becomes a one-line error."""
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
    """Returns every problem of a call's arguments with the schema of its tool."""
    try:
        validator = validator_for(json.dumps(spec.parameters, sort_keys=True))
    except (ValueError, RecursionError) as error:
        return [f"schema of {spec.name}: {_first_line(error)}"]
    return argument_problems(validator, call.arguments)


def argument_problems(validator: Any, arguments: Json) -> list[str]:
    """Returns every problem of some arguments with a compiled schema."""
    errors = []
    try:
        json.dumps(arguments, ensure_ascii=False).encode()  # refuses half a surrogate pair
        if not validator.is_valid(arguments):
            errors = list(validator.iter_errors(arguments))
    except (TypeError, ValueError, RecursionError) as error:
        return [f"not JSON: {_first_line(error)}"]
    problems = []
    for error in errors:
        location = ".".join(str(part) for part in error.instance_path)
        text = _describe_schema_error(error)
        problems.append(f"{location}: {text}" if location else text)
    return problems


def _describe_schema_error(error: Any) -> str:
    """Returns the text of a schema error, with the allowed values, so that a model can retry."""
    options = getattr(error.kind, "options", None)
    if not isinstance(options, list) or len(options) > _MAX_OPTIONS:
        return error.message
    allowed = ", ".join(json.dumps(option, ensure_ascii=False) for option in options)
    return f"{json.dumps(error.instance, ensure_ascii=False)} is not one of {allowed}"


def schema_problem(parameters: Json) -> str | None:
    """Returns why a parameter schema cannot be used, or None. Fetches no remote reference."""
    try:
        validator_for(json.dumps(parameters, sort_keys=True))
    except (ValueError, TypeError, RecursionError) as error:
        return _first_line(error) or type(error).__name__
    cycle = recursive_ref(parameters)
    if cycle:
        return f"$ref {cycle!r} contains itself"
    declared = parameters.get("type", "object")
    if declared != "object":
        return f"type: expected 'object', found {declared!r}"
    return None


def recursive_ref(schema: Json) -> str | None:
    """Returns a local `$ref` that leads back to itself, or None.

    A model cannot be shown such a schema in full.
    """
    refs_below: dict[str, list[str]] = {}
    pending = _local_refs(schema)
    while pending:
        ref = pending.pop()
        if ref in refs_below:
            continue
        target: Any = schema
        for part in ref.split("/")[1:]:
            target = target.get(part) if isinstance(target, dict) else None
        refs_below[ref] = _local_refs(target)
        pending += refs_below[ref]
    try:
        graphlib.TopologicalSorter(refs_below).prepare()
    except graphlib.CycleError as error:
        cycle = error.args[1]
        return cycle[0]
    return None


def _local_refs(schema: Any) -> list[str]:
    """Returns every local reference at any depth of a part of a schema."""
    refs = []
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            ref = value.get("$ref")
            if isinstance(ref, str) and ref.startswith("#"):
                refs.append(ref)
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return refs


@functools.lru_cache(maxsize=4096)
def validator_for(schema_text: str) -> Any:
    """Compile a JSON schema. Its patterns run in linear time, so none can make a check hang."""
    return jsonschema_rs.validator_for(
        json.loads(schema_text),
        retriever=_refuse_remote_ref,
        pattern_options=jsonschema_rs.RegexOptions(),  # the linear-time engine
        validate_formats=True,
    )


def _refuse_remote_ref(uri: str) -> Any:
    """Raise in place of fetching a remote reference."""
    raise ValueError(f"remote $ref {uri} is refused")


def _first_line(error: BaseException) -> str:
    """Returns the text of an exception up to its first line break."""
    return str(error).split("\n", 1)[0]


# A schema from a signature ---------------------------------------------------------------------


def _argument_model(function: Callable[..., Any]) -> type[BaseModel]:
    """Returns a pydantic model of a function's parameters, described by its docstring."""
    name = getattr(function, "__name__", repr(function))
    _, descriptions = _parse_docstring(function)
    hints = typing.get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise SharpenError(f"tool {name}: *args and **kwargs have no schema")
        if parameter.name not in hints:
            raise SharpenError(f"tool {name}: parameter {parameter.name!r} needs a type")
        default = ... if parameter.default is parameter.empty else parameter.default
        field = Field(default, description=descriptions.get(parameter.name))
        fields[parameter.name] = (hints[parameter.name], field)
    return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)


def _parameters_schema(arguments: type[BaseModel]) -> Json:
    """Returns the JSON schema as function-calling models expect it.

    Titles are left out, and references are replaced by what they refer to.
    """
    schema = arguments.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inline(value: Any, parents: tuple[str, ...] = ()) -> Any:
        if isinstance(value, list):
            return [inline(item, parents) for item in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            target = value["$ref"].rsplit("/", 1)[-1]
            if target in parents:
                raise SharpenError(f"tool {arguments.__name__}: type {target} contains itself")
            siblings = {key: item for key, item in value.items() if key != "$ref"}
            return inline(definitions[target], (*parents, target)) | siblings
        inlined = {}
        for key, item in value.items():
            if key == "title" and isinstance(item, str):
                continue
            if key == "properties":  # its keys are parameters, which may be called "title"
                inlined[key] = {name: inline(part, parents) for name, part in item.items()}
            else:
                inlined[key] = inline(item, parents)
        return inlined

    return inline(schema)


def _parse_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Returns a docstring's summary and the descriptions of its parameters.

    It reads Google style (`Args:`) and `:param x:`.
    """
    text = inspect.getdoc(function) or ""
    summary = re.split(r"(?m)^\s*(?:Args|Arguments|Parameters|Returns|Raises|Yields):|^\s*:", text)[
        0
    ]
    entries = re.findall(r"(?ms)^\s*:param (\w+):\s*(.+?)(?=^\s*:|\Z)", text)
    section = re.search(r"(?ms)^(?:Args|Arguments|Parameters):\n(.+?)(?=^\S|\Z)", text)
    if section:
        # `name: text` or `name (type): text`, until the next such line
        entry = r"(?ms)^ {2,8}(\w+)(?: *\([^)]*\))?:\s*(.+?)(?=^ {2,8}\w+(?: *\([^)]*\))?:|\Z)"
        entries += re.findall(entry, section[1])
    descriptions = {name: one_line(description) for name, description in entries}
    return one_line(summary), descriptions


# Bounded execution -----------------------------------------------------------------------------

_stuck: set[threading.Thread] = set()


def call_with_limit(function: Callable[..., Any], values: Json, timeout_s: float) -> Any:
    """Call a function in a daemon thread and wait at most `timeout_s`.

    Returns the value, or the exception that was raised; a `TimeoutError` when nothing came. A
    hanging call is abandoned and counted. Code that is not trusted belongs in the sandbox.
    """
    finished = [thread for thread in _stuck if not thread.is_alive()]
    _stuck.difference_update(finished)
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


def _value_to_result(value: Any, max_bytes: int) -> ToolResult:
    """Returns a tool's value as text: a string as it is, all else as JSON; cut to `max_bytes`."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        encoded = text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        return ToolResult(f"the tool's answer is not JSON: {one_line(error)}", "not_json")
    if len(encoded) <= max_bytes:
        return ToolResult(text)
    start = encoded[:max_bytes].decode("utf-8", "ignore")
    return ToolResult(f"{start}\n[cut: {max_bytes} of {len(encoded)} bytes]", truncated=True)
