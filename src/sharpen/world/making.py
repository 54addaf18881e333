"""What the templates that write share, and those that make new rows. Each checks everything first
and hands its writes over at the end, so that a call which fails changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field as Setting

from sharpen.config import Config
from sharpen.types import Json
from sharpen.world.expressions import Expr, Named, NamedParam, clock, minutes
from sharpen.world.state import Entities, Entity
from sharpen.world.templates import Calendar, Call, Operation, Param, Shape, conflict


class NewRow(Config):
    """A row made beside the main effect, such as a log entry."""

    entity: str
    set: dict[str, Expr] = Setting({})


class Writing(Operation):
    """Common to all that write: `set` gives fields of the row, `also` makes further rows."""

    writes = True
    entity: str
    set: dict[str, Expr] = Setting({})
    also: tuple[NewRow, ...] = ()

    def execute(self, call: Call) -> Json:
        result = super().execute(call)
        for new in self.also:
            entity = call.entities[new.entity]
            make(call, entity, worked_out(call, new.set, entity))
        return result

    def overwrite(self, call: Call, row: Json, changes: Json) -> Json:
        """Write `changes` and the `set` fields over a row; answers its key and what changed."""
        changes = changes | worked_out(call, self.set, call.entity)
        stored = call.change(call.entity, row, changes)
        call.scope.update(stored)
        return {call.entity.key: row[call.entity.key]} | stored

    def changed(self, entities: Entities, names: Iterable[str] = ()) -> Shape:
        """The shape of what `overwrite` answers."""
        entity = entities[self.entity]
        for new in self.also:
            needs(entities[new.entity], new.set)
        return entity.select(dict.fromkeys([entity.key, *names, *self.set]))

    def shape(self, entities: Entities) -> Shape:
        return self.changed(entities)


def worked_out(call: Call, expressions: dict[str, Any], entity: Entity) -> Json:
    return {n: entity.fields[n].coerce(e(call.scope)) for n, e in expressions.items()}


# New rows --------------------------------------------------------------------------------------


def needs(entity: Entity, given: Iterable[str]) -> None:
    """Every field of a new row must come from somewhere."""
    given = set(given)
    entity.select(sorted(given))
    free = {n for n, f in entity.fields.items() if f.calc or f.none or f.default is not None}
    generated = {entity.key} if entity.fields[entity.key].kind == "id" else set()
    missing = [n for n in entity.fields if n not in given | free | generated]
    if missing:
        where = "under with, under set, or a default"
        raise ValueError(f"a new {entity.name} needs {', '.join(missing)}: {where}")


def make(call: Call, entity: Entity, values: Json) -> Json:
    """Add a row: given values, then defaults and calculated fields, then its key."""
    row: Json = {entity.key: values.get(entity.key)}
    for name, field in entity.fields.items():
        if values.get(name) is not None:
            row[name] = values[name]
        elif field.calc is not None and not field.none:
            row[name] = field.coerce(field.calc(call.names(call.constants | row)))
        elif name != entity.key:
            row[name] = call.constants.get(str(field.default), field.default)  # today, now
    if row[entity.key] is None:
        row[entity.key] = call.tables.new_key(entity, row)
    elif call.tables.get(entity, row[entity.key]) is not None:
        raise conflict(f"{entity.noun} {row[entity.key]!r} already exists")
    call.writes.append((entity, row[entity.key], row))
    call.scope.update(row)
    return row


class Making(Writing):
    """Templates whose effect is a new row."""

    show: tuple[str, ...] = ()

    def target(self, entities: Entities) -> Entity:
        """What it is a row of."""
        return entities[self.entity]

    def shown(self, target: Entity) -> list[str]:
        return list(self.show) or [target.key, *self.set]

    def add(self, call: Call, values: Json) -> Json:
        """Make the row from `values`, the parameters under `with`, and `set`; answers with what is
        shown of it."""
        target = self.target(call.entities)
        values = values | call.given(self.with_, target) | worked_out(call, self.set, target)
        self.admit(call, values)
        return target.show(make(call, target, values), self.shown(target))

    def admit(self, call: Call, values: Json) -> None:
        """Refuse a row that may not stand beside those that are there."""

    def complete(self, entities: Entities, *given: str) -> Shape:
        """The shape of what `add` answers, when these fields and `with` and `set` are given."""
        target = self.target(entities)
        named = [n.name for n in self.with_ if n.name in target.fields]
        needs(target, [*given, *named, *self.set])
        for new in self.also:
            needs(entities[new.entity], new.set)
        return target.select(self.shown(target))

    def shape(self, entities: Entities) -> Shape:
        return self.complete(entities)


class Create(Making):
    """A new row from the parameters under `with`; `unique` fields may not repeat."""

    op = "create"
    unique: tuple[str, ...] = ()

    def run(self, call: Call, row: Json) -> Json:
        return self.add(call, {})

    def admit(self, call: Call, values: Json) -> None:
        for other in call.rows(self.entity) if self.unique else ():
            if all(other[n] == values.get(n) for n in self.unique):
                who = f"{call.entity.noun} {other[call.entity.key]}"
                raise conflict(f"{who} already has the same {' and '.join(self.unique)}")

    def shown(self, target: Entity) -> list[str]:
        asked = {n.name for n in self.with_}
        return list(self.show) or [n for n in target.fields if n == target.key or n not in asked]


class Copy(Making):
    """A new row like an existing one, apart from what `with` and `set` give."""

    op = "copy"
    keyed = True

    def run(self, call: Call, row: Json) -> Json:
        key = call.entity.key
        return {"copied_from": row[key]} | self.add(call, row | {key: None})

    def shown(self, target: Entity) -> list[str]:
        named = [n.name for n in self.with_ if n.name in target.fields]
        return list(self.show) or [target.key, *named]

    def shape(self, entities: Entities) -> Shape:
        entity = entities[self.entity]
        return {"copied_from": entity.reference()} | self.complete(entities, *entity.fields)


class Reserve(Making):
    """Take a quantity of what a row still has, and keep a row of `into` for it."""

    op = "reserve"
    keyed = True
    capacity: str
    into: str
    quantity: NamedParam | None = None

    def target(self, entities: Entities) -> Entity:
        return entities[self.into]

    def named(self) -> list[Named]:
        return [*([self.quantity] if self.quantity else []), *self.with_]

    def parameters(self, entities: Entities) -> list[Param]:
        extra = [self.param(entities, n, self.into) for n in self.named()]
        return [self.key_param(entities), *extra]

    def run(self, call: Call, row: Json) -> Json:
        entity = call.entity
        wanted = call.args[self.quantity.name] if self.quantity else 1
        if row[self.capacity] < wanted:
            left = f"{row[self.capacity]} left, not {wanted}"
            raise conflict(f"{entity.noun} {row[entity.key]} has {left}")
        left = call.change(entity, row, {self.capacity: row[self.capacity] - wanted})
        back = call.entities.reference(self.into, self.entity)
        values = call.given(self.named(), call.entities[self.into])
        return self.add(call, values | {back: row[entity.key]}) | left

    def shape(self, entities: Entities) -> Shape:
        back, known = entities.reference(self.into, self.entity), entities[self.into].fields
        named = [n.name for n in self.named() if n.name in known]
        left = entities[self.entity].select([self.capacity])
        return self.complete(entities, back, *named) | left


class Book(Calendar, Making):
    """Take a stretch of a resource's day, unless it overlaps another or lies outside the hours."""

    op = "book"

    def parameters(self, entities: Entities) -> list[Param]:
        return [*self.day_params(entities, self.start), *super().parameters(entities)]

    def run(self, call: Call, row: Json) -> Json:
        opened, closed = map(minutes, self.hours)
        start = minutes(call.args[self.start])
        end = start + call.args["duration_minutes"]
        if start < opened or end > closed:
            raise conflict(f"outside {self.hours[0]} to {self.hours[1]}")
        for taken, until in self.taken(call):
            if start < until and taken < end:
                raise conflict(f"taken from {clock(taken)} to {clock(until)}")
        call.scope[self.end] = clock(end)
        values = {n: v for n, v in call.args.items() if n in call.entity.fields}
        return self.add(call, values | {self.end: clock(end)})

    def shown(self, target: Entity) -> list[str]:
        return list(self.show or dict.fromkeys([target.key, self.end, *self.set]))

    def shape(self, entities: Entities) -> Shape:
        return self.complete(entities, self.resource, self.date, self.start, self.end)
