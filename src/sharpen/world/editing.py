"""The operation templates that change or remove rows."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field as Setting

from sharpen.types import Json
from sharpen.world.expressions import Expr, Named, NamedParam, ToolFailure
from sharpen.world.making import Writing
from sharpen.world.state import Entities
from sharpen.world.templates import Call, Param, Selecting, Shape, conflict

UPDATED = 8  # keys that an answer names of the rows it changed

# One row changed -------------------------------------------------------------------------------


class Editing(Writing):
    """Templates that change one row: each says which fields, and to what, or why not."""

    keyed = True

    def edited(self) -> list[str]:
        return []

    def edit(self, call: Call, row: Json) -> Json:
        return {}

    def run(self, call: Call, row: Json) -> Json:
        return self.overwrite(call, row, self.edit(call, row))

    def shape(self, entities: Entities) -> Shape:
        return self.changed(entities, self.edited())


class EditingField(Editing):
    """Templates that change one field of one row."""

    field: str
    kind: ClassVar[str] = ""  # what the field must be

    def edited(self) -> list[str]:
        return [self.field]

    def shape(self, entities: Entities) -> Shape:
        shape = super().shape(entities)
        if self.kind and shape[self.field].kind != self.kind:
            raise ValueError(f"field: {self.field!r} is not of kind {self.kind}")
        return shape


class Update(Editing):
    """Other values for the fields under `change`; when there are several, any of them."""

    op = "update"
    change: list[NamedParam]

    def edited(self) -> list[str]:
        return [n.name for n in self.change]

    def parameters(self, entities: Entities) -> list[Param]:
        single = len(self.change) == 1
        names = [Named(n.name, single and n.required, n.default) for n in self.change]
        return super().parameters(entities) + [self.param(entities, n) for n in names]

    def edit(self, call: Call, row: Json) -> Json:
        changes = call.given(self.change, call.entity)
        if not changes:
            text = f"give at least one of {', '.join(self.edited())}"
            raise ToolFailure("invalid_argument", text)
        if all(row[n] == v for n, v in changes.items()):
            raise conflict(f"{', '.join(changes)} already has that value")
        return changes


class Transition(EditingField):
    """A step of a state machine: from one of some values to another, else a conflict."""

    op = "transition"
    field: str = "status"
    from_: list[str] = Setting(alias="from")
    to: str

    def edit(self, call: Call, row: Json) -> Json:
        if row[self.field] not in self.from_:
            who = f"{call.entity.noun} {row[call.entity.key]}"
            raise conflict(f"{who} is {row[self.field]}, not {' or '.join(self.from_)}")
        return {self.field: self.to}

    def shape(self, entities: Entities) -> Shape:
        known = entities[self.entity].select([self.field])[self.field].spec
        for value in (*self.from_, self.to):
            if value not in known:
                raise ValueError(f"{self.field} has no value {value!r}; it has {', '.join(known)}")
        return super().shape(entities)


class Release(Transition):
    """A transition that gives back what the row had taken: `restore` is a field of the row it
    refers to, `quantity` how much."""

    op = "release"
    restore: str = Setting(pattern=r"^\w+\.\w+$")
    quantity: Expr

    def run(self, call: Call, row: Json) -> Json:
        result = super().run(call, row)
        owner, field = self.restore.split(".")
        back = call.entities.reference(self.entity, owner)
        parent = call.find(owner, row[back])
        value = parent[field] + self.quantity(call.scope)
        return result | call.change(call.entities[owner], parent, {field: value})

    def shape(self, entities: Entities) -> Shape:
        owner, field = self.restore.split(".")
        entities.reference(self.entity, owner)
        return super().shape(entities) | entities[owner].select([field])


class Adjust(EditingField):
    """Raise or lower a quantity within limits."""

    op = "adjust"
    by: NamedParam
    direction: str = Setting("up", pattern="^(up|down)$")
    least: Expr | None = None
    most: Expr | None = None

    def parameters(self, entities: Entities) -> list[Param]:
        return [*super().parameters(entities), self.param(entities, self.by)]

    def edit(self, call: Call, row: Json) -> Json:
        step = call.args[self.by.name] * (1 if self.direction == "up" else -1)
        value = call.entity.fields[self.field].coerce(row[self.field] + step)
        least = self.least(call.scope) if self.least is not None else 0
        if value < least or (self.most is not None and value > self.most(call.scope)):
            bound = f"below {least}" if value < least else "above the limit"
            raise conflict(f"{self.field} would be {value}, {bound}")
        return {self.field: value}


class Assign(EditingField):
    """Point a row at another one, which may hold `at_most` so many."""

    op = "assign"
    kind = "ref"
    at_most: Expr | None = None

    def parameters(self, entities: Entities) -> list[Param]:
        return [*super().parameters(entities), self.param(entities, Named(self.field))]

    def edit(self, call: Call, row: Json) -> Json:
        wanted = call.args[self.field]
        if row[self.field] == wanted:
            raise conflict(f"{self.field} already is {wanted}")
        held = sum(r[self.field] == wanted for r in call.rows(self.entity))
        if self.at_most is not None and held >= self.at_most(call.scope):
            raise conflict(f"{wanted} already holds {held}")
        return {self.field: wanted}


class Link(EditingField):
    """Add an item to a list field; one that is there already is a conflict."""

    op = "link"
    kind = "list"
    item: str
    at_most: int = 20

    def parameters(self, entities: Entities) -> list[Param]:
        kind = entities[self.entity].select([self.field])[self.field]
        one = kind.model_copy(update={"kind": "ref" if kind.entity else "choice"})
        return [*super().parameters(entities), Param(self.item, self.params.get(self.item) or one)]

    def edit(self, call: Call, row: Json) -> Json:
        item, items = call.args[self.item], row[self.field]
        if item in items or len(items) >= self.at_most:
            why = f"has {item} already" if item in items else f"is full at {self.at_most}"
            raise conflict(f"{self.field} {why}")
        return {self.field: sorted([*items, item])}


class Unlink(Link):
    """Take an item out of a list field."""

    op = "unlink"

    def edit(self, call: Call, row: Json) -> Json:
        item, items = call.args[self.item], row[self.field]
        if item not in items:
            raise conflict(f"{self.field} does not have {item}")
        return {self.field: [i for i in items if i != item]}


class Remove(Writing):
    """Take a row away, unless rows of the entities under `unless` still refer to it."""

    op = "remove"
    keyed = True
    unless: tuple[str, ...] = ()

    def run(self, call: Call, row: Json) -> Json:
        key = row[call.entity.key]
        for child in self.unless:
            using = len(call.children(child, row))
            if using:
                raise conflict(f"{using} {child} rows still refer to {key}")
        call.writes.append((call.entity, key, None))
        return {call.entity.key: key, "removed": True}

    def shape(self, entities: Entities) -> Shape:
        for child in self.unless:
            entities.reference(child, self.entity)
        return self.changed(entities) | {"removed": "boolean"}


# Several rows changed --------------------------------------------------------------------------


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
        return [*ends, self.param(entities, self.amount), *super().parameters(entities)]

    def run(self, call: Call, row: Json) -> Json:
        entity, amount, field = call.entity, call.args[self.amount.name], self.field
        giver, taker = call.own(self.source), call.own(self.target)
        if giver is taker:
            raise conflict(f"{self.source} and {self.target} are the same")
        if amount <= 0:
            raise ToolFailure("invalid_argument", f"{self.amount.name} must be above 0")
        least = self.least(call.names(giver)) if self.least is not None else 0
        if giver[field] - amount < least:
            raise conflict(f"{giver[entity.key]} has only {giver[field]} {field}")
        left = call.change(entity, giver, {field: giver[field] - amount})[field]
        now = call.change(entity, taker, {field: taker[field] + amount})[field]
        return {f"source_{field}": left, f"target_{field}": now}

    def shape(self, entities: Entities) -> Shape:
        kind = self.changed(entities, [self.field])[self.field]
        return {f"source_{self.field}": kind, f"target_{self.field}": kind}


class Swap(Writing):
    """Exchange the values of some fields between two rows."""

    op = "swap"
    fields: list[str]
    sides: ClassVar = ("first", "second")

    def parameters(self, entities: Entities) -> list[Param]:
        key = entities[self.entity].key
        ends = [self.key_param(entities, f"{side}_{key}") for side in self.sides]
        return [*ends, *super().parameters(entities)]

    def run(self, call: Call, row: Json) -> Json:
        one, two = (call.own(f"{side}_{call.entity.key}") for side in self.sides)
        if all(one[n] == two[n] for n in self.fields):
            raise conflict(f"both have the same {' and '.join(self.fields)}")
        result: Json = {}
        for side, mine, other in zip(self.sides, (one, two), (two, one), strict=True):
            swapped = call.change(call.entity, mine, {n: other[n] for n in self.fields})
            result |= {f"{side}_{n}": v for n, v in swapped.items()}
        return result

    def shape(self, entities: Entities) -> Shape:
        kinds = entities[self.entity].select(self.fields)
        return {f"{side}_{n}": f for side in self.sides for n, f in kinds.items()}


class Batch(Writing):
    """The same change to each row of a list; rows that the guards refuse are named."""

    op = "batch"

    def parameters(self, entities: Entities) -> list[Param]:
        return [self.keys_param(entities, 6), *super().parameters(entities)]

    def execute(self, call: Call) -> Json:
        entity = call.entity
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
        self.changed(entities)
        key = entities[self.entity].reference()
        refused = {entities[self.entity].key: key, "reason": "string"}
        return {"count": "integer", "updated": [key], "refused": [refused]}


class Bulk(Selecting, Writing):
    """The same change to every row that meets the conditions."""

    op = "bulk"

    def run(self, call: Call, row: Json) -> Json:
        rows = self.selected(call)
        for found in rows:
            call.scope = call.names(found)
            self.overwrite(call, found, {})
        return {"count": len(rows), "updated": [r[call.entity.key] for r in rows[:UPDATED]]}

    def shape(self, entities: Entities) -> Shape:
        self.changed(entities)
        return {"count": "integer", "updated": [entities[self.entity].reference()]}
