"""A field: what a value looks like, said once. Rows are drawn from it and the JSON schemas of
parameters and outputs are derived from it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cache, lru_cache
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
STEPS = {"money": 0.01, "number": 0.1}
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
    def decimals(self) -> int:
        step = self.step or STEPS.get(self.kind, 1)
        return len(f"{step:.6f}".rstrip("0").split(".")[1])

    def coerce(self, value: Any) -> Any:
        """A computed value as this field stores it."""
        if value is None or isinstance(value, (str, bool, list, dict)):
            return value
        if self.kind == "int":
            return round(value)
        places = max(2, self.decimals)
        return plain(round(value, places)) if self.kind in ("money", "number") else value


def normal(kind: str, spec: Any) -> Any:
    """A kind's details as the generators want them, or what is wrong with them."""
    problem = ValueError(f"{kind}: expected {KINDS[kind]}, found {spec!r}")
    if kind == "id" and isinstance(spec, str) and spec:
        return spec if "#" in spec else f"{spec}-####"
    if kind in ("int", "number", "money", "date", "datetime", "time"):
        good = isinstance(spec, list) and len(spec) == 2 and spec[0] <= spec[1]
        if not good or (kind == "time") != isinstance(spec[0], str):
            raise problem
        return tuple(spec)
    if kind in ("choice", "text", "list") and isinstance(spec, list):
        plain = all(isinstance(v, (str, int, float)) and not isinstance(v, bool) for v in spec)
        least = {"choice": 2, "text": 5, "list": 3}[kind]
        if not plain or len(spec) < least or len(set(spec)) < len(spec):
            raise ValueError(f"{kind}: at least {least} different values are needed: {spec!r}")
        return tuple(spec)
    if kind in ("text", "ref", "list") and isinstance(spec, str) and spec:
        return f"{{{spec}}}" if kind == "text" and "{" not in spec else spec
    if kind == "bool" and (spec is True or isinstance(spec, float)):
        return 0.5 if spec is True else spec
    if kind == "object" and isinstance(spec, dict) and spec:
        return {name: Field.model_validate(inner) for name, inner in spec.items()}
    raise problem


@cache
def shared_pools() -> dict[str, tuple[str, ...]]:
    """Names, cities and other things that every domain may speak of."""
    return {k: tuple(v) for k, v in read_yaml(Path(__file__).parent / "pools.yaml").items()}


@lru_cache(maxsize=4096)
def part(values: tuple[str, ...], family: Family) -> tuple[str, ...]:
    """A family's share of a pool."""
    return tuple(v for i, v in enumerate(values) if i % 5 in PARTS[family])


@dataclass(slots=True)
class Draw:
    """Where values come from: a seeded generator, a family, and the keys of other entities."""

    rng: random.Random
    family: Family
    pools: Mapping[str, tuple[str, ...]]
    keys: Callable[[str], Sequence[str]]

    def value(self, field: Field) -> Any:
        return GENERATORS[field.kind](self, field)

    def one(self, values: Sequence[Any]) -> Any:
        """`rng.choice`, three times as fast."""
        return values[int(self.rng.random() * len(values))]

    def between(self, low: int, high: int) -> int:
        return low + int(self.rng.random() * (high - low + 1))

    def id(self, field: Field) -> str:
        first, *rest = re.split("(#)", field.spec)  # the first digit tells the family
        digits, out = DIGITS[self.family], [first]
        for piece in rest:
            out.append(self.one(digits) if piece == "#" else piece)
            digits = "0123456789" if piece == "#" else digits
        return "".join(out)

    def text(self, field: Field) -> str:
        if isinstance(field.spec, tuple):
            return self.one(part(field.spec, self.family))
        pieces = POOL.split(field.spec)  # text, pool, text, pool, … text
        for i in range(1, len(pieces), 2):
            pieces[i] = self.one(part(self.pools[pieces[i]], self.family))
        return "".join(pieces)

    def number(self, field: Field) -> float | int:
        low, high = field.spec
        step = field.step or STEPS.get(field.kind, 1)
        value = low + step * self.between(0, int((high - low) / step + 1e-9))
        return int(value) if field.kind == "int" else plain(round(value, 4))

    def date(self, field: Field) -> str:
        return str(TODAY[self.family] + timedelta(days=self.between(*field.spec)))

    def time(self, field: Field) -> str:
        low, high, step = minutes(field.spec[0]), minutes(field.spec[1]), int(field.step or 30)
        return clock(low + step * self.between(0, (high - low) // step))

    def datetime(self, field: Field) -> str:
        return f"{self.date(field)}T{clock(7 * 60 + 15 * self.between(0, 55))}"

    def several(self, field: Field) -> list[Any]:
        values = self.keys(field.spec) if isinstance(field.spec, str) else field.spec
        count = min(self.between(*field.size), len(values))
        return sorted(self.rng.sample(values, count))


GENERATORS: dict[str, Callable[[Draw, Field], Any]] = {
    "id": Draw.id,
    "choice": lambda draw, field: draw.one(field.spec),
    "text": Draw.text,
    "int": Draw.number,
    "number": Draw.number,
    "money": Draw.number,
    "date": Draw.date,
    "datetime": Draw.datetime,
    "time": Draw.time,
    "bool": lambda draw, field: draw.rng.random() < field.spec,
    "ref": lambda draw, field: draw.one(draw.keys(field.spec)),
    "list": Draw.several,
    "object": lambda draw, field: {name: draw.value(f) for name, f in field.spec.items()},
}
TYPES: dict[str, Json] = {
    "int": {"type": "integer"},
    "number": {"type": "number"},
    "money": {"type": "number"},
    "bool": {"type": "boolean"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "pattern": r"^([01]\d|2[0-3]):[0-5]\d$"},
    "datetime": {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT([01]\d|2[0-3]):[0-5]\d$"},
}


def value_schema(field: Field, described: bool = True) -> Json:
    """The JSON schema of a field's values."""
    out: Json = dict(TYPES.get(field.kind, {"type": "string"}))
    if field.kind == "choice":
        out["type"] = json_type(field.spec)
        out["enum"] = list(field.spec)
    elif field.kind == "list":
        item: Json = {"type": "string"}
        if isinstance(field.spec, tuple):
            item = {"type": json_type(field.spec), "enum": list(field.spec)}
        out = {"type": "array", "items": item}
    elif field.kind == "object":
        inner = {name: value_schema(f, described) for name, f in field.spec.items()}
        required = [name for name, f in field.spec.items() if f.default is None and not f.none]
        out = {"type": "object", "properties": inner, "required": required}
        out["additionalProperties"] = False
    elif field.kind in ("int", "number", "money"):
        if field.bounds:
            out |= {"minimum": plain(field.bounds[0]), "maximum": plain(field.bounds[1])}
        elif field.spec[0] >= 0:
            out["minimum"] = 1 if field.kind == "int" and field.spec[0] >= 1 else 0
    if field.format:
        out["format"] = field.format
    if described and field.about:
        out["description"] = sentence(field.about)
    return out


def json_type(values: Sequence[Any]) -> str:
    if all(isinstance(v, int) for v in values):
        return "integer"
    return "string" if all(isinstance(v, str) for v in values) else "number"


def plain(number: float) -> float | int:
    """Whole numbers as integers, so that 390 and 390.0 are one value on the wire and in digests."""
    return int(number) if number == int(number) else number


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
