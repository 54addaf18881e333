"""The operations that read."""

from __future__ import annotations

import re
from functools import cache, cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, InstanceOf

from sharpen.types import Json
from sharpen.world.expressions import Expr, Expression, Where, clock, minutes, parse_named
from sharpen.world.fields import plain
from sharpen.world.operations import Call, Names, Operation, operation, refuse, tidy
from sharpen.world.state import Scope

SHOWN, GROUPS = 5, 8  # rows and groups in an answer that has no limit of its own
Order = Literal["highest", "lowest"]
NOTHING: dict[str, Names] = {}
expression = cache(Expression)


class Figure:
    """`sum amount`, `average fare if cabin == 'economy'`, `count`, `share paid`."""

    ways = ("sum", "count", "average", "share", "lowest", "highest")
    pattern = re.compile(rf"({'|'.join(ways)})(?: (.+?))?(?: if (.+))?")

    def __init__(self, source: Any):
        match = self.pattern.fullmatch(str(source).strip())
        if not match or (match[1] != "count" and not match[2]):
            raise ValueError(f"expected {'|'.join(self.ways)} EXPR, found {source!r}")
        when = f" if {match[3]} else None" if match[3] else ""
        self.how, self.value = match[1], Expression(f"{match[2] or 1}{when}")

    def __call__(self, scopes: list[Scope]) -> Any:
        values = [value for value in map(self.value, scopes) if value is not None]
        if self.how in ("average", "share"):
            return plain(round(sum(values) / len(values), 2)) if values else None
        if self.how in ("lowest", "highest"):
            return (min if self.how == "lowest" else max)(values, default=None)
        return tidy(sum(values)) if self.how == "sum" else sum(map(bool, values))


Figures = dict[str, Annotated[InstanceOf[Figure], BeforeValidator(Figure)]]


def totals(figures: Figures, call: Call, rows: list[Json]) -> Json:
    scopes = [call.names(row) for row in rows]
    return {name: figure(scopes) for name, figure in figures.items()}


def grouped(rows: list[Json], by: str) -> dict[str, list[Json]]:
    groups: dict[str, list[Json]] = {}
    for row in rows:
        groups.setdefault(str(row[by]), []).append(row)
    return dict(sorted(groups.items()))


class Selecting(Operation):
    """Operations over the rows that conditions keep."""

    where: tuple[Where, ...] = ()
    keep: Expr | None = None

    @cached_property
    def conditions(self) -> tuple[Where, ...]:
        parent: str = getattr(self, "of", "")
        return (parse_named(parent), *self.where) if parent else self.where

    def selected(self, call: Call) -> list[Json]:
        rows = call.rows(self.entity)
        for condition in self.conditions:
            rows = [row for row in rows if condition.holds(row, call.args)]
        if self.keep is not None:
            rows = [row for row in rows if self.keep(call.names(row))]
        return list(rows)

    @operation("filters with -> count:integer rows")
    def search(self, call: Call, sort: str = "", show: Names = ()) -> Json:
        """Rows that meet the conditions, by a field or `-field`, the other way round."""
        rows, name = self.selected(call), sort.removeprefix("-")
        if sort:
            empty = [row for row in rows if row[name] is None]
            rows = [row for row in rows if row[name] is not None]
            rows = sorted(rows, key=lambda row: row[name], reverse=sort.startswith("-")) + empty
        shown = [self.home.show(row, show) for row in rows[:SHOWN]]
        return {"count": len(rows), self.home.plural: shown}

    @operation("filters with -> count:integer rows")
    def history(self, call: Call, of: str, sort: str, show: Names = ()) -> Json:
        """What happened to one parent row, latest first: `of` is the reference to it."""
        return self.search(call, sort, show)

    @operation("filters with -> show")
    def lookup(self, call: Call, show: Names = ()) -> Json:
        """The one row that its natural names point at; several are a conflict."""
        rows, home = self.selected(call), self.home
        refuse(not rows, f"no {home.noun} matches", "not_found")
        keys = ", ".join(str(row[home.key]) for row in rows[:5])
        refuse(len(rows) > 1, f"{len(rows)} {home.noun} records match: {keys}")
        return home.show(rows[0], show)

    @operation("filters with top -> count:integer rows")
    def rank(
        self, call: Call, by: Expr, order: Order = "highest", show: Names = (), score: str = ""
    ) -> Json:
        """The first few rows by a figure worked out for each."""
        scored = [(tidy(by(call.names(row))), row) for row in self.selected(call)]
        scored.sort(key=lambda pair: pair[0], reverse=order == "highest")
        shown = []
        for value, row in scored[: call.args["top"]]:
            shown.append(self.home.show(row, show) | ({score: value} if score else {}))
        return {"count": len(scored), self.home.plural: shown}

    @operation("filters with -> count:integer spread")
    def count(self, call: Call, group: str = "") -> Json:
        """How many rows meet the conditions, and how they spread over a field's values."""
        rows = self.selected(call)
        spread = {name: len(found) for name, found in grouped(rows, group).items()} if group else {}
        return {"count": len(rows)} | ({f"by_{group}": spread} if group else {})

    @operation("filters with group_by -> count:integer groups")
    def aggregate(self, call: Call, figures: Figures, group: Names = ()) -> Json:
        """Figures over the rows, in all or by a field; several are a choice, `group_by`."""
        rows = self.selected(call)
        if not group:
            return {"count": len(rows)} | totals(figures, call, rows)
        by = call.args.get("group_by") or group[0]
        groups = list(grouped(rows, by).items())[:GROUPS]
        found = [{by: name} | totals(figures, call, members) for name, members in groups]
        return {"count": len(rows), "groups": found}


class Calendar(Operation):
    """Operations over rows that take a stretch of a day from a resource."""

    resource: str
    hours: tuple[str, str] = ("08:00", "18:00")
    busy: Expr = Expression(True)

    def taken(self, call: Call) -> list[tuple[int, int]]:
        """The busy stretches of the resource's day, in order."""
        rows = call.rows(self.entity)
        for name in (self.resource, "date"):
            rows = [row for row in rows if row[name] == call.args[name]]
        kept = [row for row in rows if self.busy(call.names(row))]
        return sorted((minutes(row["start"]), minutes(row["end"])) for row in kept)

    @operation("place duration_minutes with -> count:integer slots")
    def free_slots(self, call: Call) -> Json:
        """Stretches of a resource's day that are still free and long enough."""
        at, closed = map(minutes, self.hours)
        slots = []
        for start, end in [*self.taken(call), (closed, closed)]:
            if start - at >= call.args["duration_minutes"]:
                slots.append({"start": clock(at), "end": clock(start)})
            at = max(at, end)
        return {"count": len(slots), "slots": slots[:SHOWN]}


class Looking(Operation):
    """Operations on rows whose keys are given, or on none."""

    @operation("key with -> show children")
    def get(self, call: Call, show: Names = (), include: dict[str, Names] = NOTHING) -> Json:
        """One row by its key, and rows of other entities that refer to it."""
        result = self.home.show(call.row, show)
        for child, names in include.items():
            other, found = call.entities[child], call.children(child, self.home)
            result[other.plural] = [other.show(row, names) for row in found[:SHOWN]]
        return result

    @operation("key with -> show figures:number")
    def summary(self, call: Call, of: str, figures: Figures, show: Names) -> Json:
        """One row with figures over the rows of another entity that refer to it."""
        found = totals(figures, call, call.children(of, self.home))
        call.scope.update(found)
        return self.home.show(call.row, show) | found

    @operation("keys4 with -> rows best:key")
    def compare(self, call: Call, show: Names, best: Figures) -> Json:
        """Two to four rows side by side, and which of them wins by which measure."""
        home = self.home
        rows = [call.find(self.entity, key) for key in call.args[f"{home.key}s"]]
        result: Json = {home.plural: [home.show(row, show) for row in rows]}
        for name, figure in best.items():
            scored = [(figure.value(call.names(row)), row[home.key]) for row in rows]
            pick = max if figure.how == "highest" else min
            result[name] = pick(scored, key=lambda pair: pair[0])[1]
        return result

    @operation("key with ->")
    def compute(self, call: Call, returns: dict[str, Expr]) -> Json:
        """Figures worked out from the arguments and, with `entity`, from a row."""
        return {}

    @operation("key with -> valid:boolean failed_checks:[string]")
    def validate_(self, call: Call, rules: dict[str, Expr]) -> Json:
        """A verdict by rules, each of which must hold; `rules` maps what to say to it."""
        failed = [text for text, rule in rules.items() if not rule(call.scope)]
        return {"valid": not failed, "failed_checks": failed}

    @operation("key with -> text:string")
    def compose(self, call: Call, text: dict[str, str]) -> Json:
        """Text made from a row and the arguments; `{name}` and `{entity.field}` are filled in."""

        def fill(match: re.Match[str]) -> str:
            return str(expression(match[1])(call.scope))

        return {name: re.sub(r"\{([\w.]+)\}", fill, said) for name, said in text.items()}

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
        """An amount in another unit; `table` gives their sizes: a factor, or [factor, offset]."""
        one, other = call.args[source], call.args[target]
        refuse(one == other, f"{source} and {target} are the same", "invalid_argument")
        sizes = (s if isinstance(s, tuple) else (s, 0.0) for s in (table[one], table[other]))
        (up, start), (down, end) = sizes
        value = round((call.args[amount] * up + start - end) / down, digits)
        call.scope["converted"] = value
        return {"converted": value, "unit": other}
