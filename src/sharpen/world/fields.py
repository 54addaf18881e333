"""A field: what a value looks like, said once for drawn rows and the JSON schemas of tools."""

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
STRING, NUMBER, CLOCK = {"type": "string"}, {"type": "number"}, r"([01]\d|2[0-3]):[0-5]\d$"
# Each kind: what its details must be, and the schema of its values.
KINDS: dict[str, tuple[str, Json]] = {
    "id": ("a pattern such as BK-####", STRING),
    "choice": ("at least 2 different values", {}),
    "text": ("at least 5 different values, a pool, or a template like '{city} office'", STRING),
    "int": ("[lowest, highest]", {"type": "integer"}),
    "number": ("[lowest, highest]", NUMBER),
    "money": ("[lowest, highest]", NUMBER),
    "date": ("[first, last] in days from today", STRING | {"format": "date"}),
    "datetime": ("[first, last] in days", STRING | {"pattern": rf"^\d{{4}}-\d\d-\d\dT{CLOCK}"}),
    "time": ("[earliest, latest] as HH:MM", STRING | {"pattern": f"^{CLOCK}"}),
    "bool": ("true, or the share of rows that are true", {"type": "boolean"}),
    "ref": ("an entity's name", STRING),
    "list": ("at least 3 different values, or an entity's name", {"type": "array"}),
    "object": ("a mapping of fields", {"type": "object"}),
}
NUMBERS = ("int", "number", "money")
STEPS = {"money": 0.01, "number": 0.1, "time": 30}
LEAST = {"choice": 2, "text": 5, "list": 3}
POOL = re.compile(r"\{(\w+)\}")
QUARTERS = [clock(at) for at in range(7 * 60, 21 * 60, 15)]


class Field(Config):
    """`{kind: details, about: …}`; exactly one of the keys of `KINDS` stands in it."""

    kind: str
    spec: Any
    about: str
    step: float = 1
    bounds: tuple[float, float] | None = None
    none: float = 0.0
    default: Any = None
    calc: Expr | None = None
    free: bool = False
    format: Literal["", "email", "uri"] = ""
    size: tuple[int, int] = (0, 3)

    def __hash__(self) -> int:
        return id(self)

    @model_validator(mode="before")
    @classmethod
    def one_kind(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "kind" in values:
            return values
        kinds = [key for key in values if key in KINDS]
        if len(kinds) != 1:
            found = ", ".join(kinds) or "none"
            raise ValueError(f"a field has exactly one of {', '.join(KINDS)}; found {found}")
        kind, rest = kinds[0], {key: value for key, value in values.items() if key != kinds[0]}
        said = {"step": STEPS.get(kind, 1), "kind": kind, "spec": normal(kind, values[kind])}
        return said | rest

    @property
    def entity(self) -> str:
        """The entity whose keys this field holds, if any."""
        return self.spec if self.kind in ("ref", "list") and isinstance(self.spec, str) else ""

    @cached_property
    def places(self) -> int:
        """Decimals that are kept of a computed value."""
        decimals = len(f"{self.step:.6f}".rstrip("0").split(".")[1])
        return 0 if self.kind == "int" else max(2, decimals)

    def coerce(self, value: Any) -> Any:
        """A computed value as this field stores it."""
        if value is None or self.kind not in NUMBERS:
            return value
        return plain(round(value, self.places))


def normal(kind: str, spec: Any) -> Any:
    """A kind's details as the rest wants them, or what is wrong with them."""
    match kind, spec:
        case "id", str() if spec:
            return spec if "#" in spec else f"{spec}-####"
        case "time", [str(first), str(last)] if first <= last:
            return first, last
        case "int" | "number" | "money" | "date" | "datetime", [int() | float(), int() | float()]:
            if spec[0] <= spec[1]:
                return tuple(spec)
        case "choice" | "text" | "list", list():
            plain = all(isinstance(v, (str, int, float)) and not isinstance(v, bool) for v in spec)
            if plain and LEAST[kind] <= len(spec) == len(set(spec)):
                return tuple(spec)
        case "text", str() if spec:
            return spec if "{" in spec else f"{{{spec}}}"
        case "ref" | "list", str() if spec:
            return spec
        case "bool", True | float():
            return 0.5 if spec is True else spec
        case "object", dict() if spec:
            return {name: Field.model_validate(inner) for name, inner in spec.items()}
    raise ValueError(f"{kind}: expected {KINDS[kind][0]}, found {spec!r}")


@cache
def shared_pools() -> dict[str, tuple[str, ...]]:
    """Names, cities and other things that every domain may speak of."""
    return {k: tuple(v) for k, v in read_yaml(Path(__file__).parent / "pools.yaml").items()}


@lru_cache(maxsize=4096)
def part(values: tuple[str, ...], family: Family) -> tuple[str, ...]:
    """A family's share of a pool."""
    return tuple(v for i, v in enumerate(values) if i % 5 in PARTS[family])


class Drawing:
    """How a family's values are drawn, by the million and so written as Python and compiled.
    `random` and `sample` are a generator's, `keys` gives the keys of an entity."""

    def __init__(self, family: Family, pools: Mapping[str, tuple[str, ...]]):
        self.family: Family = family
        self.pools = pools
        self.names: Json = {"plain": plain}

    def value(self, field: Field) -> Callable[..., Any]:
        """`value(random, sample, keys)` → one value."""
        return eval(f"lambda random, sample, keys: {self.source(field)}", self.names)

    def row(self, fields: Mapping[str, Field]) -> Callable[..., None]:
        """`row(row, scope, random, sample, keys)` fills a row, in the order of the fields."""
        lines = ["def row(row, scope, random, sample, keys):"]
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
        """The Python text that draws one value."""
        spec: Any = field.spec
        match field.kind:
            case "id":
                head, *rest = spec.split("#")
                digits = [DIGITS[self.family], *["0123456789"] * (len(rest) - 1)]
                pairs = zip(map(self.one_of, digits), rest, strict=True)
                return " + ".join([repr(head), *(f"{drawn} + {text!r}" for drawn, text in pairs)])
            case "text" if isinstance(spec, str):
                pieces = [repr(piece) for piece in POOL.split(spec)]  # text, pool, text, …
                for i, name in enumerate(POOL.findall(spec)):
                    if name not in self.pools:
                        raise ValueError(f"no pool {name!r}")
                    pieces[2 * i + 1] = self.one_of(part(self.pools[name], self.family))
                return " + ".join(pieces)
            case "text" | "choice":
                return self.one_of(spec if field.kind == "choice" else part(spec, self.family))
            case "int" | "number" | "money":
                count = int((spec[1] - spec[0]) / field.step + 1e-9) + 1
                value = f"{spec[0]} + {field.step} * int(random() * {count})"
                return f"int({value})" if field.kind == "int" else f"plain(round({value}, 4))"
            case "date" | "datetime":
                days = (timedelta(days=day) for day in range(spec[0], spec[1] + 1))
                drawn = self.one_of([str(TODAY[self.family] + day) for day in days])
                return drawn if field.kind == "date" else f"{drawn} + 'T' + {self.one_of(QUARTERS)}"
            case "time":
                first, last = map(minutes, spec)
                return self.one_of([clock(at) for at in range(first, last + 1, int(field.step))])
            case "bool":
                return f"random() < {spec}"
            case "ref":
                return f"(found := keys({spec!r}))[int(random() * len(found))]"
            case "list":
                low, high = field.size
                values = f"keys({spec!r})" if field.entity else self.constant(spec)
                count = f"{low} + int(random() * {high - low + 1})"
                return f"sorted(sample(found := {values}, min({count}, len(found))))"
        inner = [f"{name!r}: {self.source(f)}" for name, f in spec.items()]
        return f"{{{', '.join(inner)}}}"


def value_schema(field: Field) -> Json:
    """The JSON schema of a field's values."""
    out, spec = dict(KINDS[field.kind][1]), field.spec
    if field.kind == "choice":
        out = one_of_schema(spec)
    elif field.kind == "list":
        out["items"] = STRING if field.entity else one_of_schema(spec)
    elif field.kind == "object":
        out["properties"] = {name: value_schema(f) for name, f in spec.items()}
        out["required"] = [name for name, f in spec.items() if f.default is None and not f.none]
        out["additionalProperties"] = False
    elif field.kind in NUMBERS and field.bounds:
        out |= {"minimum": plain(field.bounds[0]), "maximum": plain(field.bounds[1])}
    elif field.kind in NUMBERS and spec[0] >= 0:
        out["minimum"] = 1 if field.kind == "int" and spec[0] >= 1 else 0
    if field.format:
        out["format"] = field.format
    return out | {"description": sentence(field.about)}


def one_of_schema(values: Sequence[Any]) -> Json:
    kinds = {{int: "integer", str: "string"}.get(type(v), "number") for v in values}
    return {"type": kinds.pop() if len(kinds) == 1 else "number", "enum": list(values)}


def plain(number: float) -> float | int:
    """Whole numbers as integers, so that 390 and 390.0 are one value on the wire and in digests."""
    return int(number) if number == int(number) else number


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
