"""Calls made up for a state: arguments around one of its rows, so that conditions are met."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from sharpen.types import Json
from sharpen.world.domain import Tool
from sharpen.world.fields import Family, Field
from sharpen.world.templates import Param

if TYPE_CHECKING:
    from sharpen.world.episode import Episode


class Sampler:
    """Draws arguments of one tool in the present state of an episode."""

    def __init__(self, episode: Episode, tool: Tool, rng: random.Random):
        self.tool, self.rng = tool, rng
        self.family: Family = episode.family
        self.tables = episode.tables
        self.entities = episode.domains[tool.category].entities

    def rows(self, entity: str) -> list[Json]:
        return list(self.tables.rows(self.entities[entity]).values()) if entity else []

    def keys(self, entity: str) -> list[str]:
        return list(self.tables.rows(self.entities[entity]))

    def value(self, field: Field) -> Any:
        draw = self.entities.drawn(field, self.family)
        return draw(self.rng.random, self.rng.sample, self.keys)

    def arguments(self, names: set[str]) -> Json:
        rows = self.rows(self.tool.operation.entity)
        anchor = self.rng.choice(rows) if rows else {}
        wanted = [param for param in self.tool.params.values() if param.name in names]
        return {param.name: self.argument(param, anchor) for param in wanted}

    def argument(self, param: Param, anchor: Json) -> Any:
        operation = self.tool.operation
        if param.many:
            return self.several(param, anchor)
        if param.anchor and anchor.get(param.anchor) not in (None, []):
            return self.near(param.op, anchor[param.anchor])
        own = operation.keyed and param.field.entity == operation.entity
        return anchor[param.name] if own and param.name in anchor else self.value(param.field)

    def near(self, op: str, value: Any) -> Any:
        """A condition's value that a row with `value` meets."""
        if op in ("<=", "<", ">=", ">") and not isinstance(value, str):
            span = abs(value) * 0.25 + (0 if isinstance(value, float) else 1)
            moved = value + (span if op in ("<=", "<") else -span)
            whole = abs(moved) >= 10 or isinstance(value, int)
            return max(0 if value >= 0 else moved, round(moved) if whole else round(moved, 1))
        if op == "contains":
            return max(str(value).split(), key=len).strip(".,;:").lower()
        if op == "on":
            return value[:10]
        return self.rng.choice(value) if op == "has" else value

    def several(self, param: Param, anchor: Json) -> list[Any]:
        low, high = param.many or (1, 1)
        count = self.rng.randint(max(low, 1), min(high, 3))
        first = anchor.get(param.anchor or param.name.removesuffix("s"))
        found = [first] if first is not None else []
        while len(found) < count:
            value = self.value(param.field)
            if value in found and count > low:
                count -= 1
            elif value not in found:
                found.append(value)
        return found

    def misdirect(self, arguments: Json) -> Json:
        """The same arguments with one key that nothing has."""
        for name, owner in self.tool.takes.items():
            if isinstance(arguments.get(name), str):
                entity = self.entities[owner]
                return arguments | {name: self.value(entity.fields[entity.key])}
        return arguments
