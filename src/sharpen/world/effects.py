"""The operation templates that write. Each checks everything first and hands its writes over at
the end, so that a call which fails changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field as Setting

from sharpen.config import Config
from sharpen.types import Json
from sharpen.world.expressions import Expr, Named, NamedParam, ToolFailure, clock, minutes
from sharpen.world.operations import (
    Calendar,
    Call,
    Operation,
    Param,
    Selecting,
    Shape,
    fields_of,
    reference,
)
from sharpen.world.state import Entities, Entity


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
            make(call, call.entities[new.entity], worked_out(call, new.set, new.entity))
        return result

    def overwrite(self, call: Call, row: Json, changes: Json) -> Json:
        """Write `changes` and the `set` fields over a row; answers its key and what changed."""
        entity = call.entities[self.entity]
        changes = changes | worked_out(call, self.set, self.entity)
        changes = {n: entity.fields[n].coerce(v) for n, v in changes.items()}
        call.writes.append((entity, row[entity.key], row | changes))
        call.scope.update(changes)
        return {entity.key: row[entity.key]} | changes

    def changed_shape(self, entities: Entities, names: Iterable[str] = ()) -> Shape:
        entity = entities[self.entity]
        for new in self.also:
            needs(entities[new.entity], new.set)
        return fields_of(entity, dict.fromkeys([entity.key, *names, *self.set]))

    def shape(self, entities: Entities) -> Shape:
        return self.changed_shape(entities)


def worked_out(call: Call, expressions: dict[str, Any], entity: str) -> Json:
    fields = call.entities[entity].fields
    return {n: fields[n].coerce(e(call.scope)) for n, e in expressions.items()}


def needs(entity: Entity, given: Iterable[str]) -> None:
    """Every field of a new row must come from somewhere."""
    given = set(given)
    unknown = sorted(given - set(entity.fields))
    if unknown:
        raise ValueError(f"{entity.name} has no field {unknown[0]!r}")
    free = {n for n, f in entity.fields.items() if f.calc or f.none or f.default is not None}
    generated = {entity.key} if entity.fields[entity.key].kind == "id" else set()
    missing = [n for n in entity.fields if n not in given | free | generated]
    if missing:
        raise ValueError(
            f"a new {entity.name} needs {', '.join(missing)}: under with, under set, or a default"
        )


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
        raise ToolFailure("conflict", f"{entity.noun} {row[entity.key]!r} already exists")
    call.writes.append((entity, row[entity.key], row))
    call.scope.update(row)
    return row


class Create(Writing):
    """A new row from the parameters under `with`; `unique` fields may not repeat."""

    op = "create"
    unique: tuple[str, ...] = ()
    show: tuple[str, ...] = ()

    def run(self, call: Call, row: Json) -> Json:
        entity = call.entities[self.entity]
        values = {n.name: call.args.get(n.name) for n in self.with_ if n.name in entity.fields}
        values |= worked_out(call, self.set, self.entity)
        self.refuse_twin(call, entity, values)
        return entity.show(make(call, entity, values), self.shown(entity))

    def refuse_twin(self, call: Call, entity: Entity, values: Json) -> None:
        for other in call.rows(self.entity) if self.unique else ():
            if all(other[n] == values.get(n) for n in self.unique):
                same = " and ".join(self.unique)
                text = f"{entity.noun} {other[entity.key]} already has the same {same}"
                raise ToolFailure("conflict", text)

    def shown(self, entity: Entity) -> list[str]:
        asked = {n.name for n in self.with_}
        rest = [n for n in entity.fields if n == entity.key or n not in asked]
        return list(self.show) or rest

    def shape(self, entities: Entities) -> Shape:
        entity = entities[self.entity]
        needs(entity, [*(n.name for n in self.with_ if n.name in entity.fields), *self.set])
        self.changed_shape(entities)
        return fields_of(entity, self.shown(entity))


class Copy(Writing):
    """A new row like an existing one, apart from what `with` and `set` give."""

    op = "copy"
    keyed = True
    show: tuple[str, ...] = ()

    def run(self, call: Call, row: Json) -> Json:
        entity = call.entities[self.entity]
        given = {n.name: call.args.get(n.name) for n in self.with_ if n.name in entity.fields}
        values = row | {n: v for n, v in given.items() if v is not None}
        values |= worked_out(call, self.set, self.entity) | {entity.key: None}
        result = entity.show(make(call, entity, values), self.shown(entity))
        return {"copied_from": row[entity.key]} | result

    def shown(self, entity: Entity) -> list[str]:
        return list(self.show) or [
            entity.key,
            *(n.name for n in self.with_ if n.name in entity.fields),
        ]

    def shape(self, entities: Entities) -> Shape:
        entity = entities[self.entity]
        return {"copied_from": reference(entity)} | fields_of(entity, self.shown(entity))


class Update(Writing):
    """Other values for the fields under `change`; when there are several, any of them."""

    op = "update"
    keyed = True
    change: list[NamedParam]

    def parameters(self, entities: Entities) -> list[Param]:
        single = len(self.change) == 1
        names = [Named(n.name, single and n.required, n.default) for n in self.change]
        return super().parameters(entities) + [self.param(entities, n) for n in names]

    def run(self, call: Call, row: Json) -> Json:
        given = {n.name: call.args.get(n.name) for n in self.change}
        changes = {n: v for n, v in given.items() if v is not None}
        if not changes:
            raise ToolFailure("invalid_argument", f"give at least one of {', '.join(given)}")
        if all(row[n] == v for n, v in changes.items()):
            raise ToolFailure("conflict", f"{', '.join(changes)} already has that value")
        return self.overwrite(call, row, changes)

    def shape(self, entities: Entities) -> Shape:
        return self.changed_shape(entities, [n.name for n in self.change])


class Transition(Writing):
    """A step of a state machine: from one of some values to another, else a conflict."""

    op = "transition"
    keyed = True
    field: str = "status"
    from_: list[str] = Setting(alias="from")
    to: str

    def run(self, call: Call, row: Json) -> Json:
        entity = call.entities[self.entity]
        if row[self.field] not in self.from_:
            text = f"{entity.noun} {row[entity.key]} is {row[self.field]}, not "
            raise ToolFailure("conflict", text + " or ".join(self.from_))
        return self.overwrite(call, row, {self.field: self.to})

    def shape(self, entities: Entities) -> Shape:
        known = fields_of(entities[self.entity], [self.field])[self.field].spec
        for value in (*self.from_, self.to):
            if value not in known:
                raise ValueError(f"{self.field} has no value {value!r}; it has {', '.join(known)}")
        return self.changed_shape(entities, [self.field])


class Release(Transition):
    """A transition that gives back what the row had taken: `restore` is a field of the row it
    refers to, `quantity` how much."""

    op = "release"
    restore: str
    quantity: Expr

    def run(self, call: Call, row: Json) -> Json:
        result = super().run(call, row)
        entity, field = restored(call.entities, self.entity, self.restore)
        back = call.entities.reference(self.entity, entity.name)
        parent = call.find(entity.name, row[back])
        value = entity.fields[field].coerce(parent[field] + self.quantity(call.scope))
        call.writes.append((entity, parent[entity.key], parent | {field: value}))
        return result | {field: value}

    def shape(self, entities: Entities) -> Shape:
        entity, field = restored(entities, self.entity, self.restore)
        return super().shape(entities) | {field: entity.fields[field]}


def restored(entities: Entities, child: str, path: str) -> tuple[Entity, str]:
    """`flight.seats_left` → that entity and field, which rows of `child` must refer to."""
    parent, _, field = path.partition(".")
    known = parent in entities.entities and field in entities[parent].fields
    if not known or not entities.reference(child, parent):
        raise ValueError(f"{path!r}: expected entity.field of an entity that {child} refers to")
    return entities[parent], field


class Reserve(Writing):
    """Take a quantity of what a row still has, and keep a row of `into` for it."""

    op = "reserve"
    keyed = True
    capacity: str
    into: str
    quantity: NamedParam | None = None
    show: tuple[str, ...] = ()

    def parameters(self, entities: Entities) -> list[Param]:
        named = [*([self.quantity] if self.quantity else []), *self.with_]
        extra = [self.param(entities, n, self.into) for n in named]
        return [self.key_param(entities), *extra]

    def run(self, call: Call, row: Json) -> Json:
        entity, into = call.entities[self.entity], call.entities[self.into]
        wanted = call.args[self.quantity.name] if self.quantity else 1
        if row[self.capacity] < wanted:
            text = f"{entity.noun} {row[entity.key]} has {row[self.capacity]} left, not {wanted}"
            raise ToolFailure("conflict", text)
        left = entity.fields[self.capacity].coerce(row[self.capacity] - wanted)
        call.writes.append((entity, row[entity.key], row | {self.capacity: left}))
        back = call.entities.reference(self.into, self.entity)
        values = {n: v for n, v in call.args.items() if n in into.fields}
        values |= {back: row[entity.key]} | worked_out(call, self.set, self.into)
        made = make(call, into, values)
        return into.show(made, self.shown(into)) | {self.capacity: left}

    def shown(self, into: Entity) -> list[str]:
        return list(self.show) or [into.key, *self.set]

    def shape(self, entities: Entities) -> Shape:
        into = entities[self.into]
        back = entities.reference(self.into, self.entity)
        if not back:
            raise ValueError(f"into: {self.into!r} has no reference to {self.entity}")
        named = [*([self.quantity] if self.quantity else []), *self.with_]
        needs(into, [back, *self.set, *(n.name for n in named if n.name in into.fields)])
        left = fields_of(entities[self.entity], [self.capacity])
        return fields_of(into, self.shown(into)) | left


class Book(Calendar, Writing):
    """Take a stretch of a resource's day, unless it overlaps another or lies outside the hours."""

    op = "book"

    def parameters(self, entities: Entities) -> list[Param]:
        names = (self.resource, self.date, self.start)
        where = [self.param(entities, Named(n)) for n in names]
        return [*where, self.length(), *super().parameters(entities)]

    def run(self, call: Call, row: Json) -> Json:
        args, entity = call.args, call.entities[self.entity]
        start = minutes(args[self.start])
        end = start + args["duration_minutes"]
        if start < minutes(self.hours[0]) or end > minutes(self.hours[1]):
            raise ToolFailure("conflict", f"outside {self.hours[0]} to {self.hours[1]}")
        for taken, until in self.taken(call):
            if start < until and taken < end:
                raise ToolFailure("conflict", f"taken from {clock(taken)} to {clock(until)}")
        values = {n: v for n, v in args.items() if n in entity.fields} | {self.end: clock(end)}
        call.scope[self.end] = clock(end)
        values |= worked_out(call, self.set, self.entity)
        return entity.show(make(call, entity, values), [entity.key, self.end, *self.set])

    def shape(self, entities: Entities) -> Shape:
        entity, taken = entities[self.entity], (self.resource, self.date, self.start, self.end)
        given = (n.name for n in self.with_ if n.name in entity.fields)
        needs(entity, [*taken, *self.set, *given])
        return self.changed_shape(entities, [self.end])


class Transfer(Writing):
    """Move a quantity from one row to another; too little is a conflict."""

    op = "transfer"
    field: str
    source: str
    target: str
    amount: NamedParam
    least: Expr | None = None

    def parameters(self, entities: Entities) -> list[Param]:
        ends = [self.key_param(entities, name) for name in (self.source, self.target)]
        amount = self.param(entities, self.amount)
        return [*ends, amount, *super().parameters(entities)]

    def run(self, call: Call, row: Json) -> Json:
        entity, amount = call.entities[self.entity], call.args[self.amount.name]
        giver, taker = (call.find(self.entity, call.args[n]) for n in (self.source, self.target))
        if giver is taker:
            raise ToolFailure("conflict", f"{self.source} and {self.target} are the same")
        least = self.least(call.names(giver)) if self.least is not None else 0
        if amount <= 0:
            raise ToolFailure("invalid_argument", f"{self.amount.name} must be above 0")
        if giver[self.field] - amount < least:
            text = f"{giver[entity.key]} has only {giver[self.field]} {self.field}"
            raise ToolFailure("conflict", text)
        coerce = entity.fields[self.field].coerce
        left, now = coerce(giver[self.field] - amount), coerce(taker[self.field] + amount)
        call.writes.append((entity, giver[entity.key], giver | {self.field: left}))
        call.writes.append((entity, taker[entity.key], taker | {self.field: now}))
        return {f"source_{self.field}": left, f"target_{self.field}": now}

    def shape(self, entities: Entities) -> Shape:
        kind = fields_of(entities[self.entity], [self.field])[self.field]
        self.changed_shape(entities)
        return {f"source_{self.field}": kind, f"target_{self.field}": kind}


class Adjust(Writing):
    """Raise or lower a quantity within limits."""

    op = "adjust"
    keyed = True
    field: str
    by: NamedParam
    direction: str = Setting("up", pattern="^(up|down)$")
    least: Expr | None = None
    most: Expr | None = None

    def parameters(self, entities: Entities) -> list[Param]:
        return [*super().parameters(entities), self.param(entities, self.by)]

    def run(self, call: Call, row: Json) -> Json:
        step = call.args[self.by.name] * (1 if self.direction == "up" else -1)
        value = call.entities[self.entity].fields[self.field].coerce(row[self.field] + step)
        least = self.least(call.scope) if self.least is not None else 0
        if value < least or (self.most is not None and value > self.most(call.scope)):
            bound = f"below {least}" if value < least else "above the limit"
            raise ToolFailure("conflict", f"{self.field} would be {value}, {bound}")
        return self.overwrite(call, row, {self.field: value})

    def shape(self, entities: Entities) -> Shape:
        return self.changed_shape(entities, [self.field])


class Assign(Writing):
    """Point a row at another one, which may hold `at_most` so many."""

    op = "assign"
    keyed = True
    field: str
    at_most: Expr | None = None

    def parameters(self, entities: Entities) -> list[Param]:
        return [*super().parameters(entities), self.param(entities, Named(self.field))]

    def run(self, call: Call, row: Json) -> Json:
        wanted = call.args[self.field]
        if row[self.field] == wanted:
            raise ToolFailure("conflict", f"{self.field} already is {wanted}")
        held = sum(r[self.field] == wanted for r in call.rows(self.entity))
        if self.at_most is not None and held >= self.at_most(call.scope):
            raise ToolFailure("conflict", f"{wanted} already holds {held}")
        return self.overwrite(call, row, {self.field: wanted})

    def shape(self, entities: Entities) -> Shape:
        kind = fields_of(entities[self.entity], [self.field])[self.field]
        if kind.kind != "ref":
            raise ValueError(f"field: {self.field!r} is not a reference")
        return self.changed_shape(entities, [self.field])


class Link(Writing):
    """Add an item to a list field; one that is there already is a conflict."""

    op = "link"
    keyed = True
    field: str
    item: str
    at_most: int = 20

    def parameters(self, entities: Entities) -> list[Param]:
        kind = fields_of(entities[self.entity], [self.field])[self.field]
        if kind.kind != "list":
            raise ValueError(f"field: {self.field!r} is not a list")
        one = kind.model_copy(update={"kind": "ref" if kind.entity else "choice"})
        return [*super().parameters(entities), Param(self.item, self.params.get(self.item) or one)]

    def run(self, call: Call, row: Json) -> Json:
        item, items = call.args[self.item], row[self.field]
        if item in items or len(items) >= self.at_most:
            why = f"has {item} already" if item in items else f"is full at {self.at_most}"
            raise ToolFailure("conflict", f"{self.field} {why}")
        return self.overwrite(call, row, {self.field: sorted([*items, item])})

    def shape(self, entities: Entities) -> Shape:
        return self.changed_shape(entities, [self.field])


class Unlink(Link):
    """Take an item out of a list field."""

    op = "unlink"

    def run(self, call: Call, row: Json) -> Json:
        item, items = call.args[self.item], row[self.field]
        if item not in items:
            raise ToolFailure("conflict", f"{self.field} does not have {item}")
        return self.overwrite(call, row, {self.field: [i for i in items if i != item]})


class Swap(Writing):
    """Exchange the values of some fields between two rows."""

    op = "swap"
    fields: list[str]

    def parameters(self, entities: Entities) -> list[Param]:
        key = entities[self.entity].key
        ends = [self.key_param(entities, f"{which}_{key}") for which in ("first", "second")]
        return [*ends, *super().parameters(entities)]

    def run(self, call: Call, row: Json) -> Json:
        entity = call.entities[self.entity]
        keys = [call.args[f"{which}_{entity.key}"] for which in ("first", "second")]
        one, two = (call.find(self.entity, key) for key in keys)
        if all(one[n] == two[n] for n in self.fields):
            raise ToolFailure("conflict", f"both have the same {' and '.join(self.fields)}")
        result: Json = {}
        for name, row_, other in (("first", one, two), ("second", two, one)):
            swapped = {n: other[n] for n in self.fields}
            call.writes.append((entity, row_[entity.key], row_ | swapped))
            result |= {f"{name}_{n}": v for n, v in swapped.items()}
        return result

    def shape(self, entities: Entities) -> Shape:
        kinds = fields_of(entities[self.entity], self.fields)
        return {f"{which}_{n}": f for which in ("first", "second") for n, f in kinds.items()}


class Batch(Writing):
    """The same change to each row of a list; rows that the guards refuse are named."""

    op = "batch"

    def parameters(self, entities: Entities) -> list[Param]:
        keys = self.key_param(entities, f"{entities[self.entity].key}s", many=(2, 6))
        return [keys, *super().parameters(entities)]

    def execute(self, call: Call) -> Json:
        entity = call.entities[self.entity]
        done, refused = [], []
        call.enter(None)
        for key in call.args[f"{entity.key}s"]:
            row = call.find(self.entity, key)
            call.scope = call.names(row)
            try:
                self.guard(call.scope)
                self.overwrite(call, row, {})
                done.append(key)
            except ToolFailure as failure:
                refused.append({entity.key: key, "reason": failure.message})
        return {"count": len(done), "updated": done, "refused": refused}

    def shape(self, entities: Entities) -> Shape:
        entity = entities[self.entity]
        self.changed_shape(entities)
        refused = {entity.key: reference(entity), "reason": "string"}
        return {"count": "integer", "updated": [reference(entity)], "refused": [refused]}


class Bulk(Selecting, Writing):
    """The same change to every row that meets the conditions."""

    op = "bulk"

    def run(self, call: Call, row: Json) -> Json:
        entity, rows = call.entities[self.entity], self.selected(call)
        for found in rows:
            call.scope = call.names(found)
            self.overwrite(call, found, {})
        return {"count": len(rows), "updated": [r[entity.key] for r in rows[:8]]}

    def shape(self, entities: Entities) -> Shape:
        self.changed_shape(entities)
        return {"count": "integer", "updated": [reference(entities[self.entity])]}


class Remove(Writing):
    """Take a row away, unless rows of the entities under `unless` still refer to it."""

    op = "remove"
    keyed = True
    unless: tuple[str, ...] = ()

    def run(self, call: Call, row: Json) -> Json:
        entity = call.entities[self.entity]
        key = row[entity.key]
        for child in self.unless:
            by = call.entities.reference(child, self.entity)
            using = sum(r[by] == key for r in call.rows(child))
            if using:
                raise ToolFailure("conflict", f"{using} {child} rows still refer to {key}")
        call.writes.append((entity, key, None))
        return {entity.key: key, "removed": True}

    def shape(self, entities: Entities) -> Shape:
        for child in self.unless:
            if child not in entities.entities or not entities.reference(child, self.entity):
                raise ValueError(f"unless: {child!r} has no reference to {self.entity}")
        return self.changed_shape(entities) | {"removed": "boolean"}
