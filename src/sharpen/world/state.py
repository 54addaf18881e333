"""Entities, their seeded rows, and the per-episode state over them: base rows are drawn once for a
category, family and seed, shared and never changed; an episode keeps only what it changed."""

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


class Entity(Config):
    """One kind of thing that a category keeps. The first of its fields is its key."""

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
        """The row as a caller may see and change it."""
        return {n: deepcopy(row[n]) for n in names or self.fields}

    def public(self, row: Json, base: Json | None) -> Json:
        """What counts when end states are compared: free wording only counts as changed or not."""
        before, free = base or {}, [name for name in row if self.fields[name].free]
        return row | {n: row[n] is not None and row[n] != before.get(n) for n in free}

    def reference(self) -> Field:
        """The key, as other rows and parameters hold it."""
        return Field(kind="ref", spec=self.name, about=self.fields[self.key].about)

    def select(self, names: Iterable[str]) -> dict[str, Field]:
        """These fields, or all of them; a name that is none of them is an error."""
        chosen = list(names) or list(self.fields)
        for name in chosen:
            if name not in self.fields:
                raise ValueError(f"{self.name} has no field {name!r}")
        return {n: self.reference() if n == self.key else self.fields[n] for n in chosen}


class Entities:
    """A category's entities by name, with its pools: all that rows are drawn from."""

    def __init__(self, category: str, entities: dict[str, Entity], pools: Mapping[str, Any]):
        self.category, self.entities = category, dict[str, Entity]()
        self.pools = shared_pools() | {name: tuple(values) for name, values in pools.items()}
        self.drawn = cache(self.compiled)
        self.holders: dict[str, list[str]] = {}  # names under which rows hold an entity's keys
        for name, entity in entities.items():
            said: Json = {"name": name, "table": f"{category}.{name}"}
            said |= {"noun": entity.noun or name.replace("_", " ")}
            said |= {"key": next(iter(entity.fields), ""), "plural": entity.plural or f"{name}s"}
            self.entities[name] = entity.model_copy(update=said)
            self.holders[name] = [said["key"]]
        for entity in self.entities.values():
            for name, field in entity.fields.items():
                if field.kind == "ref" and name not in self.holders.get(field.spec, [name]):
                    self.holders[field.spec].append(name)

    def __getitem__(self, name: str) -> Entity:
        if name not in self.entities:
            raise SharpenError(f"no entity {name!r}")
        return self.entities[name]

    def reference(self, child: str, parent: str) -> str:
        """The field by which rows of `child` point at `parent`."""
        for name, field in self[child].fields.items():
            if field.kind == "ref" and field.spec == parent:
                return name
        raise SharpenError(f"{child} has no reference to {parent}")

    def compiled(self, owner: Field | Entity, family: Family) -> Callable[..., Any]:
        """What draws a field's values, or all of a row but its key."""
        if isinstance(owner, Field):
            return Drawing(family, self.pools).value(owner)
        rest = {name: field for name, field in owner.fields.items() if name != owner.key}
        return Drawing(family, self.pools).row(rest)


class Scope(dict[str, Any]):
    """The names an expression sees and, on demand, the rows that they refer to, by entity."""

    def __init__(self, entities: Entities, find: Callable[[str, str], Json], names: Json):
        super().__init__(names)
        self.entities, self.find = entities, find

    def __missing__(self, name: str) -> Json:
        for holder in self.entities.holders.get(name, ()):
            if isinstance(self.get(holder), str):
                self[name] = self.find(name, self[holder])
                return self[name]
        raise KeyError(name)


def seeded(*parts: object) -> random.Random:
    return random.Random("|".join(map(str, parts)))


@lru_cache(maxsize=8192)
def base_keys(entities: Entities, family: Family, seed: int, name: str) -> tuple[str, ...]:
    entity = entities[name]
    rng, keys = seeded(entity.table, family, seed, "keys"), dict[str, None]()
    make = entities.drawn(entity.fields[entity.key], family)
    while len(keys) < entity.rows:
        keys[make(rng.random, rng.sample, None)] = None
    return tuple(keys)


@lru_cache(maxsize=4096)
def base_rows(entities: Entities, family: Family, seed: int, name: str) -> dict[str, Json]:
    """An entity's rows at the start of an episode; shared, so never changed in place."""
    entity, today = entities[name], {"today": str(TODAY[family])}
    rng, keys = seeded(entity.table, family, seed), partial(base_keys, entities, family, seed)

    def find(other: str, key: str) -> Json:
        return base_rows(entities, family, seed, other)[key]

    def scope(row: Json) -> Scope:
        return Scope(entities, find, row | today)

    fill, rows = entities.drawn(entity, family), dict[str, Json]()
    for key in keys(name):
        rows[key] = {entity.key: key}
        fill(rows[key], scope, rng.random, rng.sample, keys)
    return rows


class Tables:
    """One episode's rows: the shared base, and what was written over it."""

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
        edits = self.edits.get(entity.table)
        return edits[key] if edits and key in edits else self.base(entity).get(key)

    def find(self, entity: Entity, key: Any) -> Json:
        row = self.get(entity, key)
        if row is None:
            raise ToolFailure("not_found", f"no {entity.noun} {key!r}")
        return row

    def put(self, entity: Entity, key: str, row: Json | None) -> None:
        self.edits.setdefault(entity.table, {})[key] = row

    def new_key(self, entity: Entity, row: Json) -> str:
        """One digit longer than the seeded keys, from what the row says: episodes that did the same
        things in another order end in the same state."""
        text = json.dumps(entity.public(row, {}), sort_keys=True, ensure_ascii=False)
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
        head, *rest = entity.fields[entity.key].spec.split("#")
        least = 10 ** len(rest)
        while True:
            digits = str(least + number % (9 * least))
            tail = "".join(d + piece for d, piece in zip(digits[1:], rest, strict=True))
            if self.get(entity, key := head + digits[0] + tail) is None:
                return key
            number += 1  # the same row made twice is two rows


def diff(found: Json, wanted: Json) -> list[str]:
    """Two `changes()` as readable lines: what one state has that the other has not."""
    lines = []
    for table, key in sorted({(t, key) for s in (found, wanted) for t in s for key in s[t]}):
        left, right, at = found.get(table, {}), wanted.get(table, {}), f"{table} {key}"
        if key not in right or key not in left:
            lines.append(f"{at}: {'should not have' if key in left else 'not'} changed")
        elif left[key] is None or right[key] is None:
            if left[key] != right[key]:
                lines.append(f"{at}: {'not ' if left[key] else ''}removed")
        else:
            for name, value in right[key].items():
                if (is_ := left[key].get(name)) != value:
                    lines.append(f"{at}.{name}: {is_!r}, expected {value!r}")
    return lines
