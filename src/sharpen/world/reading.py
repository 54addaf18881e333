"""The operations that read. `domain.py` loads this file to register them."""

from __future__ import annotations

import re
from functools import cache, cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, InstanceOf

from sharpen.types import Json
from sharpen.world.expressions import (
    Expr,
    Expression,
    Where,
    format_clock,
    minutes_of_day,
    parse_named,
)
from sharpen.world.fields import plain
from sharpen.world.operations import Call, Names, Operation, operation, refuse, tidy
from sharpen.world.state import Scope

_SHOWN_ROWS = 5  # in an answer that has no limit of its own
_SHOWN_GROUPS = 8
_Order = Literal["highest", "lowest"]
_NOTHING: dict[str, Names] = {}
_compile_expression = cache(Expression)


# Figures ------------------------------------------------------------------------------------------


class Figure:
    """A figure over rows, such as `sum amount` or `average fare if cabin == 'economy'`.

    `how` is its first word; the expression `value` gives the value of one row, or None.
    """

    _WAYS = ("sum", "count", "average", "share", "lowest", "highest")
    _PATTERN = re.compile(rf"({'|'.join(_WAYS)})(?: (.+?))?(?: if (.+))?")

    def __init__(self, source: Any):
        match = self._PATTERN.fullmatch(str(source).strip())
        if not match or (match[1] != "count" and not match[2]):
            raise ValueError(f"expected {'|'.join(self._WAYS)} EXPR, found {source!r}")
        self.how, value, condition = match.groups()
        value_source = value or "1"
        if condition:
            value_source += f" if {condition} else None"
        self.value = Expression(value_source)

    def __call__(self, scopes: list[Scope]) -> Any:
        values = [value for value in map(self.value, scopes) if value is not None]
        match self.how:
            case "average" | "share":
                return plain(round(sum(values) / len(values), 2)) if values else None
            case "lowest":
                return min(values, default=None)
            case "highest":
                return max(values, default=None)
            case "sum":
                return tidy(sum(values))
        return len([value for value in values if value])  # count


Figures = dict[str, Annotated[InstanceOf[Figure], BeforeValidator(Figure)]]


def _compute_figures(figures: Figures, call: Call, rows: list[Json]) -> Json:
    scopes = [call.make_scope(row) for row in rows]
    return {name: figure(scopes) for name, figure in figures.items()}


def _group_rows(rows: list[Json], by: str) -> dict[str, list[Json]]:
    """Returns value of the field → rows with it, sorted by value."""
    groups: dict[str, list[Json]] = {}
    for row in rows:
        groups.setdefault(str(row[by]), []).append(row)
    return dict(sorted(groups.items()))


# Operations ---------------------------------------------------------------------------------------


class Selecting(Operation):
    """Operations over the rows that meet conditions."""

    where: tuple[Where, ...] = ()
    keep: Expr | None = None

    @cached_property
    def conditions(self) -> tuple[Where, ...]:
        """The conditions under `where`; with `of`, also that a row refers to the given parent."""
        parent: str = getattr(self, "of", "")
        return (parse_named(parent), *self.where) if parent else self.where

    def select_rows(self, call: Call) -> list[Json]:
        """Returns the rows that meet the conditions and the `keep` expression."""
        rows = call.rows(self.entity)
        for condition in self.conditions:
            rows = [row for row in rows if condition.holds(row, call.args)]
        if self.keep is not None:
            rows = [row for row in rows if self.keep(call.make_scope(row))]
        return list(rows)

    @operation("filters with -> count:integer rows")
    def search(self, call: Call, sort: str = "", show: Names = ()) -> Json:
        """Find rows that meet the conditions, sorted by a field, or downwards by `-field`."""
        rows = self.select_rows(call)
        if sort:
            name = sort.removeprefix("-")
            is_downwards = sort.startswith("-")
            without_value = [row for row in rows if row[name] is None]
            with_value = [row for row in rows if row[name] is not None]
            with_value.sort(key=lambda row: row[name], reverse=is_downwards)
            rows = with_value + without_value
        shown = [self.home.show(row, show) for row in rows[:_SHOWN_ROWS]]
        return {"count": len(rows), self.home.plural: shown}

    @operation("filters with -> count:integer rows")
    def history(self, call: Call, of: str, sort: str, show: Names = ()) -> Json:
        """List what happened to one parent row, latest first; `of` is the reference to it."""
        return self.search(call, sort, show)

    @operation("filters with -> show")
    def lookup(self, call: Call, show: Names = ()) -> Json:
        """Find the one row that its natural names point at; several are a conflict."""
        home = self.home
        rows = self.select_rows(call)
        refuse(not rows, f"no {home.noun} matches", "not_found")
        keys = ", ".join(str(row[home.key]) for row in rows[:5])
        refuse(len(rows) > 1, f"{len(rows)} {home.noun} records match: {keys}")
        return home.show(rows[0], show)

    @operation("filters with top -> count:integer rows")
    def rank(
        self, call: Call, by: Expr, order: _Order = "highest", show: Names = (), score: str = ""
    ) -> Json:
        """List the first few rows by a figure computed for each."""
        scored = [(tidy(by(call.make_scope(row))), row) for row in self.select_rows(call)]
        scored.sort(key=lambda pair: pair[0], reverse=order == "highest")
        shown = []
        for value, row in scored[: call.args["top"]]:
            shown_row = self.home.show(row, show)
            if score:
                shown_row[score] = value
            shown.append(shown_row)
        return {"count": len(scored), self.home.plural: shown}

    @operation("filters with -> count:integer spread")
    def count(self, call: Call, group: str = "") -> Json:
        """Count rows that meet the conditions, with `group` also per value of a field."""
        rows = self.select_rows(call)
        result: Json = {"count": len(rows)}
        if group:
            groups = _group_rows(rows, group)
            result[f"by_{group}"] = {value: len(members) for value, members in groups.items()}
        return result

    @operation("filters with group_by -> count:integer groups")
    def aggregate(self, call: Call, figures: Figures, group: Names = ()) -> Json:
        """Compute figures over the rows, with `group` per value of a field.

        Where `group` has several fields, the argument `group_by` chooses one.
        """
        rows = self.select_rows(call)
        if not group:
            return {"count": len(rows)} | _compute_figures(figures, call, rows)
        by = call.args.get("group_by") or group[0]
        groups = list(_group_rows(rows, by).items())
        shown = []
        for value, members in groups[:_SHOWN_GROUPS]:
            shown.append({by: value} | _compute_figures(figures, call, members))
        return {"count": len(rows), "groups": shown}


class Calendar(Operation):
    """Operations over rows that occupy a part of a resource's day."""

    resource: str
    hours: tuple[str, str] = ("08:00", "18:00")
    busy: Expr = Expression(True)

    def busy_times(self, call: Call) -> list[tuple[int, int]]:
        """Returns start and end of each occupied part of the resource's day, in order."""
        rows = call.rows(self.entity)
        for name in (self.resource, "date"):
            rows = [row for row in rows if row[name] == call.args[name]]
        times = []
        for row in rows:
            if self.busy(call.make_scope(row)):
                times.append((minutes_of_day(row["start"]), minutes_of_day(row["end"])))
        return sorted(times)

    @operation("place duration_minutes with -> count:integer slots")
    def free_slots(self, call: Call) -> Json:
        """List the parts of a resource's day that are free and long enough."""
        free_from = minutes_of_day(self.hours[0])
        closing = minutes_of_day(self.hours[1])
        slots = []
        for start, end in [*self.busy_times(call), (closing, closing)]:
            if start - free_from >= call.args["duration_minutes"]:
                slots.append({"start": format_clock(free_from), "end": format_clock(start)})
            free_from = max(free_from, end)
        return {"count": len(slots), "slots": slots[:_SHOWN_ROWS]}


class _Looking(Operation):
    """Operations on rows whose keys are given, or on no row."""

    @operation("key with -> show children")
    def get(self, call: Call, show: Names = (), include: dict[str, Names] = _NOTHING) -> Json:
        """Show one row by its key, and rows of other entities that refer to it."""
        result = self.home.show(call.row, show)
        for name, fields in include.items():
            child = call.entities[name]
            rows = call.children(name, self.home)
            result[child.plural] = [child.show(row, fields) for row in rows[:_SHOWN_ROWS]]
        return result

    @operation("key with -> show figures:number")
    def summary(self, call: Call, of: str, figures: Figures, show: Names) -> Json:
        """Show one row with figures over the rows of another entity that refer to it."""
        values = _compute_figures(figures, call, call.children(of, self.home))
        call.scope.update(values)
        return self.home.show(call.row, show) | values

    @operation("keys4 with -> rows best:key")
    def compare(self, call: Call, show: Names, best: Figures) -> Json:
        """Show two to four rows side by side, and which of them wins by which measure."""
        home = self.home
        rows = [call.find(self.entity, key) for key in call.args[f"{home.key}s"]]
        result: Json = {home.plural: [home.show(row, show) for row in rows]}
        for name, figure in best.items():
            scored = [(figure.value(call.make_scope(row)), row[home.key]) for row in rows]
            pick = max if figure.how == "highest" else min
            _, key = pick(scored, key=lambda pair: pair[0])
            result[name] = key
        return result

    @operation("key with ->")
    def compute(self, call: Call, returns: dict[str, Expr]) -> Json:
        """Compute figures from the arguments and, with `entity`, from a row."""
        return {}  # `Operation.execute` adds what is under `returns`

    @operation("key with -> valid:boolean failed_checks:[string]")
    def validate_(self, call: Call, rules: dict[str, Expr]) -> Json:
        """Check rules, each of which must hold; `rules` maps what to say to the expression."""
        failed = [text for text, rule in rules.items() if not rule(call.scope)]
        return {"valid": not failed, "failed_checks": failed}

    @operation("key with -> text:string")
    def compose(self, call: Call, text: dict[str, str]) -> Json:
        """Fill `{name}` and `{entity.field}` in texts, from a row and the arguments."""

        def fill(match: re.Match[str]) -> str:
            return str(_compile_expression(match[1])(call.scope))

        return {name: re.sub(r"\{([\w.]+)\}", fill, template) for name, template in text.items()}

    @operation("amount from_unit to_unit with -> converted:number unit:string")
    def convert(
        self,
        call: Call,
        table: dict[str, float | tuple[float, float]],
        amount: str = "amount",
        source: str = "from_unit",
        target: str = "to_unit",
        digits: int = 2,
    ) -> Json:
        """Convert an amount to another unit.

        `table` has the size of each unit: a factor, or [factor, offset].
        """
        source_unit = call.args[source]
        target_unit = call.args[target]
        is_same = source_unit == target_unit
        refuse(is_same, f"{source} and {target} are the same", "invalid_argument")
        source_factor, source_offset = _factor_and_offset(table[source_unit])
        target_factor, target_offset = _factor_and_offset(table[target_unit])
        in_base_unit = call.args[amount] * source_factor + source_offset
        value = round((in_base_unit - target_offset) / target_factor, digits)
        call.scope["converted"] = value
        return {"converted": value, "unit": target_unit}


def _factor_and_offset(size: float | tuple[float, float]) -> tuple[float, float]:
    return size if isinstance(size, tuple) else (size, 0.0)
