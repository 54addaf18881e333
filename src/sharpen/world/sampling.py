"""Draws arguments of a tool that fit the present state. Called by `Episode.sample`, and by the
check of domain files.
"""

from __future__ import annotations

import random
from collections.abc import Container
from typing import TYPE_CHECKING, Any

from sharpen.types import Json
from sharpen.world.domain import Tool
from sharpen.world.fields import Family, Field
from sharpen.world.signatures import Param

if TYPE_CHECKING:
    from sharpen.world.episode import Episode

_MAX_ITEMS = 3  # of a list argument


class Sampler:
    """Draws arguments of one tool around a random row, so that conditions are met by that row."""

    def __init__(self, episode: Episode, tool: Tool, rng: random.Random):
        self.tool = tool
        self._rng = rng
        self._tables = episode.tables
        self._family: Family = episode.family
        self._entities = episode.domains[tool.category].entities

    def arguments(self, names: Container[str], misdirected: bool = False) -> Json:
        """Draw values for these parameters; with `misdirected`, the first key has no row."""
        home = self.tool.operation.entity
        anchor_row: Json = {}
        if home:
            rows = list(self._tables.rows(self._entities[home]).values())
            if rows:
                anchor_row = self._rng.choice(rows)
        arguments: Json = {}
        for param in self.tool.params.values():
            if param.name in names:
                arguments[param.name] = self._draw_argument(param, anchor_row)
        if misdirected:
            self._replace_first_key(arguments)
        return arguments

    def _replace_first_key(self, arguments: Json) -> None:
        for name, entity_name in self.tool.takes.items():
            if isinstance(arguments.get(name), str):
                entity = self._entities[entity_name]
                arguments[name] = self._draw_value(entity.fields[entity.key])
                return

    def _draw_argument(self, param: Param, anchor_row: Json) -> Any:
        if param.many:
            return self._draw_list(param, param.many, anchor_row)
        if param.anchor:
            anchor_value = anchor_row.get(param.anchor)
            if anchor_value not in (None, []):
                return self._draw_matching(param.op, anchor_value)
        operation = self.tool.operation
        is_own_key = operation.keyed and param.field.entity == operation.entity
        if is_own_key and param.name in anchor_row:
            return anchor_row[param.name]
        return self._draw_value(param.field)

    def _draw_value(self, field: Field) -> Any:
        draw = self._entities.get_drawer(field, self._family)
        return draw(self._rng.random, self._rng.sample, self._keys)

    def _keys(self, entity: str) -> list[str]:
        return list(self._tables.rows(self._entities[entity]))

    def _draw_matching(self, op: str, value: Any) -> Any:
        """Returns the other side of a condition, so that a row with `value` meets it."""
        if op in ("<=", "<", ">=", ">") and not isinstance(value, str):
            return _limit_beyond(op, value)
        if op == "contains":
            longest_word = max(str(value).split(), key=len)
            return longest_word.strip(".,;:").lower()
        if op == "has":
            return self._rng.choice(value)
        return value

    def _draw_list(self, param: Param, many: tuple[int, int], anchor_row: Json) -> list[Any]:
        """Draw different values, the first from the anchor row if it has one."""
        least, most = many
        count = self._rng.randint(max(least, 1), min(most, _MAX_ITEMS))
        items: list[Any] = []
        first = anchor_row.get(param.anchor or param.name.removesuffix("s"))
        if first is not None:
            items.append(first)
        while len(items) < count:
            value = self._draw_value(param.field)
            if value not in items:
                items.append(value)
            elif count > least:
                count -= 1  # there may be too few different values
        return items


def _limit_beyond(op: str, value: float) -> float:
    """Returns a limit about a quarter beyond a number, short enough to be spoken."""
    distance = abs(value) * 0.25
    if not isinstance(value, float):
        distance += 1
    limit = value + distance if op in ("<=", "<") else value - distance
    is_whole = abs(limit) >= 10 or isinstance(value, int)
    spoken = round(limit) if is_whole else round(limit, 1)
    return max(0 if value >= 0 else limit, spoken)
