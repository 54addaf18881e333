"""The two small languages of a domain file: expressions (`fare * seats + fee`) and conditions
(`price <= max_price?`).

Expressions are a checked subset of Python's: arithmetic, comparison, `and/or/not`, `a if c else b`,
a field of another row (`flight.fare`), and the functions below. Nothing in them can loop, call back
or reach outside.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Annotated, Any

from pydantic import BeforeValidator, InstanceOf

from sharpen.types import SharpenError

NODES = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Call),
    *(ast.Name, ast.Attribute, ast.Constant, ast.List, ast.Tuple, ast.Load, ast.operator),
    *(ast.unaryop, ast.boolop, ast.cmpop),
)
PARAM = re.compile(r"([a-z]\w*)(\?)?(?:=(.+))?")
CONDITION = re.compile(r"(\w+)(?:\s*(!=|<=|>=|=|<|>|\bcontains\b|\bhas\b|\bin\b|\bon\b)\s*(.+))?")


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


FUNCTIONS: dict[str, Any] = {
    "min": min,
    "max": max,
    "abs": abs,
    "round": round,
    "len": len,
    "ceil": math.ceil,
    "floor": math.floor,
    "sqrt": math.sqrt,
    "power": math.pow,
    "lower": str.lower,
    "upper": str.upper,
    "minutes": minutes,
    "clock": clock,
    "days_between": lambda a, b: (
        date.fromisoformat(b[:10]).toordinal() - date.fromisoformat(a[:10]).toordinal()
    ),
    "add_days": lambda day, n: str(date.fromisoformat(day[:10]) + timedelta(days=int(n))),
    "add_minutes": lambda time, n: clock(minutes(time) + n),
    "weekday": lambda day: date.fromisoformat(day[:10]).strftime("%A"),
    "without": lambda items, *drop: [i for i in items if i not in drop],
}
GLOBALS = {"__builtins__": {}} | FUNCTIONS


class Expression:
    """One compiled expression: the names it reads, and the `row.field` pairs among them."""

    def __init__(self, source: Any):
        self.source = str(source)
        try:
            tree = ast.parse(self.source, mode="eval")
        except (SyntaxError, ValueError, RecursionError):
            cut = self.source.count("(") != self.source.count(")")
            hint = " (YAML cuts at a comma inside {…}: quote the text)" if cut else ""
            raise ValueError(f"not an expression: {self.source!r}{hint}") from None
        self.attributes: set[tuple[str, str]] = set()
        called: set[str] = set()
        for node in ast.walk(tree):
            if not isinstance(node, NODES):
                raise ValueError(f"{type(node).__name__} is not allowed in {self.source!r}")
            if isinstance(node, ast.Call):
                if not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS:
                    raise ValueError(f"unknown function in {self.source!r}: {', '.join(FUNCTIONS)}")
                called.add(node.func.id)
            if isinstance(node, ast.Attribute):
                if not isinstance(node.value, ast.Name):
                    raise ValueError(f"only entity.field can be read, in {self.source!r}")
                self.attributes.add((node.value.id, node.attr))
        owners = {owner for owner, _ in self.attributes}
        names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        self.names = names - called - owners
        self.code = compiled(tree)

    def __call__(self, scope: Mapping[str, Any]) -> Any:
        try:
            return self.code(scope)
        except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
            raise ToolFailure("invalid_argument", f"cannot be worked out: {error}") from None
        except KeyError as error:
            raise SharpenError(f"expression {self.source!r}: unknown name ({error})") from None


def compiled(tree: ast.Expression) -> Callable[[Mapping[str, Any]], Any]:
    """A function of the scope: `flight.fare` reads `scope['flight']['fare']`."""
    body = ast.unparse(Scoped().visit(tree))
    return eval(f"lambda scope: {body}", GLOBALS)


class Scoped(ast.NodeTransformer):
    """Names become items of the scope, as rows are dicts; `**` becomes `power`, which cannot
    hang."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Subscript(ast.Name("scope"), ast.Constant(node.id))

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return ast.Subscript(self.visit(node.value), ast.Constant(node.attr))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return ast.Call(node.func, [self.visit(arg) for arg in node.args], [])

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Pow):
            return ast.Call(ast.Name("power"), [node.left, node.right], [])
        return node


Expr = Annotated[InstanceOf[Expression], BeforeValidator(Expression)]


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter as a tool names it: `seat`, `note?`, `limit?=5`."""

    name: str
    required: bool = True
    default: Any = None


def parse_named(text: Any) -> Named:
    match = PARAM.fullmatch(str(text).strip())
    if not match or (match[3] and not match[2]):
        raise ValueError(f"expected `name`, `name?` or `name?=default`, found {text!r}")
    return Named(match[1], not match[2], literal(match[3]) if match[3] else None)


def literal(text: str) -> Any:
    """A number, `true`/`false`, or text with or without quotes."""
    plain = {"true": True, "false": False, "null": None}
    if text in plain:
        return plain[text]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def contains(value: Any, wanted: Any) -> bool:
    return str(wanted).lower() in str(value).lower()


COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": lambda value, wanted: (
        value == wanted
        or (isinstance(value, str) and isinstance(wanted, str) and value.lower() == wanted.lower())
    ),
    "!=": lambda value, wanted: value != wanted,
    "<": lambda value, wanted: value < wanted,
    "<=": lambda value, wanted: value <= wanted,
    ">": lambda value, wanted: value > wanted,
    ">=": lambda value, wanted: value >= wanted,
    "contains": contains,
    "has": lambda value, wanted: wanted in value,
    "in": lambda value, wanted: value in wanted,
    "on": lambda value, wanted: value[:10] == wanted,
}


@dataclass(frozen=True, slots=True)
class Condition:
    """`field op parameter`, or `field op 'literal'`. A bare `field` compares it with the parameter
    of its own name."""

    field: str
    op: str
    param: Named | None
    value: Any = None

    def holds(self, row: Mapping[str, Any], args: Mapping[str, Any]) -> bool:
        wanted = args.get(self.param.name) if self.param else self.value
        if wanted is None:
            return True
        value = row.get(self.field)
        return value is not None and COMPARE[self.op](value, wanted)


def parse_condition(text: Any) -> Condition:
    raw = str(text).strip()
    bare = PARAM.fullmatch(raw)
    if bare:
        return Condition(bare[1], "=", parse_named(raw))
    match = CONDITION.fullmatch(raw)
    if not match or not match[2]:
        raise ValueError(f"expected `field`, `field op parameter` or `field op 'value'`: {text!r}")
    right = match[3].strip()
    if right[0] in "'\"-0123456789" or right in ("true", "false"):
        return Condition(match[1], match[2], None, literal(right))
    return Condition(match[1], match[2], parse_named(right))


NamedParam = Annotated[InstanceOf[Named], BeforeValidator(parse_named)]
Where = Annotated[InstanceOf[Condition], BeforeValidator(parse_condition)]
