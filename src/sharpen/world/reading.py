"""The operation templates that read."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, InstanceOf
from pydantic import Field as Setting

from sharpen.types import Json
from sharpen.world.expressions import (
    Condition,
    Expr,
    Expression,
    Named,
    ToolFailure,
    clock,
    minutes,
)
from sharpen.world.fields import Field, plain
from sharpen.world.state import Entities, Scope
from sharpen.world.templates import (
    Calendar,
    Call,
    Operation,
    Param,
    Selecting,
    Shape,
    conflict,
    tidy,
)

SHOWN, GROUPS = 5, 8  # rows and groups in an answer that has no limit of its own
FIGURE = re.compile(r"(sum|average|lowest|highest|count|share)(?: (.+?))?(?: if (.+))?")


def counted(entities: Entities, entity: str, names: Any, **more: Shape) -> Shape:
    """`count` and some rows."""
    known = entities[entity]
    return {"count": "integer", known.plural: [known.select(names) | more]}


def ordered(rows: list[Json], by: str) -> list[Json]:
    """Rows by a field, `-field` for the other way round; empty values last."""
    if not by:
        return rows
    name = by.removeprefix("-")
    filled = [row for row in rows if row[name] is not None]
    filled.sort(key=lambda row: row[name], reverse=by.startswith("-"))
    return filled + [row for row in rows if row[name] is None]


class Search(Selecting):
    """Rows that meet the conditions."""

    op = "search"
    sort: str = ""
    show: tuple[str, ...] = ()
    limit: int = SHOWN

    def run(self, call: Call, row: Json) -> Json:
        rows = ordered(self.selected(call), self.sort)
        shown = [call.entity.show(r, self.show) for r in rows[: self.limit]]
        return {"count": len(rows), call.entity.plural: shown}

    def shape(self, entities: Entities) -> Shape:
        return counted(entities, self.entity, self.show)


class History(Search):
    """What happened to one parent row, latest first: `of` is the reference to it."""

    op = "history"
    of: str
    sort: str

    def parameters(self, entities: Entities) -> list[Param]:
        parent = self.filter_param(entities[self.entity], Condition(self.of, "=", Named(self.of)))
        return [parent, *(p for p in super().parameters(entities) if p.name != self.of)]

    def selected(self, call: Call) -> list[Json]:
        return [row for row in super().selected(call) if row[self.of] == call.args[self.of]]


class Get(Operation):
    """One row by its key, and rows of other entities that refer to it."""

    op = "get"
    keyed = True
    entity: str
    show: tuple[str, ...] = ()
    include: dict[str, list[str]] = Setting({})

    def run(self, call: Call, row: Json) -> Json:
        result = call.entity.show(row, self.show)
        for child, names in self.include.items():
            other = call.entities[child]
            shown = [other.show(r, names) for r in call.children(child, row)[:SHOWN]]
            result[other.plural] = shown
        return result

    def shape(self, entities: Entities) -> Shape:
        result: Json = dict(entities[self.entity].select(self.show))
        for child, names in self.include.items():
            entities.reference(child, self.entity)
            result[entities[child].plural] = [entities[child].select(names)]
        return result


class Lookup(Selecting):
    """The one row that its natural names point at; several are a conflict."""

    op = "lookup"
    show: tuple[str, ...] = ()

    def run(self, call: Call, row: Json) -> Json:
        entity, rows = call.entity, self.selected(call)
        if not rows:
            raise ToolFailure("not_found", f"no {entity.noun} matches")
        if len(rows) > 1:
            keys = ", ".join(str(r[entity.key]) for r in rows[:5])
            raise conflict(f"{len(rows)} {entity.noun} records match: {keys}")
        return entity.show(rows[0], self.show)

    def shape(self, entities: Entities) -> Shape:
        return entities[self.entity].select(self.show)


def grouped(rows: list[Json], by: str) -> dict[str, list[Json]]:
    groups: dict[str, list[Json]] = {}
    for row in rows:
        groups.setdefault(str(row[by]), []).append(row)
    return dict(sorted(groups.items()))


class Count(Selecting):
    """How many rows meet the conditions, and how they spread over a field's values."""

    op = "count"
    group: str = ""

    def run(self, call: Call, row: Json) -> Json:
        rows = self.selected(call)
        result: Json = {"count": len(rows)}
        if self.group:
            spread = {name: len(found) for name, found in grouped(rows, self.group).items()}
            result[f"by_{self.group}"] = spread
        return result

    def shape(self, entities: Entities) -> Shape:
        return {"count": "integer"} | ({f"by_{self.group}": "object"} if self.group else {})


class Figure:
    """`sum amount`, `average fare if cabin == 'economy'`, `count`, `share paid`."""

    def __init__(self, source: Any):
        match = FIGURE.fullmatch(str(source).strip())
        if not match or (match[1] != "count" and not match[2]):
            kinds = "sum|average|lowest|highest|count|share"
            raise ValueError(f"expected {kinds} EXPR, found {source!r}")
        self.how, self.value = match[1], Expression(match[2] or 1)
        self.when = Expression(match[3]) if match[3] else None

    def __call__(self, scopes: list[Scope]) -> Any:
        kept = [s for s in scopes if self.when is None or self.when(s)]
        values = [v for v in (self.value(s) for s in kept) if v is not None]
        if self.how in ("count", "sum"):
            return tidy(sum(bool(v) if self.how == "count" else v for v in values))
        if not values:
            return None
        if self.how in ("lowest", "highest"):
            return (min if self.how == "lowest" else max)(values)
        return plain(round(sum(values) / len(values), 2))


Figures = dict[str, Annotated[InstanceOf[Figure], BeforeValidator(Figure)]]


def totals(figures: dict[str, Any], call: Call, rows: list[Json]) -> Json:
    scopes = [call.names(row) for row in rows]
    return {name: figure(scopes) for name, figure in figures.items()}


class Aggregate(Selecting):
    """Figures over the rows that meet the conditions, in all or by the values of a field; several
    fields under `group` become a `group_by` parameter."""

    op = "aggregate"
    figures: Figures
    group: tuple[str, ...] = ()

    def parameters(self, entities: Entities) -> list[Param]:
        entities[self.entity].select(self.group)
        kind = {"kind": "choice", "spec": self.group, "about": "field to group the figures by"}
        by = [Param("group_by", Field.model_validate(kind))] if len(self.group) > 1 else []
        return super().parameters(entities) + by

    def run(self, call: Call, row: Json) -> Json:
        rows = self.selected(call)
        result: Json = {"count": len(rows)}
        if not self.group:
            return result | totals(self.figures, call, rows)
        by = call.args.get("group_by") or self.group[0]
        groups = list(grouped(rows, by).items())[:GROUPS]
        return result | {"groups": [{by: n} | totals(self.figures, call, g) for n, g in groups]}

    def shape(self, entities: Entities) -> Shape:
        numbers = dict.fromkeys(self.figures, "number")
        return {"count": "integer"} | ({"groups": [numbers]} if self.group else numbers)


class Rank(Selecting):
    """The first few rows by a figure worked out for each."""

    op = "rank"
    by: Expr
    order: str = Setting("highest", pattern="^(highest|lowest)$")
    top: int = 3
    show: tuple[str, ...] = ()
    score: str = ""

    def parameters(self, entities: Entities) -> list[Param]:
        kind = Field(kind="int", spec=(1, 5), about="how many to return", bounds=(1, 10))
        top = Param("top", kind, required=False, default=self.top)
        return [*super().parameters(entities), top]

    def run(self, call: Call, row: Json) -> Json:
        scored = [(tidy(self.by(call.names(r))), r) for r in self.selected(call)]
        scored.sort(key=lambda pair: pair[0], reverse=self.order == "highest")
        shown = [
            call.entity.show(r, self.show) | ({self.score: value} if self.score else {})
            for value, r in scored[: call.args["top"]]
        ]
        return {"count": len(scored), call.entity.plural: shown}

    def shape(self, entities: Entities) -> Shape:
        score = {self.score: "number"} if self.score else {}
        return counted(entities, self.entity, self.show, **score)


class Compare(Operation):
    """Two to four rows side by side, and which of them wins by which measure."""

    op = "compare"
    entity: str
    show: list[str]
    best: Figures

    def parameters(self, entities: Entities) -> list[Param]:
        return [self.keys_param(entities, 4), *super().parameters(entities)]

    def run(self, call: Call, row: Json) -> Json:
        entity = call.entity
        rows = [call.find(self.entity, key) for key in call.args[f"{entity.key}s"]]
        result: Json = {entity.plural: [entity.show(r, self.show) for r in rows]}
        for name, figure in self.best.items():
            scored = [(figure.value(call.names(r)), r[entity.key]) for r in rows]
            pick = max if figure.how == "highest" else min
            result[name] = pick(scored, key=lambda pair: pair[0])[1]
        return result

    def shape(self, entities: Entities) -> Shape:
        entity = entities[self.entity]
        rows = {entity.plural: [entity.select(self.show)]}
        return rows | dict.fromkeys(self.best, entity.reference())


class Compute(Operation):
    """Figures worked out from the arguments and, with `entity`, from a row: all under `returns`."""

    op = "compute"
    keyed = True
    returns: dict[str, Expr]


class Convert(Operation):
    """An amount in another unit. `table` gives each unit's size in a common one: a factor, or
    [factor, offset]."""

    op = "convert"
    answers: ClassVar = {"converted": "number", "unit": "string"}
    table: dict[str, float | tuple[float, float]]
    amount: str = "amount"
    source: str = "from_unit"
    target: str = "to_unit"
    digits: int = 2

    def parameters(self, entities: Entities) -> list[Param]:
        found = [self.param(entities, Named(self.amount))]
        for name, way in ((self.source, "from"), (self.target, "to")):
            kind = Field(kind="choice", spec=tuple(self.table), about=f"unit to convert {way}")
            found.append(Param(name, self.params.get(name) or kind))
        return found + super().parameters(entities)

    def run(self, call: Call, row: Json) -> Json:
        source, target = call.args[self.source], call.args[self.target]
        if source == target:
            raise ToolFailure("invalid_argument", f"{self.source} and {self.target} are the same")
        sizes = (self.table[source], self.table[target])
        (up, start), (down, end) = (s if isinstance(s, tuple) else (s, 0.0) for s in sizes)
        value = round((call.args[self.amount] * up + start - end) / down, self.digits)
        call.scope["converted"] = value
        return {"converted": value, "unit": target}


class Validate(Operation):
    """A verdict by rules, each of which must hold; `rules` maps what to say to the expression."""

    op = "validate"
    answers: ClassVar = {"valid": "boolean", "failed_checks": ["string"]}
    keyed = True
    rules: dict[str, Expr]

    def run(self, call: Call, row: Json) -> Json:
        failed = [text for text, rule in self.rules.items() if not rule(call.scope)]
        return {"valid": not failed, "failed_checks": failed}


class Summary(Operation):
    """One row with figures over the rows of another entity that refer to it."""

    op = "summary"
    keyed = True
    entity: str
    of: str
    figures: Figures
    show: list[str]

    def run(self, call: Call, row: Json) -> Json:
        figures = totals(self.figures, call, call.children(self.of, row))
        call.scope.update(figures)
        return call.entity.show(row, self.show) | figures

    def shape(self, entities: Entities) -> Shape:
        entities.reference(self.of, self.entity)
        return entities[self.entity].select(self.show) | dict.fromkeys(self.figures, "number")


@cache
def expression(source: str) -> Expression:
    return Expression(source)


class Compose(Operation):
    """Text made from a row and the arguments; `{name}` and `{entity.field}` are filled in."""

    op = "compose"
    keyed = True
    text: dict[str, str]

    def run(self, call: Call, row: Json) -> Json:
        def fill(match: re.Match[str]) -> str:
            return str(expression(match[1])(call.scope))

        return {name: re.sub(r"\{([\w.]+)\}", fill, text) for name, text in self.text.items()}

    def shape(self, entities: Entities) -> Shape:
        return dict.fromkeys(self.text, "string")


class FreeSlots(Calendar):
    """Stretches of a resource's day that are still free and long enough."""

    op = "free_slots"
    answers: ClassVar = {"count": "integer", "slots": [{"start": "string", "end": "string"}]}

    def parameters(self, entities: Entities) -> list[Param]:
        *where, length = self.day_params(entities)
        found = [replace(p, anchor=p.name) for p in where]
        return [*found, length, *super().parameters(entities)]

    def run(self, call: Call, row: Json) -> Json:
        at, closed = map(minutes, self.hours)
        need, slots = call.args["duration_minutes"], []
        for start, end in [*self.taken(call), (closed, closed)]:
            if start - at >= need:
                slots.append({"start": clock(at), "end": clock(start)})
            at = max(at, end)
        return {"count": len(slots), "slots": slots[:SHOWN]}
