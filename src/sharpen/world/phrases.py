"""The phrases of a domain file: filling `{slot}`s, and how values are spoken in them.

Called by the data builders, tool cards and gold trajectories.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sharpen.types import SharpenError
from sharpen.world.domain import Tool

SLOT = re.compile(r"\{([\w.*]+)\}")
_QUESTION_WORDS = ("what", "when", "where", "whether", "which", "who", "how", "why")


def slots(template: str) -> list[str]:
    """Returns the names that a phrase needs, without what follows their first dot."""
    return [path.split(".")[0] for path in SLOT.findall(template)]


def fill(template: str, *sources: Mapping[str, Any]) -> str:
    """Fill each slot of a phrase from the first source that has its name.

    `{rows.0.fare}` goes into lists and objects, `{rows.*.fare}` lists the fares of all rows.
    """

    def fill_slot(match: re.Match[str]) -> str:
        root, *steps = match[1].split(".")
        try:
            value = next(source[root] for source in sources if root in source)
            for step in steps:
                value = follow_step(value, step)
        except (StopIteration, LookupError, TypeError):
            raise SharpenError(f"nothing for {{{match[1]}}} in {template!r}") from None
        return speak_value(value)

    return SLOT.sub(fill_slot, template)


def follow_step(value: Any, step: str) -> Any:
    """Go one step into a value: a key of an object, an index or `*` of a list.

    A key after `*` gives that key of every item.
    """
    if not isinstance(value, list):
        return value[step]
    if step == "*":
        return value
    if step.isdigit():
        return value[int(step)]
    return [item[step] for item in value]


def speak_value(value: Any) -> str:
    """Returns a value as people write it: `a, b and c`, 390 for 390.0, no underscores."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        *first, last = [speak_value(item) for item in value] or ["none"]
        return f"{', '.join(first)} and {last}" if first else last
    if isinstance(value, dict):
        pairs = [f"{key.replace('_', ' ')} {speak_value(inner)}" for key, inner in value.items()]
        return ", ".join(pairs)
    if isinstance(value, float) and value == int(value):
        return str(int(value))
    return str(value).removesuffix("_id").replace("_", " ")


def missing_question(tool: Tool, parameter: str) -> str:
    """Returns what the assistant asks when a request leaves this parameter out."""
    param = tool.params[parameter]
    about = param.field.about
    if about.split()[0] in _QUESTION_WORDS:
        return f"Could you tell me {about}?"
    of_each = " of each" if param.many else ""
    return f"What is the {about}{of_each}?"
