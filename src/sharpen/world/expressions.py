"""The two small languages of a domain file: conditions (`price <= max_price?`) and expressions, a
checked subset of Python's (arithmetic, comparison, `and/or/not`, `a if c else b`, fields of another
row as in `flight.fare`, the functions below) that cannot loop, call back or reach outside."""

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

NODES = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Constant)
NODES += (ast.List, ast.Tuple, ast.Load, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)
PARAM = re.compile(r"([a-z]\w*)(\?)?(?:=(.+))?")
CONDITION = re.compile(r"(\w+)\s*(!=|<=|>=|=|<|>|\bcontains\b|\bhas\b|\bin\b)\s*(.+)")


class ToolFailure(Exception):
    """A tool's error result: `not_found`, `invalid_argument`, `conflict` or `permission`."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code, self.message = code, message


def minutes(clock: str) -> int:
    """`HH:MM`, or the time of a datetime, as minutes after midnight."""
    return int(clock[-5:-3]) * 60 + int(clock[-2:])


def clock(total: float) -> str:
    return f"{int(total) // 60 % 24:02d}:{int(total) % 60:02d}"


def day(text: str) -> date:
    return date.fromisoformat(text[:10])


PLAIN = (min, max, abs, round, len, minutes, clock, math.ceil, math.floor)
FUNCTIONS: dict[str, Any] = {
    **{function.__name__: function for function in PLAIN},
    "power": math.pow,  # what `**` becomes, for it cannot hang
    "days_between": lambda first, last: (day(last) - day(first)).days,
    "add_days": lambda first, n: str(day(first) + timedelta(days=int(n))),
    "add_minutes": lambda time, n: clock(minutes(time) + n),
}


class Expression(ast.NodeTransformer):
    """One compiled expression, with the names it reads and the `row.field` pairs among them."""

    def __init__(self, source: Any):
        self.source = str(source)
        self.names, self.attributes = set[str](), set[tuple[str, str]]()
        try:
            tree = ast.parse(self.source, mode="eval")
        except (SyntaxError, ValueError, RecursionError):
            cut = self.source.count("(") != self.source.count(")")
            hint = " (YAML cuts at a comma inside {…}: quote the text)" if cut else ""
            raise ValueError(f"not an expression: {self.source!r}{hint}") from None
        body = ast.unparse(self.visit(tree))
        self.code = eval(f"lambda scope: {body}", {"__builtins__": {}} | FUNCTIONS)

    def __call__(self, scope: Mapping[str, Any]) -> Any:
        try:
            return self.code(scope)
        except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
            raise ToolFailure("invalid_argument", f"cannot be worked out: {error}") from None
        except KeyError as error:
            raise SharpenError(f"expression {self.source!r}: unknown name ({error})") from None

    def visit(self, node: ast.AST) -> Any:
        """Refuses what is not allowed, and makes names items of the scope, as rows are dicts."""
        match node:
            case ast.Name(name):
                self.names.add(name)
                return scoped(name)
            case ast.Attribute(ast.Name(owner), name):
                self.attributes.add((owner, name))
                return ast.Subscript(scoped(owner), ast.Constant(name))
            case ast.Call(ast.Name(name) as function, args, []) if name in FUNCTIONS:
                return ast.Call(function, [self.visit(arg) for arg in args], [])
            case ast.BinOp(left, ast.Pow(), right):
                return ast.Call(ast.Name("power"), [self.visit(left), self.visit(right)], [])
            case ast.Call():
                known = ", ".join(FUNCTIONS)
                raise ValueError(f"unknown function in {self.source!r}; there are {known}")
        if not isinstance(node, NODES):
            raise ValueError(f"{type(node).__name__} is not allowed in {self.source!r}")
        return self.generic_visit(node)


def scoped(name: str) -> ast.expr:
    return ast.Subscript(ast.Name("scope"), ast.Constant(name))


COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": lambda value, wanted: value == wanted or str(value).lower() == str(wanted).lower(),
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "contains": lambda value, words: str(words).lower() in str(value).lower(),
    "has": operator.contains,
    "in": lambda value, wanted: value in wanted,
}


@dataclass(frozen=True, slots=True)
class Condition:
    """`field op parameter`, or `field op 'literal'`. A bare `field` is `field = field`; parameters
    are `seat`, `note?` or `limit?=5`."""

    field: str
    op: str = "="
    name: str = ""  # the parameter; a literal has none
    required: bool = True
    value: Any = None  # the literal, or the parameter's default

    def holds(self, row: Mapping[str, Any], args: Mapping[str, Any]) -> bool:
        wanted = args.get(self.name) if self.name else self.value
        if wanted is None:
            return True
        value = row.get(self.field)
        return value is not None and COMPARE[self.op](value, wanted)


def parse_named(text: Any, field: str = "", op: str = "=") -> Condition:
    match = PARAM.fullmatch(str(text).strip())
    if not match or (match[3] and not match[2]):
        raise ValueError(f"expected `name`, `name?` or `name?=default`, found {text!r}")
    return Condition(field or match[1], op, match[1], not match[2], literal(match[3] or "null"))


def parse_condition(text: Any) -> Condition:
    raw = str(text).strip()
    if PARAM.fullmatch(raw):
        return parse_named(raw)
    match = CONDITION.fullmatch(raw)
    if not match:
        raise ValueError(f"expected `field`, `field op parameter` or `field op 'value'`: {text!r}")
    field, op, right = match.groups()
    if right[0] in "'\"-0123456789" or right in ("true", "false"):
        return Condition(field, op, value=literal(right))
    return parse_named(right, field, op)


def literal(text: str) -> Any:
    """A number, `true`, `false`, `null`, or text with or without quotes."""
    try:
        return json.loads(text)
    except ValueError:
        return text.strip("'")


Expr = Annotated[InstanceOf[Expression], BeforeValidator(Expression)]
Named = Annotated[InstanceOf[Condition], BeforeValidator(parse_named)]
Where = Annotated[InstanceOf[Condition], BeforeValidator(parse_condition)]
