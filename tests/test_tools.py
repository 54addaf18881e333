"""@tool: schema from a signature, checked and bounded execution."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from pydantic import Field

from sharpen import tools
from sharpen.tools import check_call, load_object, load_tools, run_call, schema_problem, tool
from sharpen.types import SharpenError, ToolCall, ToolSpec


@dataclass
class Place:
    city: str
    country: str = "FR"


@tool
def forecast(
    place: Place,
    days: Annotated[int, Field(ge=1, le=14)] = 3,
    unit: Literal["celsius", "fahrenheit"] = "celsius",
    tags: list[str] | None = None,
) -> dict:
    """Forecast the weather
    of a place.

    Args:
        place: Where to look.
        days (int): How many days ahead,
            counted from today.
        unit: Scale of the temperatures.

    Returns:
        One row a day.
    """
    return {"city": place.city, "days": days, "unit": unit, "tags": tags}


def test_schema_from_signature():
    assert forecast.spec.name == "forecast"
    assert forecast.spec.description == "Forecast the weather of a place."
    schema = forecast.spec.parameters
    assert schema["required"] == ["place"]
    assert schema["additionalProperties"] is False
    place = schema["properties"]["place"]
    assert place["properties"]["city"] == {"type": "string"}
    assert place["description"] == "Where to look."
    assert "$defs" not in schema and "$ref" not in json.dumps(schema)
    days = schema["properties"]["days"]
    assert (days["minimum"], days["maximum"], days["default"]) == (1, 14, 3)
    assert days["description"] == "How many days ahead, counted from today."
    assert schema["properties"]["unit"]["enum"] == ["celsius", "fahrenheit"]


def test_a_parameter_called_title_keeps_its_name():
    @tool
    def note(title: str, properties: dict[str, int]) -> str:
        """Write a note."""
        return title

    assert set(note.spec.parameters["properties"]) == {"title", "properties"}


def test_runs_with_converted_arguments():
    result = forecast.run({"place": {"city": "Paris"}, "days": 2})
    assert json.loads(result.content) == {
        "city": "Paris", "days": 2, "unit": "celsius", "tags": None
    }  # fmt: skip
    assert forecast(Place("Rome"))["city"] == "Rome"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({}, '"place" is a required property'),
        ({"place": {"city": "Paris"}, "days": "two"}, 'days: "two" is not of type "integer"'),
        ({"place": {"city": "Paris"}, "day": 1}, "'day' was unexpected"),
        ({"place": {"city": 1}}, "place.city"),
    ],
)
def test_invalid_arguments_are_results(arguments, complaint):
    result = forecast.run(arguments)
    assert result.error == "invalid_argument"
    assert complaint in result.content


def test_unknown_tool_failure_and_bad_answer_are_results():
    @tool
    def broken() -> str:
        """Fail."""
        raise ValueError("no\nluck")

    @tool
    def odd() -> object:
        """Answer with something that is not JSON."""
        return object()

    offered = {"broken": broken, "odd": odd}
    assert run_call(ToolCall("nope"), offered).error == "unknown_tool"
    assert run_call(ToolCall("broken"), offered).content == "ValueError: no luck"
    assert run_call(ToolCall("odd"), offered).error == "not_json"
    message = run_call(ToolCall("broken", {}, "c1"), offered).message(ToolCall("broken", {}, "c1"))
    assert (message.role, message.name, message.tool_call_id) == ("tool", "broken", "c1")
    assert json.loads(message.content)["error"] == "failed"


def test_hanging_tools_time_out():
    @tool(timeout_s=0.1)
    def hang() -> str:
        """Hang."""
        time.sleep(1.5)
        return "late"

    @tool(timeout_s=0.1)
    async def hang_async() -> str:
        """Hang politely."""
        await asyncio.sleep(60)
        return "late"

    started = time.monotonic()
    assert hang.run({}).error == "timeout"
    assert hang_async.run({}).error == "timeout"
    assert time.monotonic() - started < 1.0


def test_many_stuck_calls_stop_the_run(monkeypatch):
    @tool(timeout_s=0.01)
    def hang() -> str:
        """Hang."""
        time.sleep(0.5)
        return "late"

    monkeypatch.setattr(tools, "MAX_STUCK", 2)
    monkeypatch.setattr(tools, "_stuck", set())
    hang.run({})
    hang.run({})
    with pytest.raises(SharpenError, match="2 tool calls hang"):
        hang.run({})


def test_large_answers_are_cut():
    @tool(max_bytes=100)
    def flood() -> str:
        """Say too much."""
        return "é" * 1000

    result = flood.run({})
    assert result.truncated and result.content.endswith("[cut: 100 of 2000 bytes]")


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/x"}}}, "refused"),
        ({"type": "objekt"}, "objekt"),
        ({"type": "object", "properties": {"a": {"pattern": "("}}}, "regex"),
        ({"type": "string"}, "expected 'object'"),
    ],
)
def test_unusable_schemas_are_named(schema, problem):
    assert problem in (schema_problem(schema) or "")
    if schema["type"] != "string":
        assert problem in check_call(ToolCall("f", {"a": "x"}), ToolSpec("f", "", schema))[0]


def test_hostile_schemas_are_quick():
    started = time.process_time()
    loop = {"type": "object", "properties": {"a": {"$ref": "#"}}}
    assert check_call(ToolCall("f", {"a": {"a": 3}}), ToolSpec("f", "", loop))
    bomb = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}}
    assert check_call(ToolCall("f", {"a": "a" * 5000 + "b"}), ToolSpec("f", "", bomb))
    deep: dict = {}
    for _ in range(5000):
        deep = {"properties": {"a": deep}}
    assert schema_problem(deep)
    assert time.process_time() - started < 1.0


def test_untyped_parameters_are_refused():
    with pytest.raises(SharpenError, match="parameter 'x' needs a type"):

        @tool
        def f(x):
            """F."""

    with pytest.raises(SharpenError, match=r"\*args"):

        @tool
        def g(*args: int):
            """G."""


def test_user_files_plug_in(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from sharpen.tools import tool\n\n@tool\ndef add(a: int, b: int) -> int:\n"
        '    """Add two.\n\n    :param a: first\n    :param b: second"""\n    return a + b\n'
    )
    loaded = load_tools(file)
    assert loaded["add"].run({"a": 1, "b": 2}).content == "3"
    assert loaded["add"].spec.parameters["properties"]["a"]["description"] == "first"
    assert load_object(f"{file}:add").spec.name == "add"
    for reference, problem in [
        ("mine.py", "expected file.py:name"),
        (f"{file}:sub", "has no 'sub'"),
        ("gone.py:x", "no such file"),
    ]:
        with pytest.raises(SharpenError, match=problem):
            load_object(reference)
    file.write_text("import nothing_like_this")
    with pytest.raises(SharpenError, match="ModuleNotFoundError"):
        load_tools(file)
