"""Draw arguments that a tool's JSON schema allows. `user_tools.py` makes its calls with them."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

from sharpen.data.generate.sets import frames
from sharpen.types import Json, ToolCall, ToolSpec
from sharpen.world.fields import TODAY, Family, family_share, shared_pools

_OPTIONAL_SHARE = 0.3  # of the optional parameters are set
_MAX_ITEMS = 3
_RANGE = 20  # of a number without a maximum
_DAYS_AHEAD = 60


def draw_call(spec: ToolSpec, split: Family, rng: random.Random) -> ToolCall:
    """Draw a call with the required parameters and sometimes an optional one."""
    required = spec.parameters.get("required", [])
    arguments = {}
    for name, schema in spec.parameters.get("properties", {}).items():
        if name in required or rng.random() < _OPTIONAL_SHARE:
            arguments[name] = draw_value(name, schema, split, rng)
    return ToolCall(spec.name, arguments, "call_1")


def draw_value(name: str, schema: Json, split: Family, rng: random.Random) -> Any:
    """Draw a value that the schema allows, from its own examples if it has any."""
    schema = _first_option(schema)
    listed = _listed_values(schema)
    if listed:
        return rng.choice(listed)
    kind = _first_type(schema)
    if kind == "boolean":
        return rng.random() < 0.5
    if kind in ("integer", "number"):
        return _draw_number(schema, kind, rng)
    if kind == "array":
        least = max(1, schema.get("minItems", 1))
        most = min(_MAX_ITEMS, schema.get("maxItems", _MAX_ITEMS))
        count = rng.randint(least, most)
        items = schema.get("items", {})
        return [draw_value(name, items, split, rng) for _ in range(count)]
    if kind == "object":
        values = {}
        for key, inner_schema in schema.get("properties", {}).items():
            values[key] = draw_value(key, inner_schema, split, rng)
        return values
    return _draw_text(name.lower(), schema.get("format", ""), split, rng)


def _first_option(schema: Json) -> Json:
    """Returns the first option of a union that is not null; any other schema as it is."""
    options = schema.get("anyOf") or schema.get("oneOf")
    if not options:
        return schema
    for option in options:
        if option.get("type") != "null":
            return option
    return options[0]


def _listed_values(schema: Json) -> list[Any]:
    """Returns the values that the schema itself names."""
    listed = schema.get("enum") or schema.get("examples")
    if listed:
        return listed
    return [schema[key] for key in ("const", "example") if key in schema]


def _first_type(schema: Json) -> str:
    """Returns the schema's type, or the first of several that is not null."""
    kind = schema.get("type", "string")
    if not isinstance(kind, list):
        return kind
    for option in kind:
        if option != "null":
            return option
    return "null"


def _draw_number(schema: Json, kind: str, rng: random.Random) -> float:
    """Draw an integer or a number between the schema's bounds."""
    low = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
    high = schema.get("maximum", max(low + _RANGE, low * 2))
    if kind == "integer":
        return rng.randint(round(low), round(high))
    return round(rng.uniform(low, high), 2)


def _draw_text(name: str, text_format: str, split: Family, rng: random.Random) -> str:
    """Draw a text that fits the format or the name. Splits have different values."""
    if text_format in ("date", "date-time"):
        day = TODAY[split] + timedelta(days=rng.randrange(_DAYS_AHEAD))
        return f"{day}T09:00:00Z" if text_format == "date-time" else str(day)
    if name.endswith("id"):
        return f"{name[:2].upper()}-{rng.randrange(1000, 9999)}"
    pool_name = _find_pool(name, text_format)
    if pool_name:
        return rng.choice(family_share(shared_pools()[pool_name], split))
    return rng.choice(frames(split)["own_words"])


def _find_pool(name: str, text_format: str) -> str:
    """Returns the shared pool of values that the parameter is called after; empty if none."""
    words = (text_format, *name.split("_"))
    for pool_name in shared_pools():
        if pool_name in words:
            return pool_name
    return "person" if name.endswith("name") else ""
