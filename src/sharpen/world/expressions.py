"""The two small languages of a domain file: conditions and expressions.

A condition compares a field with a parameter: `price <= max_price?`. An expression is a checked
subset of Python: arithmetic, comparison, `and/or/not`, `a if c else b`, fields of another row as in
`flight.fare`, and the functions below. It cannot loop, call anything else or reach outside.
Used by the operations, and by the study of hacked rewards.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Annotated, Any

from pydantic import BeforeValidator, InstanceOf

from sharpen.types import SharpenError

_ALLOWED_NODES = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.BoolOp,
    ast.Compare,
    ast.IfExp,
    ast.Constant,
    ast.List,
    ast.Tuple,
    ast.Load,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
)
_PARAMETER = re.compile(r"([a-z]\w*)(\?)?(?:=(.+))?")  # name, ?, default
_CONDITION = re.compile(r"(\w+)\s*(!=|<=|>=|=|<|>|\bcontains\b|\bhas\b|\bin\b)\s*(.+)")


class ToolFailure(Exception):
    """A tool's error result: `not_found`, `invalid_argument`, `conflict` or `permission`."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code
        self.message = message


# Functions ----------------------------------------------------------------------------------------


def minutes_of_day(text: str) -> int:
    """Returns `HH:MM`, or the time of a datetime, as minutes after midnight."""
    return int(text[-5:-3]) * 60 + int(text[-2:])


def format_clock(minutes: float) -> str:
    """Returns minutes after midnight as `HH:MM`."""
    whole = int(minutes)
    return f"{whole // 60 % 24:02d}:{whole % 60:02d}"


def _parse_day(text: str) -> date:
    return date.fromisoformat(text[:10])


def _days_between(first: str, last: str) -> int:
    return (_parse_day(last) - _parse_day(first)).days


def _add_days(first: str, days: float) -> str:
    return str(_parse_day(first) + timedelta(days=int(days)))


def _add_minutes(text: str, minutes: float) -> str:
    return format_clock(minutes_of_day(text) + minutes)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "round": round,
    "len": len,
    "minutes": minutes_of_day,
    "clock": format_clock,
    "ceil": math.ceil,
    "floor": math.floor,
    "power": math.pow,  # stands for `**`, which could hang on huge integers
    "days_between": _days_between,
    "add_days": _add_days,
    "add_minutes": _add_minutes,
}


# Expressions --------------------------------------------------------------------------------------


class Expression:
    """A compiled expression. Call it with a scope (name → value) to get its value.

    `names` holds the names that it reads, `attributes` the `(row, field)` pairs among them.
    """

    def __init__(self, source: Any):
        self.source = str(source)
        compiler = _Compiler(self.source)
        body = ast.unparse(compiler.visit(_parse_source(self.source)))
        self.names = compiler.names
        self.attributes = compiler.attributes
        self._evaluate = eval(f"lambda scope: {body}", {"__builtins__": {}} | _FUNCTIONS)

    def __call__(self, scope: Mapping[str, Any]) -> Any:
        try:
            return self._evaluate(scope)
        except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
            raise ToolFailure("invalid_argument", f"cannot be worked out: {error}") from None
        except KeyError as error:
            raise SharpenError(f"expression {self.source!r}: unknown name ({error})") from None


def _parse_source(source: str) -> ast.Expression:
    try:
        return ast.parse(source, mode="eval")
    except (SyntaxError, ValueError, RecursionError):
        hint = ""
        if source.count("(") != source.count(")"):
            hint = " (YAML cuts at a comma inside {…}: quote the text)"
        raise ValueError(f"not an expression: {source!r}{hint}") from None


class _Compiler(ast.NodeTransformer):
    """Refuses every syntax that is not allowed, and turns names into items of the scope.

    Rows are dicts, so `flight.fare` becomes `scope["flight"]["fare"]`.
    """

    def __init__(self, source: str):
        self.source = source
        self.names: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()

    def visit(self, node: ast.AST) -> Any:
        match node:
            case ast.Name(name):
                self.names.add(name)
                return _scope_item(name)
            case ast.Attribute(ast.Name(owner), name):
                self.attributes.add((owner, name))
                return ast.Subscript(_scope_item(owner), ast.Constant(name))
            case ast.Call(ast.Name(name) as function, args, []) if name in _FUNCTIONS:
                return ast.Call(function, [self.visit(arg) for arg in args], [])
            case ast.BinOp(left, ast.Pow(), right):
                return ast.Call(ast.Name("power"), [self.visit(left), self.visit(right)], [])
            case ast.Call():
                known = ", ".join(_FUNCTIONS)
                raise ValueError(f"unknown function in {self.source!r}; there are {known}")
        if not isinstance(node, _ALLOWED_NODES):
            raise ValueError(f"{type(node).__name__} is not allowed in {self.source!r}")
        return self.generic_visit(node)


def _scope_item(name: str) -> ast.expr:
    return ast.Subscript(ast.Name("scope"), ast.Constant(name))


# Conditions ---------------------------------------------------------------------------------------


def _equals(value: Any, expected: Any) -> bool:
    return value == expected or str(value).lower() == str(expected).lower()


def _contains_text(value: Any, text: Any) -> bool:
    return str(text).lower() in str(value).lower()


def _is_in(value: Any, options: Any) -> bool:
    return value in options


_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "=": _equals,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "contains": _contains_text,
    "has": operator.contains,
    "in": _is_in,
}


@dataclass(frozen=True, slots=True)
class Condition:
    """`field op parameter`, or `field op 'literal'`. A bare `field` is `field = field`.

    A parameter is written `seat` (required), `note?` (optional) or `limit?=5` (with a default).
    """

    field: str
    op: str = "="
    name: str = ""  # the parameter; empty if the condition has a literal
    required: bool = True
    value: Any = None  # the literal, or the parameter's default

    def holds(self, row: Mapping[str, Any], args: Mapping[str, Any]) -> bool:
        """Returns whether a row meets the condition; without a value to compare every row does."""
        expected = args.get(self.name) if self.name else self.value
        if expected is None:
            return True
        value = row.get(self.field)
        return value is not None and _COMPARISONS[self.op](value, expected)


def parse_named(text: Any, field: str = "", op: str = "=") -> Condition:
    """Parse a parameter (`seat`, `note?`, `limit?=5`) into a condition on `field`.

    Without `field`, the condition is on the field of the parameter's name.
    """
    match = _PARAMETER.fullmatch(str(text).strip())
    if not match or (match[3] and not match[2]):
        raise ValueError(f"expected `name`, `name?` or `name?=default`, found {text!r}")
    name = match[1]
    is_required = not match[2]
    default = _parse_literal(match[3] or "null")
    return Condition(field or name, op, name, is_required, default)


def parse_condition(text: Any) -> Condition:
    """Parse `field`, `field op parameter` or `field op 'literal'`."""
    source = str(text).strip()
    if _PARAMETER.fullmatch(source):
        return parse_named(source)
    match = _CONDITION.fullmatch(source)
    if not match:
        raise ValueError(f"expected `field`, `field op parameter` or `field op 'value'`: {text!r}")
    field, op, right = match.groups()
    is_literal = right[0] in "'\"-0123456789" or right in ("true", "false")
    if is_literal:
        return Condition(field, op, value=_parse_literal(right))
    return parse_named(right, field, op)


def _parse_literal(text: str) -> Any:
    """Returns a number, `true`, `false`, `null`, or text with or without quotes."""
    try:
        return json.loads(text)
    except ValueError:
        return text.strip("'")


# As settings: pydantic parses the text of the domain file.
Expr = Annotated[InstanceOf[Expression], BeforeValidator(Expression)]
Named = Annotated[InstanceOf[Condition], BeforeValidator(parse_named)]
Where = Annotated[InstanceOf[Condition], BeforeValidator(parse_condition)]
