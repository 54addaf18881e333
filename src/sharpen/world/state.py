"""Entities, their seeded rows, and the state of an episode over them.

The rows at the start of an episode depend on category, family and seed alone. They are drawn once,
shared by all episodes and never changed; an episode keeps only what it changed. Used by the
operations and by episodes; `seeded` is the random generator of all data builders.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import cache, lru_cache, partial
from typing import Any

from sharpen.config import Config
from sharpen.types import Json, SharpenError
from sharpen.world.expressions import ToolFailure
from sharpen.world.fields import TODAY, Drawing, Family, Field, shared_pools

# Entities -----------------------------------------------------------------------------------------


class Entity(Config):
    """One kind of thing that a category keeps, such as a flight. Its first field is its key.

    `name`, `table` and `key` are filled in by `Entities`.
    """

    fields: dict[str, Field]
    rows: int = 10
    noun: str = ""
    plural: str = ""
    name: str = ""
    table: str = ""
    key: str = ""

    def __hash__(self) -> int:
        return id(self)

    def show(self, row: Json, names: Iterable[str]) -> Json:
        """Returns a copy of some fields of a row, or of all, which a caller may change."""
        return {name: deepcopy(row[name]) for name in names or self.fields}

    def public(self, row: Json, base: Json | None) -> Json:
        """Returns a row as end states compare it.

        Fields with free wording only say whether they hold something other than in `base`.
        """
        base = base or {}
        public = dict(row)
        for name, value in row.items():
            if self.fields[name].free:
                public[name] = value is not None and value != base.get(name)
        return public

    def reference(self) -> Field:
        """Returns the field in which other rows and parameters hold this entity's key."""
        return Field(kind="ref", spec=self.name, about=self.fields[self.key].about)

    def select(self, names: Iterable[str]) -> dict[str, Field]:
        """Returns these fields, or all of them; an unknown name raises a ValueError."""
        selected: dict[str, Field] = {}
        for name in list(names) or list(self.fields):
            if name not in self.fields:
                raise ValueError(f"{self.name} has no field {name!r}")
            selected[name] = self.reference() if name == self.key else self.fields[name]
        return selected


class Entities:
    """The entities of a category by name, with the pools that their rows are drawn from."""

    def __init__(self, category: str, entities: dict[str, Entity], pools: Mapping[str, Any]):
        self.category = category
        self.entities: dict[str, Entity] = {}
        self.pools = shared_pools() | {name: tuple(values) for name, values in pools.items()}
        # Compiles the function that draws a field's values or an entity's rows, once per family.
        self.get_drawer = cache(self._compile_drawer)
        # Entity → names of the fields that hold its keys, in its own rows or in others.
        self.holders: dict[str, list[str]] = {}
        for name, entity in entities.items():
            key = next(iter(entity.fields), "")
            derived = {
                "name": name,
                "table": f"{category}.{name}",
                "noun": entity.noun or name.replace("_", " "),
                "plural": entity.plural or f"{name}s",
                "key": key,
            }
            self.entities[name] = entity.model_copy(update=derived)
            self.holders[name] = [key]
        for entity in self.entities.values():
            for name, field in entity.fields.items():
                # A reference to an unknown entity is reported when the domain file is checked.
                if field.kind == "ref" and name not in self.holders.get(field.spec, [name]):
                    self.holders[field.spec].append(name)

    def __getitem__(self, name: str) -> Entity:
        if name not in self.entities:
            raise SharpenError(f"no entity {name!r}")
        return self.entities[name]

    def reference(self, child: str, parent: str) -> str:
        """Returns the name of the field by which rows of `child` refer to `parent`."""
        for name, field in self[child].fields.items():
            if field.kind == "ref" and field.spec == parent:
                return name
        raise SharpenError(f"{child} has no reference to {parent}")

    def _compile_drawer(self, owner: Field | Entity, family: Family) -> Callable[..., Any]:
        drawing = Drawing(family, self.pools)
        if isinstance(owner, Field):
            return drawing.compile_value(owner)
        fields = {name: field for name, field in owner.fields.items() if name != owner.key}
        return drawing.compile_row(fields)


class Scope(dict[str, Any]):
    """The names that an expression sees. Rows that they refer to are looked up on demand.

    With `flight_id` in scope, `flight` is the row of that flight.
    """

    def __init__(self, entities: Entities, find: Callable[[str, str], Json], names: Json):
        super().__init__(names)
        self._entities = entities
        self._find = find

    def __missing__(self, name: str) -> Json:
        for holder in self._entities.holders.get(name, ()):
            if isinstance(self.get(holder), str):
                self[name] = self._find(name, self[holder])
                return self[name]
        raise KeyError(name)


# Rows at the start --------------------------------------------------------------------------------


def seeded_rng(*parts: object) -> random.Random:
    """Returns a random generator whose seed is the text of all parts."""
    return random.Random("|".join(map(str, parts)))


@lru_cache(maxsize=8192)
def _base_keys(entities: Entities, family: Family, seed: int, name: str) -> tuple[str, ...]:
    entity = entities[name]
    rng = seeded_rng(entity.table, family, seed, "keys")
    draw_key = entities.get_drawer(entity.fields[entity.key], family)
    keys: dict[str, None] = {}  # a set that keeps its order
    while len(keys) < entity.rows:
        keys[draw_key(rng.random, rng.sample, None)] = None
    return tuple(keys)


@lru_cache(maxsize=4096)
def base_rows(entities: Entities, family: Family, seed: int, name: str) -> dict[str, Json]:
    """Returns an entity's rows at the start of an episode. They are shared: never change them."""
    entity = entities[name]
    today = {"today": str(TODAY[family])}
    rng = seeded_rng(entity.table, family, seed)
    get_keys = partial(_base_keys, entities, family, seed)

    def find(other: str, key: str) -> Json:
        return base_rows(entities, family, seed, other)[key]

    def make_scope(row: Json) -> Scope:
        return Scope(entities, find, row | today)

    fill_row = entities.get_drawer(entity, family)
    rows: dict[str, Json] = {}
    for key in get_keys(name):
        row: Json = {entity.key: key}
        fill_row(row, make_scope, rng.random, rng.sample, get_keys)
        rows[key] = row
    return rows


# Rows of an episode -------------------------------------------------------------------------------


class Tables:
    """The rows of one episode: the shared base rows, and the edits over them.

    `edits` maps table → key → row, or None where the row was removed.
    """

    def __init__(self, base: Callable[[Entity], dict[str, Json]]):
        self.base = base
        self.edits: dict[str, dict[str, Json | None]] = {}

    def rows(self, entity: Entity) -> Mapping[str, Json]:
        edits = self.edits.get(entity.table)
        if not edits:
            return self.base(entity)
        merged = {**self.base(entity), **edits}
        return {key: row for key, row in merged.items() if row is not None}

    def get(self, entity: Entity, key: Any) -> Json | None:
        """Returns a row, or None."""
        edits = self.edits.get(entity.table)
        if edits and key in edits:
            return edits[key]
        return self.base(entity).get(key)

    def find(self, entity: Entity, key: Any) -> Json:
        """Returns a row; an unknown key is a `not_found` failure."""
        row = self.get(entity, key)
        if row is None:
            raise ToolFailure("not_found", f"no {entity.noun} {key!r}")
        return row

    def put(self, entity: Entity, key: str, row: Json | None) -> None:
        """Write a row, or remove it with None."""
        self.edits.setdefault(entity.table, {})[key] = row

    def new_key(self, entity: Entity, row: Json) -> str:
        """Returns a free key for a new row, one digit longer than the seeded keys.

        It is a hash of the row's public fields, so that episodes which did the same things in
        another order end in the same state.
        """
        text = json.dumps(entity.public(row, {}), sort_keys=True, ensure_ascii=False)
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
        head, *rest = entity.fields[entity.key].spec.split("#")
        smallest = 10 ** len(rest)
        while True:
            digits = str(smallest + number % (9 * smallest))
            key = head + digits[0]
            for digit, text_after in zip(digits[1:], rest, strict=True):
                key += digit + text_after
            if self.get(entity, key) is None:
                return key
            number += 1  # an equal row exists already: making it again gives a second row


def diff(actual: Json, expected: Json) -> list[str]:
    """Compare two `Episode.changes()` and return one readable line per difference."""
    places = {(table, key) for table in actual for key in actual[table]}
    places |= {(table, key) for table in expected for key in expected[table]}
    lines: list[str] = []
    for table, key in sorted(places):
        actual_rows = actual.get(table, {})
        expected_rows = expected.get(table, {})
        if key not in expected_rows:
            lines.append(f"{table} {key}: should not have changed")
        elif key not in actual_rows:
            lines.append(f"{table} {key}: not changed")
        else:
            lines += _diff_rows(f"{table} {key}", actual_rows[key], expected_rows[key])
    return lines


def _diff_rows(where: str, actual: Json | None, expected: Json | None) -> list[str]:
    if actual is None and expected is None:
        return []
    if actual is None:
        return [f"{where}: removed"]
    if expected is None:
        return [f"{where}: not removed"]
    lines = []
    for name, value in expected.items():
        if actual.get(name) != value:
            lines.append(f"{where}.{name}: {actual.get(name)!r}, expected {value!r}")
    return lines
