"""Phrases of a domain file: `{slot}`s and how values are spoken in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sharpen.types import SharpenError
from sharpen.world.domain import Tool

SLOT = re.compile(r"\{([\w.*]+)\}")


def slots(template: str) -> list[str]:
    """The names a phrase needs, without what follows their first dot."""
    return [name.split(".")[0] for name in SLOT.findall(template)]


def fill(template: str, *sources: Mapping[str, Any]) -> str:
    """A phrase with its slots filled from the first source that has them. `{rows.0.fare}` goes into
    lists and objects, `{rows.*.fare}` speaks of all of them."""

    def value(match: re.Match[str]) -> str:
        root, *path = match[1].split(".")
        try:
            found = next(s[root] for s in sources if root in s)
            for step in path:
                found = go(found, step)
        except (StopIteration, LookupError, TypeError):
            raise SharpenError(f"nothing for {{{match[1]}}} in {template!r}") from None
        return spoken(found)

    return SLOT.sub(value, template)


def go(value: Any, step: str) -> Any:
    if not isinstance(value, list):
        return value[step]
    if step == "*":
        return value
    return value[int(step)] if step.isdigit() else [v[step] for v in value]


def spoken(value: Any) -> str:
    """A value as people write it: `a, b and c`, 390 for 390.0, no underscores."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        *first, last = [spoken(v) for v in value] or ["none"]
        return f"{', '.join(first)} and {last}" if first else last
    if isinstance(value, dict):
        return ", ".join(f"{k.replace('_', ' ')} {spoken(v)}" for k, v in value.items())
    if isinstance(value, float) and value == int(value):
        return str(int(value))
    return str(value).removesuffix("_id").replace("_", " ")


def missing_question(tool: Tool, parameter: str) -> str:
    """What the assistant asks when a request leaves this parameter out."""
    param = tool.params[parameter]
    about = param.field.about
    if about.split()[0] in ("what", "when", "where", "whether", "which", "who", "how", "why"):
        return f"Could you tell me {about}?"
    return f"What is the {about}{' of each' if param.many else ''}?"
