"""A field of an entity: what its values look like, described once for drawn rows and for the JSON
schemas of tools.

Used by every other file of the world; the data builders take pools and families from here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date, timedelta
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import model_validator

from sharpen.config import Config, read_yaml
from sharpen.types import Json
from sharpen.world.expressions import Expr, format_clock, minutes_of_day

Family = Literal["train", "dev", "test"]
FAMILIES: tuple[Family, ...] = ("train", "dev", "test")
TODAY = {"train": date(2026, 3, 2), "dev": date(2027, 6, 7), "test": date(2028, 9, 4)}
# Of every five values of a pool, three belong to train, one to dev and one to test, and keys begin
# with different digits: the held-out splits use values that were never seen in training.
_POOL_POSITIONS = {"train": (0, 1, 2), "dev": (3,), "test": (4,)}
_FIRST_DIGITS = {"train": "12345", "dev": "67", "test": "89"}


class _Kind(NamedTuple):
    """What the details of a kind of field must be, and the JSON schema of its values."""

    details: str
    schema: Json


_STRING = {"type": "string"}
_NUMBER = {"type": "number"}
_CLOCK_PATTERN = r"([01]\d|2[0-3]):[0-5]\d$"
_DATETIME_PATTERN = rf"^\d{{4}}-\d\d-\d\dT{_CLOCK_PATTERN}"
_KINDS: dict[str, _Kind] = {
    "id": _Kind("a pattern such as BK-####", _STRING),
    "choice": _Kind("at least 2 different values", {}),
    "text": _Kind(
        "at least 5 different values, a pool, or a template like '{city} office'", _STRING
    ),
    "int": _Kind("[lowest, highest]", {"type": "integer"}),
    "number": _Kind("[lowest, highest]", _NUMBER),
    "money": _Kind("[lowest, highest]", _NUMBER),
    "date": _Kind("[first, last] in days from today", _STRING | {"format": "date"}),
    "datetime": _Kind("[first, last] in days", _STRING | {"pattern": _DATETIME_PATTERN}),
    "time": _Kind("[earliest, latest] as HH:MM", _STRING | {"pattern": f"^{_CLOCK_PATTERN}"}),
    "bool": _Kind("true, or the share of rows that are true", {"type": "boolean"}),
    "ref": _Kind("an entity's name", _STRING),
    "list": _Kind("at least 3 different values, or an entity's name", {"type": "array"}),
    "object": _Kind("a mapping of fields", {"type": "object"}),
}
_NUMERIC_KINDS = ("int", "number", "money")
_DEFAULT_STEPS = {"money": 0.01, "number": 0.1, "time": 30}
_MIN_VALUES = {"choice": 2, "text": 5, "list": 3}
_POOL_SLOT = re.compile(r"\{(\w+)\}")
_QUARTER_HOURS = [format_clock(minutes) for minutes in range(7 * 60, 21 * 60, 15)]


# Fields -------------------------------------------------------------------------------------------


class Field(Config):
    """A field: its kind with details, its description, and how its values are made.

    A domain file writes `{money: [49, 890], about: …}`: exactly one key is a kind, its value is
    stored as `spec`. docs/world.md describes the other settings.
    """

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
    def _read_kind(cls, values: Any) -> Any:
        """Turn the one key that is a kind into `kind` and `spec`."""
        if not isinstance(values, dict) or "kind" in values:
            return values
        kinds = [key for key in values if key in _KINDS]
        if len(kinds) != 1:
            found = ", ".join(kinds) or "none"
            raise ValueError(f"a field has exactly one of {', '.join(_KINDS)}; found {found}")
        kind = kinds[0]
        settings: Json = {
            "step": _DEFAULT_STEPS.get(kind, 1),
            "kind": kind,
            "spec": _parse_details(kind, values[kind]),
        }
        for key, value in values.items():
            if key != kind:
                settings[key] = value
        return settings

    @property
    def entity(self) -> str:
        """The entity whose keys this field holds, or empty."""
        if self.kind in ("ref", "list") and isinstance(self.spec, str):
            return self.spec
        return ""

    @cached_property
    def _decimals(self) -> int:
        """How many decimals of a computed value are kept."""
        if self.kind == "int":
            return 0
        step_decimals = f"{self.step:.6f}".rstrip("0").split(".")[1]
        return max(2, len(step_decimals))

    def coerce(self, value: Any) -> Any:
        """Returns a computed value as this field stores it."""
        if value is None or self.kind not in _NUMERIC_KINDS:
            return value
        return plain(round(value, self._decimals))


def _parse_details(kind: str, details: Any) -> Any:
    """Returns the details of a kind as `Field.spec` holds them; raises if they are wrong."""
    match kind, details:
        case "id", str() if details:
            return details if "#" in details else f"{details}-####"
        case "time", [str(first), str(last)] if first <= last:
            return first, last
        case "int" | "number" | "money" | "date" | "datetime", [int() | float(), int() | float()]:
            if details[0] <= details[1]:
                return tuple(details)
        case "choice" | "text" | "list", list():
            is_distinct = all(map(_is_pool_value, details)) and len(details) == len(set(details))
            if is_distinct and len(details) >= _MIN_VALUES[kind]:
                return tuple(details)
        case "text", str() if details:
            return details if "{" in details else f"{{{details}}}"  # a bare word is a pool
        case "ref" | "list", str() if details:
            return details
        case "bool", True | float():
            return 0.5 if details is True else details
        case "object", dict() if details:
            return {name: Field.model_validate(inner) for name, inner in details.items()}
    raise ValueError(f"{kind}: expected {_KINDS[kind].details}, found {details!r}")


def _is_pool_value(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


@cache
def shared_pools() -> dict[str, tuple[str, ...]]:
    """Returns the pools that every domain may use: names, cities and so on."""
    pools = read_yaml(Path(__file__).parent / "pools.yaml")
    return {name: tuple(values) for name, values in pools.items()}


@lru_cache(maxsize=4096)
def family_share(values: tuple[str, ...], family: Family) -> tuple[str, ...]:
    """Returns the family's share of a pool."""
    positions = _POOL_POSITIONS[family]
    return tuple(value for i, value in enumerate(values) if i % 5 in positions)


# Drawing values -----------------------------------------------------------------------------------


class Drawing:
    """Compiles functions that draw the values of one family.

    Rows are drawn by the million, so drawing is written as Python source and compiled once per
    field or entity. In that source, `random` and `sample` are methods of a `random.Random`, `keys`
    returns the keys of an entity, and `c1`, `c2`, … are constants.
    """

    def __init__(self, family: Family, pools: Mapping[str, tuple[str, ...]]):
        self.family: Family = family
        self.pools = pools
        self._globals: Json = {"plain": plain}

    def compile_value(self, field: Field) -> Callable[..., Any]:
        """Returns `draw(random, sample, keys)`, which draws one value."""
        return eval(f"lambda random, sample, keys: {self._source(field)}", self._globals)

    def compile_row(self, fields: Mapping[str, Field]) -> Callable[..., None]:
        """Returns `fill(row, scope, random, sample, keys)`, which fills a row in field order.

        `scope(row)` gives the names that the expression of a calculated field may read.
        """
        lines = ["def fill(row, scope, random, sample, keys):"]
        for name, field in fields.items():
            source = self._source(field)
            if field.calc is not None:
                reads_row_only = not field.calc.attributes and field.calc.names <= set(fields)
                scope_source = "row" if reads_row_only else "scope(row)"
                coerce = self._constant(field.coerce)
                calculate = self._constant(field.calc)
                source = f"{coerce}({calculate}({scope_source}))"
            if field.none:
                source = f"None if random() < {field.none} else {source}"
            lines.append(f"    row[{name!r}] = {source}")
        lines.append("    return None")
        exec("\n".join(lines), self._globals)
        return self._globals["fill"]

    def _constant(self, value: Any) -> str:
        """Make a value available to the compiled source and return its name there."""
        name = f"c{len(self._globals)}"
        self._globals[name] = value
        return name

    def _pick_from(self, values: Sequence[Any]) -> str:
        """Returns source that picks one of the values."""
        return f"{self._constant(values)}[int(random() * {len(values)})]"

    def _source(self, field: Field) -> str:
        """Returns the Python source that draws one value of a field."""
        spec: Any = field.spec
        match field.kind:
            case "id":
                return self._id_source(spec)
            case "text" if isinstance(spec, str):
                return self._template_source(spec)
            case "text":
                return self._pick_from(family_share(spec, self.family))
            case "choice":
                return self._pick_from(spec)
            case "int" | "number" | "money":
                lowest, highest = spec
                count = int((highest - lowest) / field.step + 1e-9) + 1
                value = f"{lowest} + {field.step} * int(random() * {count})"
                return f"int({value})" if field.kind == "int" else f"plain(round({value}, 4))"
            case "date" | "datetime":
                today = TODAY[self.family]
                first, last = spec
                days = [str(today + timedelta(days=day)) for day in range(first, last + 1)]
                source = self._pick_from(days)
                if field.kind == "datetime":
                    source += f" + 'T' + {self._pick_from(_QUARTER_HOURS)}"
                return source
            case "time":
                first = minutes_of_day(spec[0])
                last = minutes_of_day(spec[1])
                times = [format_clock(at) for at in range(first, last + 1, int(field.step))]
                return self._pick_from(times)
            case "bool":
                return f"random() < {spec}"
            case "ref":
                return f"(options := keys({spec!r}))[int(random() * len(options))]"
            case "list":
                low, high = field.size
                options = f"keys({spec!r})" if field.entity else self._constant(spec)
                count = f"{low} + int(random() * {high - low + 1})"
                return f"sorted(sample(options := {options}, min({count}, len(options))))"
        # An object: a field of fields.
        items = [f"{name!r}: {self._source(inner)}" for name, inner in spec.items()]
        return f"{{{', '.join(items)}}}"

    def _id_source(self, pattern: str) -> str:
        """Returns source for a key such as `BK-4711`; its first digit belongs to the family."""
        head, *rest = pattern.split("#")
        pieces = [repr(head)]
        for position, text in enumerate(rest):
            digits = _FIRST_DIGITS[self.family] if position == 0 else "0123456789"
            pieces.append(f"{self._pick_from(digits)} + {text!r}")
        return " + ".join(pieces)

    def _template_source(self, template: str) -> str:
        """Returns source for a text such as `{city} office`, with one pick for each pool."""
        pieces = []
        # Split with a group gives text, pool, text, …, text.
        for position, piece in enumerate(_POOL_SLOT.split(template)):
            is_pool = position % 2 == 1
            if not is_pool:
                pieces.append(repr(piece))
            elif piece in self.pools:
                pieces.append(self._pick_from(family_share(self.pools[piece], self.family)))
            else:
                raise ValueError(f"no pool {piece!r}")
        return " + ".join(pieces)


# Schemas ------------------------------------------------------------------------------------------


def value_schema(field: Field) -> Json:
    """Returns the JSON schema of a field's values."""
    schema = dict(_KINDS[field.kind].schema)
    spec = field.spec
    if field.kind == "choice":
        schema = _enum_schema(spec)
    elif field.kind == "list":
        schema["items"] = _STRING if field.entity else _enum_schema(spec)
    elif field.kind == "object":
        schema["properties"] = {name: value_schema(inner) for name, inner in spec.items()}
        required = [n for n, inner in spec.items() if inner.default is None and not inner.none]
        schema["required"] = required
        schema["additionalProperties"] = False
    elif field.kind in _NUMERIC_KINDS and field.bounds:
        schema["minimum"] = plain(field.bounds[0])
        schema["maximum"] = plain(field.bounds[1])
    elif field.kind in _NUMERIC_KINDS and spec[0] >= 0:
        is_count_from_one = field.kind == "int" and spec[0] >= 1
        schema["minimum"] = 1 if is_count_from_one else 0
    if field.format:
        schema["format"] = field.format
    schema["description"] = capitalize(field.about)
    return schema


def _enum_schema(values: Sequence[Any]) -> Json:
    type_names = {int: "integer", str: "string"}
    types = {type_names.get(type(value), "number") for value in values}
    return {"type": types.pop() if len(types) == 1 else "number", "enum": list(values)}


def plain(number: float) -> float | int:
    """Returns whole numbers as integers, so that 390 and 390.0 are one value in digests."""
    return int(number) if number == int(number) else number


def capitalize(text: str) -> str:
    """Returns a text with a capital first letter."""
    return text[:1].upper() + text[1:]
