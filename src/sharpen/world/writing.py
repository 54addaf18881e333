"""The operations that write."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

from pydantic import Field as Setting

from sharpen.config import Config
from sharpen.types import Json, SharpenError
from sharpen.world.expressions import Expr, Expression, ToolFailure, clock, minutes
from sharpen.world.operations import Call, Names, Operation, operation, refuse
from sharpen.world.reading import Calendar, Selecting
from sharpen.world.state import Entity

UPDATED = 8  # keys that an answer names of the rows it changed
ZERO = Expression(0)


class NewRow(Config):
    """A row made beside the main effect, such as a log entry."""

    entity: str
    set: dict[str, Expr] = Setting({})


class Writing(Operation):
    """Common to all that write: `set` gives fields of the row, `also` makes further rows."""

    writes = True
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
        stored = call.change(self.home, row, changes | worked_out(call, self.set, self.home))
        call.scope.update(stored)
        return {self.home.key: row[self.home.key]} | stored


def worked_out(call: Call, expressions: dict[str, Any], entity: Entity) -> Json:
    return {n: entity.fields[n].coerce(e(call.scope)) for n, e in expressions.items()}


def make(call: Call, entity: Entity, values: Json) -> Json:
    """Add a row: given values, then defaults and calculated fields, then its key."""
    row: Json = {entity.key: None}
    for name, field in list(entity.fields.items())[1:]:
        if values.get(name) is not None:
            row[name] = values[name]
        elif field.calc is not None and not field.none:
            row[name] = field.coerce(field.calc(call.names(call.constants | row)))
        elif field.default is not None or field.none:
            row[name] = call.constants.get(str(field.default), field.default)  # today, now
        else:
            where = "under with, under set, or a default"
            raise SharpenError(f"a new {entity.name} needs {name}: {where}")
    row[entity.key] = call.tables.new_key(entity, row)
    call.writes.append((entity, row[entity.key], row))
    call.scope.update(row)
    return row


class Editing(Writing):
    """Operations that change one row, or take it away."""

    @operation("key with change -> key change set")
    def update(self, call: Call, change: Names) -> Json:
        """Other values for the fields under `change`; when there are several, any of them."""
        changes = call.given(change)
        refuse(not changes, f"give at least one of {', '.join(change)}", "invalid_argument")
        same = all(call.row[name] == value for name, value in changes.items())
        refuse(same, f"{', '.join(changes)} already has that value")
        return self.overwrite(call, call.row, changes)

    @operation("key with -> key choice set")
    def transition(self, call: Call, from_: Names, to: str, field: str = "status") -> Json:
        """A step of a state machine: from one of some values to another, else a conflict."""
        who, now = f"{self.home.noun} {call.row[self.home.key]}", call.row[field]
        refuse(now not in from_, f"{who} is {now}, not {' or '.join(from_)}")
        return self.overwrite(call, call.row, {field: to})

    @operation("key with -> key choice set restored")
    def release(
        self, call: Call, from_: Names, to: str, restore: str, quantity: Expr, field: str = "status"
    ) -> Json:
        """A transition that gives a `quantity` back to a field of the row that it refers to."""
        result = self.transition(call, from_, to, field)
        owner, _, name = restore.partition(".")
        parent = call.find(owner, call.row[call.entities.reference(self.entity, owner)])
        value = parent[name] + quantity(call.scope)
        return result | call.change(call.entities[owner], parent, {name: value})

    @operation("key with by -> key field set")
    def adjust(
        self,
        call: Call,
        field: str,
        by: str,
        direction: Literal["up", "down"] = "up",
        least: Expr = ZERO,
        most: Expr | None = None,
    ) -> Json:
        """Raise or lower a quantity within limits."""
        step = call.args[by] * (1 if direction == "up" else -1)
        value = self.home.fields[field].coerce(call.row[field] + step)
        low, high = least(call.scope), most(call.scope) if most else value
        refuse(value < low, f"{field} would be {value}, below {low}")
        refuse(value > high, f"{field} would be {value}, above the limit")
        return self.overwrite(call, call.row, {field: value})

    @operation("key with field -> key ref set")
    def assign(self, call: Call, field: str, at_most: Expr | None = None) -> Json:
        """Point a row at another one, which may hold `at_most` so many."""
        wanted = call.args[field]
        refuse(call.row[field] == wanted, f"{field} already is {wanted}")
        held = sum(row[field] == wanted for row in call.rows(self.entity))
        full = at_most is not None and held >= at_most(call.scope)
        refuse(full, f"{wanted} already holds {held}")
        return self.overwrite(call, call.row, {field: wanted})

    @operation("key with item -> key list set")
    def link(self, call: Call, field: str, item: str, at_most: int = 20) -> Json:
        """Add an item to a list field; one that is there already is a conflict."""
        added, items = call.args[item], call.row[field]
        refuse(added in items, f"{field} has {added} already")
        refuse(len(items) >= at_most, f"{field} is full at {at_most}")
        return self.overwrite(call, call.row, {field: sorted([*items, added])})

    @operation("key with item -> key list set")
    def unlink(self, call: Call, field: str, item: str) -> Json:
        """Take an item out of a list field."""
        dropped, items = call.args[item], call.row[field]
        refuse(dropped not in items, f"{field} does not have {dropped}")
        return self.overwrite(call, call.row, {field: [i for i in items if i != dropped]})

    @operation("key with -> key removed:boolean")
    def remove(self, call: Call, unless: Names = ()) -> Json:
        """Take a row away, unless rows of the entities under `unless` still refer to it."""
        key = call.row[self.home.key]
        for child in unless:
            using = len(call.children(child, self.home))
            refuse(using > 0, f"{using} {child} rows still refer to {key}")
        call.writes.append((self.home, key, None))
        return {self.home.key: key, "removed": True}


class Joint(Writing):
    """Operations that change several rows whose keys are given."""

    @operation("source target amount with -> source target")
    def transfer(
        self, call: Call, field: str, source: str, target: str, amount: str, least: Expr = ZERO
    ) -> Json:
        """Move a quantity from one row to another; too little is a conflict."""
        home, moved = self.home, call.args[amount]
        giver, taker = (call.find(self.entity, call.args[name]) for name in (source, target))
        refuse(giver is taker, f"{source} and {target} are the same")
        refuse(moved <= 0, f"{amount} must be above 0", "invalid_argument")
        short = giver[field] - moved < least(call.names(giver))
        refuse(short, f"{giver[home.key]} has only {giver[field]} {field}")
        left = call.change(home, giver, {field: giver[field] - moved})[field]
        now = call.change(home, taker, {field: taker[field] + moved})[field]
        return {f"source_{field}": left, f"target_{field}": now}

    @operation("first second with -> first second")
    def swap(self, call: Call, fields: Names) -> Json:
        """Exchange the values of some fields between two rows."""
        keys = [call.args[f"{side}_{self.home.key}"] for side in ("first", "second")]
        one, two = (call.find(self.entity, key) for key in keys)
        same = all(one[name] == two[name] for name in fields)
        refuse(same, f"both have the same {' and '.join(fields)}")
        result: Json = {}
        for side, mine, other in (("first", one, two), ("second", two, one)):
            swapped = call.change(self.home, mine, {name: other[name] for name in fields})
            result |= {f"{side}_{name}": value for name, value in swapped.items()}
        return result

    @operation("keys6 with -> count:integer updated:[key] refused")
    def batch(self, call: Call) -> Json:
        """The same change to each row of a list; rows that the guards refuse are named."""
        name, done, refused = self.home.key, [], []
        for key in call.args[f"{name}s"]:
            row = call.find(self.entity, key)
            call.scope = call.names(row)
            try:
                self.guard(call.scope)
                self.overwrite(call, row, {})
                done.append(key)
            except ToolFailure as failure:
                refused.append({name: key, "reason": failure.message})
        return {"count": len(done), "updated": done, "refused": refused}


class Sweeping(Selecting, Writing):
    """A change to the rows that conditions keep."""

    @operation("filters with -> count:integer updated:[key]")
    def bulk(self, call: Call) -> Json:
        """The same change to every row that meets the conditions."""
        rows = self.selected(call)
        for row in rows:
            call.scope = call.names(row)
            self.overwrite(call, row, {})
        return {"count": len(rows), "updated": [row[self.home.key] for row in rows[:UPDATED]]}


class Making(Writing):
    """Operations whose effect is a new row, of `into` or else of their entity."""

    show: Names = ()

    @cached_property
    def made(self) -> Entity:
        return self.entities[getattr(self, "into", self.entity)]

    def add(self, call: Call, values: Json) -> Json:
        """Make the row from `values`, the arguments and `set`; answers with what is shown."""
        values = values | call.given(self.made.fields) | worked_out(call, self.set, self.made)
        return self.made.show(make(call, self.made, values), self.show)

    @operation("with -> made")
    def create(self, call: Call, unique: Names = ()) -> Json:
        """A new row from the parameters under `with`; `unique` fields may not repeat."""
        values = call.given(self.home.fields) | worked_out(call, self.set, self.home)
        for other in call.rows(self.entity) if unique else ():
            who = f"{self.home.noun} {other[self.home.key]}"
            same = all(other[name] == values.get(name) for name in unique)
            refuse(same, f"{who} already has the same {' and '.join(unique)}")
        return self.add(call, {})

    @operation("key with -> copied_from:key made")
    def copy_(self, call: Call) -> Json:
        """A new row like an existing one, apart from what `with` and `set` give."""
        return {"copied_from": call.row[self.home.key]} | self.add(call, call.row)

    @operation("key quantity with -> made capacity")
    def reserve(self, call: Call, capacity: str, into: str, quantity: str = "") -> Json:
        """Take a quantity of what a row still has, and keep a row of `into` for it."""
        key, left = call.row[self.home.key], call.row[capacity]
        wanted = call.args[quantity] if quantity else 1
        refuse(left < wanted, f"{self.home.noun} {key} has {left} left, not {wanted}")
        kept = call.change(self.home, call.row, {capacity: left - wanted})
        return self.add(call, {call.entities.reference(into, self.entity): key}) | kept


class Booking(Calendar, Making):
    """A new row that takes a stretch of a day."""

    @operation("resource date start duration_minutes with -> made")
    def book(self, call: Call) -> Json:
        """Take a stretch of a resource's day, unless it is taken or lies outside the hours."""
        opened, closed = map(minutes, self.hours)
        start = minutes(call.args["start"])
        end = start + call.args["duration_minutes"]
        refuse(start < opened or end > closed, f"outside {self.hours[0]} to {self.hours[1]}")
        for taken, until in self.taken(call):
            overlaps = start < until and taken < end
            refuse(overlaps, f"taken from {clock(taken)} to {clock(until)}")
        call.scope["end"] = clock(end)
        return self.add(call, {"end": clock(end)})
