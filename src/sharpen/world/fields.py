"""A field: what a value looks like, said once. Rows are drawn from it and the JSON schemas of
parameters and outputs are derived from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date, timedelta
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from sharpen.config import Config, read_yaml
from sharpen.types import Json
from sharpen.world.expressions import Expr, clock, minutes

Family = Literal["train", "dev", "test"]
FAMILIES: tuple[Family, ...] = ("train", "dev", "test")
# Every fifth value of a pool is dev's, every fifth test's: held-out splits speak of other things.
PARTS = {"train": (0, 1, 2), "dev": (3,), "test": (4,)}
DIGITS = {"train": "12345", "dev": "67", "test": "89"}
TODAY = {"train": date(2026, 3, 2), "dev": date(2027, 6, 7), "test": date(2028, 9, 4)}
KINDS = {
    "id": "a pattern such as BK-####",
    "choice": "two or more values",
    "text": "five or more values, a pool's name, or a template such as '{city} office'",
    "int": "[lowest, highest]",
    "number": "[lowest, highest]",
    "money": "[lowest, highest]",
    "date": "[first, last] in days from today",
    "datetime": "[first, last] in days from today",
    "time": "[earliest, latest] as HH:MM",
    "bool": "true, or the share of rows that are true",
    "ref": "an entity's name",
    "list": "three or more values, or an entity's name",
    "object": "a mapping of fields",
}
NUMBERS = ("int", "number", "money")
STEPS = {"money": 0.01, "number": 0.1}
LEAST = {"choice": 2, "text": 5, "list": 3}
POOL = re.compile(r"\{(\w+)\}")


class Field(Config):
    """`{kind: details, about: …}`; exactly one of the keys of `KINDS` stands in it."""

    kind: str
    spec: Any
    about: str
    step: float | None = None
    bounds: tuple[float, float] | None = None
    none: float = 0.0
    default: Any = None
    calc: Expr | None = None
    free: bool = False
    format: Literal["", "email", "uri"] = ""
    size: tuple[int, int] = (0, 3)
    question: str = ""

    @model_validator(mode="before")
    @classmethod
    def one_kind(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "kind" in values:
            return values
        kinds = [key for key in values if key in KINDS]
        if len(kinds) != 1:
            found = ", ".join(kinds) or "none"
            raise ValueError(f"a field has exactly one of {', '.join(KINDS)}; found {found}")
        rest = {key: value for key, value in values.items() if key != kinds[0]}
        return rest | {"kind": kinds[0], "spec": normal(kinds[0], values[kinds[0]])}

    @property
    def entity(self) -> str:
        """The entity whose keys this field holds, if any."""
        return self.spec if self.kind in ("ref", "list") and isinstance(self.spec, str) else ""

    @property
    def grid(self) -> float:
        return self.step or STEPS.get(self.kind, 1)

    @cached_property
    def places(self) -> int:
        """Decimals that are kept of a computed value."""
        decimals = len(f"{self.grid:.6f}".rstrip("0").split(".")[1])
        return 0 if self.kind == "int" else max(2, decimals)

    def coerce(self, value: Any) -> Any:
        """A computed value as this field stores it."""
        if self.kind not in NUMBERS or value is None:
            return value
        return plain(round(value, self.places))


def normal(kind: str, spec: Any) -> Any:
    """A kind's details as the rest wants them, or what is wrong with them."""
    if kind == "id" and isinstance(spec, str) and spec:
        return spec if "#" in spec else f"{spec}-####"
    if kind in (*NUMBERS, "date", "datetime", "time"):
        pair = isinstance(spec, list) and len(spec) == 2 and spec[0] <= spec[1]
        if pair and (kind == "time") == isinstance(spec[0], str):
            return tuple(spec)
    elif kind in LEAST and isinstance(spec, list):
        plain = all(isinstance(v, (str, int, float)) and not isinstance(v, bool) for v in spec)
        if not plain or not LEAST[kind] <= len(spec) == len(set(spec)):
            raise ValueError(
                f"{kind}: at least {LEAST[kind]} different values are needed: {spec!r}"
            )
        return tuple(spec)
    elif kind in ("text", "ref", "list") and isinstance(spec, str) and spec:
        return f"{{{spec}}}" if kind == "text" and "{" not in spec else spec
    elif kind == "bool" and (spec is True or isinstance(spec, float)):
        return 0.5 if spec is True else spec
    elif kind == "object" and isinstance(spec, dict) and spec:
        return {name: Field.model_validate(inner) for name, inner in spec.items()}
    raise ValueError(f"{kind}: expected {KINDS[kind]}, found {spec!r}")


@cache
def shared_pools() -> dict[str, tuple[str, ...]]:
    """Names, cities and other things that every domain may speak of."""
    return {k: tuple(v) for k, v in read_yaml(Path(__file__).parent / "pools.yaml").items()}


@lru_cache(maxsize=4096)
def part(values: tuple[str, ...], family: Family) -> tuple[str, ...]:
    """A family's share of a pool."""
    return tuple(v for i, v in enumerate(values) if i % 5 in PARTS[family])


# Drawing values --------------------------------------------------------------------------------

DRAW = "random, sample, keys"  # of a seeded generator; keys: an entity's name → the keys it has
QUARTERS = [clock(at) for at in range(7 * 60, 21 * 60, 15)]


class Drawing:
    """How a family's values are drawn, written as Python: a table's rows come from one compiled
    function, for they are drawn by the million."""

    def __init__(self, family: Family, pools: Mapping[str, tuple[str, ...]]):
        self.family: Family = family
        self.pools = pools
        self.names: Json = {"plain": plain}

    def value(self, field: Field) -> Callable[..., Any]:
        """`value(random, sample, keys)` → one value."""
        return eval(f"lambda {DRAW}: {self.source(field)}", self.names)

    def row(self, fields: Mapping[str, Field]) -> Callable[..., None]:
        """`row(row, scope, random, sample, keys)` fills a row, in the order of the fields."""
        lines = [f"def row(row, scope, {DRAW}):"]
        for name, field in fields.items():
            source = self.source(field)
            if field.calc is not None:
                alone = not field.calc.attributes and field.calc.names <= set(fields)
                given = "row" if alone else "scope(row)"
                source = f"{self.constant(field.coerce)}({self.constant(field.calc)}({given}))"
            source = f"None if random() < {field.none} else {source}" if field.none else source
            lines.append(f"    row[{name!r}] = {source}")
        exec("\n".join([*lines, "    return None"]), self.names)
        return self.names["row"]

    def constant(self, value: Any) -> str:
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def one_of(self, values: Sequence[Any]) -> str:
        return f"{self.constant(values)}[int(random() * {len(values)})]"

    def source(self, field: Field) -> str:
        if isinstance(field.spec, tuple) and field.kind in ("choice", "text", "date", "time"):
            return self.one_of(options(field, self.family))
        return getattr(self, "number" if field.kind in NUMBERS else field.kind)(field)

    def number(self, field: Field) -> str:
        (low, high), step = field.spec, field.grid
        count = int((high - low) / step + 1e-9) + 1
        value = f"{low} + {step} * int(random() * {count})"
        return f"int({value})" if field.kind == "int" else f"plain(round({value}, 4))"

    def id(self, field: Field) -> str:
        head, *rest = field.spec.split("#")
        digits = [
            DIGITS[self.family],
            *["0123456789"] * (len(rest) - 1),
        ]  # the first tells families
        drawn = [f" + {self.one_of(d)} + {text!r}" for d, text in zip(digits, rest, strict=True)]
        return f"{head!r}{''.join(drawn)}"

    def text(self, field: Field) -> str:
        pieces = [repr(piece) for piece in POOL.split(field.spec)]  # text, pool, text, …
        for i, name in enumerate(POOL.findall(field.spec)):
            pieces[2 * i + 1] = self.one_of(part(self.pools[name], self.family))
        return " + ".join(pieces)

    def datetime(self, field: Field) -> str:
        return f"{self.one_of(options(field, self.family))} + 'T' + {self.one_of(QUARTERS)}"

    def bool(self, field: Field) -> str:
        return f"random() < {field.spec}"

    def ref(self, field: Field) -> str:
        return f"(found := keys({field.spec!r}))[int(random() * len(found))]"

    def list(self, field: Field) -> str:
        low, high = field.size
        values = f"keys({field.spec!r})" if field.entity else self.constant(field.spec)
        count = f"{low} + int(random() * {high - low + 1})"
        return f"sorted(sample(found := {values}, min({count}, len(found))))"

    def object(self, field: Field) -> str:
        inner = [f"{name!r}: {self.source(f)}" for name, f in field.spec.items()]
        return f"{{{', '.join(inner)}}}"


def options(field: Field, family: Family) -> Sequence[Any]:
    """All values of a field that has a list of them."""
    if field.kind in ("date", "datetime"):
        days = range(field.spec[0], field.spec[1] + 1)
        return [str(TODAY[family] + timedelta(days=day)) for day in days]
    if field.kind == "time":
        low, high = map(minutes, field.spec)
        return [clock(at) for at in range(low, high + 1, int(field.step or 30))]
    return part(field.spec, family) if field.kind == "text" else field.spec


# Schemas ---------------------------------------------------------------------------------------

TYPES: dict[str, Json] = {
    "int": {"type": "integer"},
    "number": {"type": "number"},
    "money": {"type": "number"},
    "bool": {"type": "boolean"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "pattern": r"^([01]\d|2[0-3]):[0-5]\d$"},
    "datetime": {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT([01]\d|2[0-3]):[0-5]\d$"},
}


def value_schema(field: Field) -> Json:
    """The JSON schema of a field's values."""
    out: Json = dict(TYPES.get(field.kind, {"type": "string"}))
    if field.kind == "choice":
        out = one_of_schema(field.spec)
    elif field.kind == "list":
        out = {"type": "array", "items": {"type": "string"}}
        out |= {} if field.entity else {"items": one_of_schema(field.spec)}
    elif field.kind == "object":
        inner = {name: value_schema(f) for name, f in field.spec.items()}
        required = [name for name, f in field.spec.items() if f.default is None and not f.none]
        out = {"type": "object", "properties": inner, "required": required}
        out["additionalProperties"] = False
    elif field.kind in NUMBERS and field.bounds:
        out |= {"minimum": plain(field.bounds[0]), "maximum": plain(field.bounds[1])}
    elif field.kind in NUMBERS and field.spec[0] >= 0:
        out["minimum"] = 1 if field.kind == "int" and field.spec[0] >= 1 else 0
    if field.format:
        out["format"] = field.format
    return out | {"description": sentence(field.about)}


def one_of_schema(values: Sequence[Any]) -> Json:
    names = {int: "integer", str: "string"}
    kinds = {names.get(type(v), "number") for v in values}
    return {"type": kinds.pop() if len(kinds) == 1 else "number", "enum": list(values)}


def plain(number: float) -> float | int:
    """Whole numbers as integers, so that 390 and 390.0 are one value on the wire and in digests."""
    return int(number) if number == int(number) else number


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
