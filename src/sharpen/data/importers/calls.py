"""Reads tool calls in foreign forms: objects, JSON text and Python text become `ToolCall`s.

All importers use it. Python text is parsed, never run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from operator import add, mul, sub, truediv
from typing import Any

from sharpen.data.importers.common import first_filled, parse_literal, require, to_text
from sharpen.types import Json, Message, RowError, ToolCall

_OPERATORS = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv}


def call_from(value: Any) -> ToolCall:
    """Return a call written as an object, JSON or Python text.

    Its arguments may have any of their usual names, and may be JSON text themselves.
    """
    if isinstance(value, str):
        try:
            value = parse_literal(value)
        except ValueError:
            return _call_from_python(value)
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError("", "call: expected an object with a name")
    arguments = first_filled(function, "arguments", "parameters", "kwargs", "args") or {}
    if isinstance(arguments, str):
        arguments = parse_literal(arguments)
    require(isinstance(arguments, dict), f"arguments of {function['name']}: expected an object")
    return ToolCall(function["name"], arguments, str(value.get("id") or ""))


def _call_from_python(text: str) -> ToolCall:
    """Return the call that `a.b(c=1, d=[2])` writes."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if not isinstance(node, ast.Call) or node.args:
            raise ValueError("expected name(argument=value, …)")
        arguments = {str(keyword.arg): _evaluate(keyword.value) for keyword in node.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError, ZeroDivisionError) as error:
        raise RowError("", f"call {text[:60]!r}: {error}") from None
    return ToolCall(ast.unparse(node.func), arguments)


def _evaluate(node: ast.expr) -> Any:
    """Return the value of a literal, or of arithmetic on numbers."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left = _evaluate(node.left)
        right = _evaluate(node.right)
        if not isinstance(left, (int, float)) or not isinstance(right, (int, float)):
            raise ValueError("arithmetic on something that is no number")
        return _OPERATORS[type(node.op)](left, right)
    value = ast.literal_eval(node)
    return list(value) if isinstance(value, (tuple, set)) else value


def gold_calls(values: Iterable[Any]) -> list[Json]:
    """Return calls in any form as a task's gold holds them."""
    calls = map(call_from, values)
    return [{"name": call.name, "arguments": call.arguments} for call in calls]


def call_and_result(call: ToolCall, result: Any, thought: str = "") -> list[Message]:
    """Return the assistant's turn with a call, and the tool message that answers it."""
    return [
        Message("assistant", thought, (call,)),
        Message("tool", to_text(result), name=call.name),
    ]
