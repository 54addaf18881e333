"""The operations that write. `domain.py` loads this file to register them."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

from pydantic import Field as Setting

from sharpen.config import Config
from sharpen.types import Json, SharpenError
from sharpen.world.expressions import Expr, Expression, ToolFailure, format_clock, minutes_of_day
from sharpen.world.operations import Call, Names, Operation, operation, refuse
from sharpen.world.reading import Calendar, Selecting
from sharpen.world.state import Entity

_SHOWN_KEYS = 8  # of the rows that `bulk` changed
_ZERO = Expression(0)


class _NewRow(Config):
    """A row made besides the main effect, such as a log entry."""

    entity: str
    set: dict[str, Expr] = Setting({})


class Writing(Operation):
    """All operations that write: `set` gives fields of the row, `also` makes further rows."""

    writes = True
    set: dict[str, Expr] = Setting({})
    also: tuple[_NewRow, ...] = ()

    def execute(self, call: Call) -> Json:
        """Run a call, then make the rows under `also`."""
        result = super().execute(call)
        for new_row in self.also:
            entity = call.entities[new_row.entity]
            _add_row(call, entity, _evaluate(call, new_row.set, entity))
        return result

    def overwrite(self, call: Call, row: Json, changes: Json) -> Json:
        """Write `changes` and the `set` fields over a row; return its key and what changed."""
        set_values = _evaluate(call, self.set, self.home)
        stored = call.change(self.home, row, changes | set_values)
        call.scope.update(stored)
        return {self.home.key: row[self.home.key]} | stored


def _evaluate(call: Call, expressions: dict[str, Expr], entity: Entity) -> Json:
    """Returns field → value of its expression, as the entity stores it."""
    values: Json = {}
    for name, expression in expressions.items():
        values[name] = entity.fields[name].coerce(expression(call.scope))
    return values


def _add_row(call: Call, entity: Entity, values: Json) -> Json:
    """Add a row: the given values, then defaults and calculated fields, then its key."""
    row: Json = {entity.key: None}
    for name, field in entity.fields.items():
        if name == entity.key:
            continue
        if values.get(name) is not None:
            row[name] = values[name]
        elif field.calc is not None and not field.none:
            row[name] = field.coerce(field.calc(call.make_scope(call.constants | row)))
        elif field.default is not None or field.none:
            # The defaults `today` and `now` stand for those of the episode.
            row[name] = call.constants.get(str(field.default), field.default)
        else:
            where = "under with, under set, or a default"
            raise SharpenError(f"a new {entity.name} needs {name}: {where}")
    row[entity.key] = call.tables.new_key(entity, row)
    call.writes.append((entity, row[entity.key], row))
    call.scope.update(row)
    return row


class _Editing(Writing):
    """Operations that change one row, or remove it."""

    @operation("key with change -> key change set")
    def update(self, call: Call, change: Names) -> Json:
        """Give fields under `change` other values; of several, at least one must be given."""
        changes = call.given_args(change)
        refuse(not changes, f"give at least one of {', '.join(change)}", "invalid_argument")
        is_same = all(call.row[name] == value for name, value in changes.items())
        refuse(is_same, f"{', '.join(changes)} already has that value")
        return self.overwrite(call, call.row, changes)

    @operation("key with -> key choice set")
    def transition(self, call: Call, from_: Names, to: str, field: str = "status") -> Json:
        """Make a step of a state machine; a row without one of the `from` values is a conflict."""
        current = call.row[field]
        who = f"{self.home.noun} {call.row[self.home.key]}"
        refuse(current not in from_, f"{who} is {current}, not {' or '.join(from_)}")
        return self.overwrite(call, call.row, {field: to})

    @operation("key with -> key choice set restored")
    def release(
        self, call: Call, from_: Names, to: str, restore: str, quantity: Expr, field: str = "status"
    ) -> Json:
        """Make a transition that gives a `quantity` back to a field of the row it refers to."""
        result = self.transition(call, from_, to, field)
        owner, _, restored_field = restore.partition(".")
        reference = call.entities.reference(self.entity, owner)
        parent = call.find(owner, call.row[reference])
        restored_value = parent[restored_field] + quantity(call.scope)
        stored = call.change(call.entities[owner], parent, {restored_field: restored_value})
        return result | stored

    @operation("key with by -> key field set")
    def adjust(
        self,
        call: Call,
        field: str,
        by: str,
        direction: Literal["up", "down"] = "up",
        least: Expr = _ZERO,
        most: Expr | None = None,
    ) -> Json:
        """Raise or lower a quantity within limits."""
        step = call.args[by]
        if direction == "down":
            step = -step
        value = self.home.fields[field].coerce(call.row[field] + step)
        lowest = least(call.scope)
        highest = most(call.scope) if most else value
        refuse(value < lowest, f"{field} would be {value}, below {lowest}")
        refuse(value > highest, f"{field} would be {value}, above the limit")
        return self.overwrite(call, call.row, {field: value})

    @operation("key with field -> key ref set")
    def assign(self, call: Call, field: str, at_most: Expr | None = None) -> Json:
        """Point a row at another one, to which at most `at_most` rows may point."""
        target = call.args[field]
        refuse(call.row[field] == target, f"{field} already is {target}")
        count = len([row for row in call.rows(self.entity) if row[field] == target])
        is_full = at_most is not None and count >= at_most(call.scope)
        refuse(is_full, f"{target} already holds {count}")
        return self.overwrite(call, call.row, {field: target})

    @operation("key with item -> key list set")
    def link(self, call: Call, field: str, item: str, at_most: int = 20) -> Json:
        """Add an item to a list field; one that is there already is a conflict."""
        added = call.args[item]
        items = call.row[field]
        refuse(added in items, f"{field} has {added} already")
        refuse(len(items) >= at_most, f"{field} is full at {at_most}")
        return self.overwrite(call, call.row, {field: sorted([*items, added])})

    @operation("key with item -> key list set")
    def unlink(self, call: Call, field: str, item: str) -> Json:
        """Remove an item from a list field."""
        removed = call.args[item]
        items = call.row[field]
        refuse(removed not in items, f"{field} does not have {removed}")
        remaining = [other for other in items if other != removed]
        return self.overwrite(call, call.row, {field: remaining})

    @operation("key with -> key removed:boolean")
    def remove(self, call: Call, unless: Names = ()) -> Json:
        """Remove a row, unless rows of the entities under `unless` still refer to it."""
        key = call.row[self.home.key]
        for child in unless:
            count = len(call.children(child, self.home))
            refuse(count > 0, f"{count} {child} rows still refer to {key}")
        call.writes.append((self.home, key, None))
        return {self.home.key: key, "removed": True}


class _Joint(Writing):
    """Operations that change several rows whose keys are given."""

    @operation("source target amount with -> source target")
    def transfer(
        self, call: Call, field: str, source: str, target: str, amount: str, least: Expr = _ZERO
    ) -> Json:
        """Move a quantity from one row to another; too little is a conflict."""
        home = self.home
        moved = call.args[amount]
        giver = call.find(self.entity, call.args[source])
        taker = call.find(self.entity, call.args[target])
        refuse(giver is taker, f"{source} and {target} are the same")
        refuse(moved <= 0, f"{amount} must be above 0", "invalid_argument")
        is_short = giver[field] - moved < least(call.make_scope(giver))
        refuse(is_short, f"{giver[home.key]} has only {giver[field]} {field}")
        giver_changes = call.change(home, giver, {field: giver[field] - moved})
        taker_changes = call.change(home, taker, {field: taker[field] + moved})
        return {
            f"source_{field}": giver_changes[field],
            f"target_{field}": taker_changes[field],
        }

    @operation("first second with -> first second")
    def swap(self, call: Call, fields: Names) -> Json:
        """Exchange the values of some fields between two rows."""
        first_key = call.args[f"first_{self.home.key}"]
        second_key = call.args[f"second_{self.home.key}"]
        first = call.find(self.entity, first_key)
        second = call.find(self.entity, second_key)
        is_same = all(first[name] == second[name] for name in fields)
        refuse(is_same, f"both have the same {' and '.join(fields)}")
        result: Json = {}
        for side, row, other in (("first", first, second), ("second", second, first)):
            stored = call.change(self.home, row, {name: other[name] for name in fields})
            for name, value in stored.items():
                result[f"{side}_{name}"] = value
        return result

    @operation("keys6 with -> count:integer updated:[key] refused")
    def batch(self, call: Call) -> Json:
        """Make the same change to each row of a list; rows that the guards refuse are named."""
        key_name = self.home.key
        updated = []
        refused = []
        for key in call.args[f"{key_name}s"]:
            row = call.find(self.entity, key)
            call.scope = call.make_scope(row)
            try:
                self.guard(call.scope)
                self.overwrite(call, row, {})
                updated.append(key)
            except ToolFailure as failure:
                refused.append({key_name: key, "reason": failure.message})
        return {"count": len(updated), "updated": updated, "refused": refused}


class _Sweeping(Selecting, Writing):
    """A change to all rows that meet conditions."""

    @operation("filters with -> count:integer updated:[key]")
    def bulk(self, call: Call) -> Json:
        """Make the same change to every row that meets the conditions."""
        rows = self.select_rows(call)
        for row in rows:
            call.scope = call.make_scope(row)
            self.overwrite(call, row, {})
        shown_keys = [row[self.home.key] for row in rows[:_SHOWN_KEYS]]
        return {"count": len(rows), "updated": shown_keys}


class _Making(Writing):
    """Operations whose effect is a new row, of `into` or otherwise of their entity."""

    show: Names = ()

    @cached_property
    def made(self) -> Entity:
        """The entity of the new row."""
        return self.entities[getattr(self, "into", self.entity)]

    def make_row(self, call: Call, values: Json) -> Json:
        """Make the row from `values`, the arguments and `set`; return the fields it shows."""
        values = values | call.given_args(self.made.fields)
        values |= _evaluate(call, self.set, self.made)
        return self.made.show(_add_row(call, self.made, values), self.show)

    @operation("with -> made")
    def create(self, call: Call, unique: Names = ()) -> Json:
        """Make a new row from the parameters under `with`; `unique` fields may not repeat."""
        values = call.given_args(self.home.fields) | _evaluate(call, self.set, self.home)
        if unique:
            for other in call.rows(self.entity):
                who = f"{self.home.noun} {other[self.home.key]}"
                is_same = all(other[name] == values.get(name) for name in unique)
                refuse(is_same, f"{who} already has the same {' and '.join(unique)}")
        return self.make_row(call, {})

    @operation("key with -> copied_from:key made")
    def copy_(self, call: Call) -> Json:
        """Make a new row like an existing one, apart from what `with` and `set` give."""
        return {"copied_from": call.row[self.home.key]} | self.make_row(call, call.row)

    @operation("key quantity with -> made capacity")
    def reserve(self, call: Call, capacity: str, into: str, quantity: str = "") -> Json:
        """Take a quantity of what a row has left, and make a row of `into` for it."""
        key = call.row[self.home.key]
        left = call.row[capacity]
        taken = call.args[quantity] if quantity else 1
        refuse(left < taken, f"{self.home.noun} {key} has {left} left, not {taken}")
        stored = call.change(self.home, call.row, {capacity: left - taken})
        reference = call.entities.reference(into, self.entity)
        return self.make_row(call, {reference: key}) | stored


class _Booking(Calendar, _Making):
    """A new row that occupies a part of a day."""

    @operation("resource date start duration_minutes with -> made")
    def book(self, call: Call) -> Json:
        """Book a part of a resource's day, unless it is busy or lies outside the hours."""
        opening = minutes_of_day(self.hours[0])
        closing = minutes_of_day(self.hours[1])
        start = minutes_of_day(call.args["start"])
        end = start + call.args["duration_minutes"]
        is_outside = start < opening or end > closing
        refuse(is_outside, f"outside {self.hours[0]} to {self.hours[1]}")
        for busy_start, busy_end in self.busy_times(call):
            overlaps = start < busy_end and busy_start < end
            refuse(overlaps, f"taken from {format_clock(busy_start)} to {format_clock(busy_end)}")
        call.scope["end"] = format_clock(end)
        return self.make_row(call, {"end": format_clock(end)})
