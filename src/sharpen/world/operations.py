"""The operation templates that read: each is a class whose fields are the settings a domain file
may give it. `effects` holds those that write.

A tool is one template with settings. A template says which parameters its tool takes, what it
answers, and how the answer is found; guards, references and extra results work alike for all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, InstanceOf
from pydantic import Field as Setting

from sharpen.config import Config
from sharpen.types import Json
from sharpen.world.expressions import (
    Expr,
    Expression,
    Named,
    NamedParam,
    ToolFailure,
    Where,
    clock,
    minutes,
)
from sharpen.world.fields import Field, plain, value_schema
from sharpen.world.state import Entities, Entity, Scope, Tables

Shape = Any  # Field, a JSON type's name, [Shape] or {name: Shape}
LIMITS = {"<=": "upper limit for", "<": "upper limit for", ">=": "lower limit for"}
LIMITS |= {">": "lower limit for", "contains": "words to look for in"}


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of a tool. `anchor` and `op` tie it to a field of the rows that it selects."""

    name: str
    field: Field
    required: bool = True
    default: Any = None
    many: tuple[int, int] | None = None
    anchor: str = ""
    op: str = "="

    def schema(self) -> Json:
        out = value_schema(self.field)
        if self.many:
            about = out.pop("description", "")
            out = {"type": "array", "items": out, "minItems": self.many[0], "description": about}
            out |= {"maxItems": self.many[1], "uniqueItems": True}
        return out | ({"default": self.default} if self.default is not None else {})


@dataclass(slots=True)
class Call:
    """One execution: the arguments, the state it reads, and what it wants to write."""

    entities: Entities
    tables: Tables
    params: Mapping[str, Param]
    args: Json
    constants: Json
    scope: Scope = field(init=False)
    writes: list[tuple[Entity, str, Json | None]] = field(default_factory=list)

    def find(self, entity: str, key: Any) -> Json:
        return self.tables.find(self.entities[entity], key)

    def rows(self, entity: str) -> Iterable[Json]:
        return self.tables.rows(self.entities[entity]).values()

    def names(self, row: Json | None) -> Scope:
        """A scope over `row`; an optional argument that was not given hides nothing."""
        given = {n: v for n, v in self.args.items() if v is not None}
        blank = dict.fromkeys(self.params)
        return Scope(self.entities, self.find, blank | self.constants | (row or {}) | given)

    def enter(self, row: Json | None) -> None:
        """Open the scope and follow every reference among the arguments; an unknown one fails."""
        self.scope = self.names(row)
        for param in self.params.values():
            if param.field.kind != "ref" or self.args.get(param.name) is None:
                continue
            keys = self.args[param.name] if param.many else [self.args[param.name]]
            found = [self.find(param.field.spec, key) for key in keys]
            self.scope.setdefault(param.name.removesuffix("_id"), found[0])


class Operation(Config):
    """What every tool of a domain file says, whatever its template."""

    about: str
    goal: str
    ask: list[str]
    say: list[str]
    vague: str = ""
    pick: str = ""
    entity: str = ""
    params: dict[str, Field] = Setting({})
    with_: tuple[NamedParam, ...] = Setting((), alias="with")
    require: dict[Expr, str] = Setting({})
    deny: dict[Expr, str] = Setting({})
    returns: dict[str, Expr] = Setting({})

    op: ClassVar[str] = ""
    keyed: ClassVar[bool] = False
    writes: ClassVar[bool] = False

    def key_param(self, entities: Entities, name: str = "", **settings: Any) -> Param:
        entity = entities[self.entity]
        said = self.params.get(name) or entity.fields[entity.key]
        kind = Field(kind="ref", spec=self.entity, about=said.about, question=said.question)
        return Param(name or entity.key, kind, **settings)

    def param(self, entities: Entities, named: Named, *homes: str) -> Param:
        """A parameter by name: declared under `params`, or a field of one of the entities."""
        if named.name in self.params:
            found = self.params[named.name]
        else:
            fields = [entities[h].fields for h in (*homes, self.entity) if h]
            found = next((f[named.name] for f in fields if named.name in f), None)
            if found is None:
                where = " or ".join(h for h in (*homes, self.entity) if h) or "any entity"
                raise ValueError(
                    f"parameter {named.name!r} is neither under params nor a field of {where}"
                )
        return Param(named.name, found, named.required, named.default)

    def parameters(self, entities: Entities) -> list[Param]:
        keys = [self.key_param(entities)] if self.keyed and self.entity else []
        return keys + [self.param(entities, named) for named in self.with_]

    def guard(self, scope: Scope) -> None:
        for refused, message in self.deny.items():
            if refused(scope):
                raise ToolFailure("permission", message)
        for needed, message in self.require.items():
            if not needed(scope):
                raise ToolFailure("conflict", message)

    def execute(self, call: Call) -> Json:
        row = None
        if self.keyed and self.entity:
            row = call.find(self.entity, call.args[call.entities[self.entity].key])
        call.enter(row)
        self.guard(call.scope)
        result = self.run(call, row or {})
        for name, expression in self.returns.items():
            result[name] = call.scope[name] = tidy(expression(call.scope))
        return result

    def run(self, call: Call, row: Json) -> Json:
        return {}

    def shape(self, entities: Entities) -> Shape:
        """What a successful answer looks like, without `returns`."""
        return {}


def tidy(value: Any) -> Any:
    return plain(round(value, 4)) if isinstance(value, float) else value


def fields_of(entity: Entity, names: Iterable[str]) -> Shape:
    chosen = list(names) or list(entity.fields)
    unknown = [n for n in chosen if n not in entity.fields]
    if unknown:
        raise ValueError(f"{entity.name} has no field {unknown[0]!r}")
    return {n: reference(entity) if n == entity.key else entity.fields[n] for n in chosen}


def reference(entity: Entity) -> Field:
    """An entity's key, as a reference to it."""
    return Field(kind="ref", spec=entity.name, about=entity.fields[entity.key].about)


class Selecting(Operation):
    """Templates over the rows that conditions keep."""

    where: tuple[Where, ...] = ()
    keep: Expr | None = None

    def parameters(self, entities: Entities) -> list[Param]:
        filters = []
        for condition in self.where:
            fields = entities[self.entity].fields
            if condition.field not in fields:
                raise ValueError(f"where: {self.entity} has no field {condition.field!r}")
            if condition.param is None:
                continue
            name, about = condition.param.name, fields[condition.field].about
            about = f"{LIMITS[condition.op]} the {about}" if condition.op in LIMITS else about
            kind = {"about": about, "none": 0.0, "calc": None, "default": None}
            kind |= {"question": ""} if condition.op in LIMITS else {}
            base = fields[condition.field]
            if condition.field == entities[self.entity].key:
                base = reference(entities[self.entity])
            if condition.op == "on":
                base = Field(kind="date", spec=base.spec, about=base.about)
            if condition.op == "has":
                kind |= {"kind": "ref" if base.entity else "choice"}
            found = self.params.get(name) or base.model_copy(update=kind)
            param = Param(name, found, condition.param.required, condition.param.default)
            many = (1, 4) if condition.op == "in" else None
            filters.append(
                Param(
                    name, found, param.required, param.default, many, condition.field, condition.op
                )
            )
        return filters + super().parameters(entities)

    def selected(self, call: Call) -> list[Json]:
        rows = call.rows(self.entity)
        for condition in self.where:
            rows = [row for row in rows if condition.holds(row, call.args)]
        if self.keep is not None:
            rows = [row for row in rows if self.keep(call.names(row))]
        return list(rows)


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
    limit: int = 5

    def run(self, call: Call, row: Json) -> Json:
        entity, rows = call.entities[self.entity], ordered(self.selected(call), self.sort)
        shown = [entity.show(r, self.show) for r in rows[: self.limit]]
        return {"count": len(rows), entity.plural: shown}

    def shape(self, entities: Entities) -> Shape:
        entity = entities[self.entity]
        return {"count": "integer", entity.plural: [fields_of(entity, self.show)]}


class History(Search):
    """What happened to one parent row, latest first: `of` is the reference to it."""

    op = "history"
    of: str
    sort: str

    def parameters(self, entities: Entities) -> list[Param]:
        parent = self.param(entities, Named(self.of))
        return [
            Param(self.of, parent.field, anchor=self.of),
            *(p for p in super().parameters(entities) if p.name != self.of),
        ]

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
        entity = call.entities[self.entity]
        result = entity.show(row, self.show)
        for child, names in self.include.items():
            by = call.entities.reference(child, self.entity)
            other = call.entities[child]
            found = [r for r in call.rows(child) if r[by] == row[entity.key]]
            result[other.plural] = [other.show(r, names) for r in found[:5]]
        return result

    def shape(self, entities: Entities) -> Shape:
        for child in self.include:
            if child not in entities.entities or not entities.reference(child, self.entity):
                raise ValueError(f"include: {child!r} has no reference to {self.entity}")
        inner = {
            entities[child].plural: [fields_of(entities[child], names)]
            for child, names in self.include.items()
        }
        return fields_of(entities[self.entity], self.show) | inner


class Lookup(Selecting):
    """The one row that its natural names point at; several are a conflict."""

    op = "lookup"
    show: tuple[str, ...] = ()

    def run(self, call: Call, row: Json) -> Json:
        entity, rows = call.entities[self.entity], self.selected(call)
        if not rows:
            raise ToolFailure("not_found", f"no {entity.noun} matches")
        if len(rows) > 1:
            keys = ", ".join(str(r[entity.key]) for r in rows[:5])
            raise ToolFailure("conflict", f"{len(rows)} {entity.noun} records match: {keys}")
        return entity.show(rows[0], self.show)

    def shape(self, entities: Entities) -> Shape:
        return fields_of(entities[self.entity], self.show)


class Count(Selecting):
    """How many rows meet the conditions, and how they spread over a field's values."""

    op = "count"
    group: str = ""

    def run(self, call: Call, row: Json) -> Json:
        rows = self.selected(call)
        result: Json = {"count": len(rows)}
        if self.group:
            spread: dict[str, int] = {}
            for r in rows:
                spread[str(r[self.group])] = spread.get(str(r[self.group]), 0) + 1
            result[f"by_{self.group}"] = dict(sorted(spread.items()))
        return result

    def shape(self, entities: Entities) -> Shape:
        return {"count": "integer"} | ({f"by_{self.group}": "object"} if self.group else {})


FIGURE = re.compile(r"(sum|average|lowest|highest|count|share)(?: (.+?))?(?: if (.+))?")


class Figure:
    """`sum amount`, `average fare if cabin == 'economy'`, `count`, `share paid`."""

    def __init__(self, source: Any):
        match = FIGURE.fullmatch(str(source).strip())
        if not match or (match[1] != "count" and not match[2]):
            raise ValueError(
                f"expected sum|average|lowest|highest|count|share EXPR, found {source!r}"
            )
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


FigureText = Annotated[InstanceOf[Figure], BeforeValidator(Figure)]


class Aggregate(Selecting):
    """Figures over the rows that meet the conditions, in all or by the values of a field; several
    fields under `group` become a `group_by` parameter."""

    op = "aggregate"
    figures: dict[str, FigureText]
    group: tuple[str, ...] = ()

    def parameters(self, entities: Entities) -> list[Param]:
        fields_of(entities[self.entity], self.group)
        found = super().parameters(entities)
        if len(self.group) > 1:
            kind = Field(
                kind="choice", spec=tuple(self.group), about="field to group the figures by"
            )
            found.append(Param("group_by", kind))
        return found

    def run(self, call: Call, row: Json) -> Json:
        rows = self.selected(call)
        result: Json = {"count": len(rows)}
        if not self.group:
            return result | self.totals(call, rows)
        by = call.args.get("group_by") or self.group[0]
        groups: dict[str, list[Json]] = {}
        for r in rows:
            groups.setdefault(str(r[by]), []).append(r)
        listed = [{by: name} | self.totals(call, groups[name]) for name in sorted(groups)]
        return result | {"groups": listed[:8]}

    def totals(self, call: Call, rows: list[Json]) -> Json:
        scopes = [call.names(r) for r in rows]
        return {name: figure(scopes) for name, figure in self.figures.items()}

    def shape(self, entities: Entities) -> Shape:
        totals = dict.fromkeys(self.figures, "number")
        return {"count": "integer"} | ({"groups": [totals]} if self.group else totals)


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
        entity = call.entities[self.entity]
        scored = [(tidy(self.by(call.names(r))), r) for r in self.selected(call)]
        scored.sort(key=lambda pair: pair[0], reverse=self.order == "highest")
        named = [
            entity.show(r, self.show) | ({self.score: value} if self.score else {})
            for value, r in scored[: call.args["top"]]
        ]
        return {"count": len(scored), entity.plural: named}

    def shape(self, entities: Entities) -> Shape:
        entity = entities[self.entity]
        shown = fields_of(entity, self.show) | ({self.score: "number"} if self.score else {})
        return {"count": "integer", entity.plural: [shown]}


class Compare(Operation):
    """Two to four rows side by side, and which of them wins by which measure."""

    op = "compare"
    entity: str
    show: list[str]
    best: dict[str, FigureText]

    def parameters(self, entities: Entities) -> list[Param]:
        keys = self.key_param(entities, f"{entities[self.entity].key}s", many=(2, 4))
        return [keys, *super().parameters(entities)]

    def run(self, call: Call, row: Json) -> Json:
        entity = call.entities[self.entity]
        rows = [call.find(self.entity, key) for key in call.args[f"{entity.key}s"]]
        result: Json = {entity.plural: [entity.show(r, self.show) for r in rows]}
        for name, figure in self.best.items():
            scored = [(figure.value(call.names(r)), r[entity.key]) for r in rows]
            pick = max if figure.how == "highest" else min
            result[name] = pick(scored, key=lambda pair: pair[0])[1]
        return result

    def shape(self, entities: Entities) -> Shape:
        entity = entities[self.entity]
        rows = {entity.plural: [fields_of(entity, self.show)]}
        return rows | dict.fromkeys(self.best, reference(entity))


class Compute(Operation):
    """Figures worked out from the arguments and, with `entity`, from a row: all under `returns`."""

    op = "compute"
    keyed = True
    returns: dict[str, Expr]


class Convert(Operation):
    """An amount in another unit. `table` gives each unit's size in a common one: a factor, or
    [factor, offset]."""

    op = "convert"
    table: dict[str, float | tuple[float, float]]
    amount: str = "amount"
    source: str = "from_unit"
    target: str = "to_unit"
    digits: int = 2

    def parameters(self, entities: Entities) -> list[Param]:
        units = {
            name: self.params.get(name)
            or Field(kind="choice", spec=tuple(self.table), about=f"unit to convert {way}")
            for name, way in ((self.source, "from"), (self.target, "to"))
        }
        amount = self.param(entities, Named(self.amount))
        return [amount, *(Param(n, f) for n, f in units.items()), *super().parameters(entities)]

    def run(self, call: Call, row: Json) -> Json:
        args = call.args
        if args[self.source] == args[self.target]:
            raise ToolFailure("invalid_argument", f"{self.source} and {self.target} are the same")
        sizes = [self.table[args[name]] for name in (self.source, self.target)]
        (up, start), (down, end) = (s if isinstance(s, tuple) else (s, 0.0) for s in sizes)
        value = (args[self.amount] * up + start - end) / down
        call.scope["converted"] = round(value, self.digits)
        return {"converted": round(value, self.digits), "unit": args[self.target]}

    def shape(self, entities: Entities) -> Shape:
        return {"converted": "number", "unit": "string"}


class Validate(Operation):
    """A verdict by rules, each of which must hold; `rules` maps what to say to the expression."""

    op = "validate"
    keyed = True
    rules: dict[str, Expr]

    def run(self, call: Call, row: Json) -> Json:
        failed = [text for text, rule in self.rules.items() if not rule(call.scope)]
        return {"valid": not failed, "failed_checks": failed}

    def shape(self, entities: Entities) -> Shape:
        return {"valid": "boolean", "failed_checks": ["string"]}


class Summary(Operation):
    """One row with figures over the rows of another entity that refer to it."""

    op = "summary"
    keyed = True
    entity: str
    of: str
    figures: dict[str, FigureText]
    show: list[str]

    def run(self, call: Call, row: Json) -> Json:
        entity, by = call.entities[self.entity], call.entities.reference(self.of, self.entity)
        children = [call.names(r) for r in call.rows(self.of) if r[by] == row[entity.key]]
        figures = {name: figure(children) for name, figure in self.figures.items()}
        call.scope.update(figures)
        return entity.show(row, self.show) | figures

    def shape(self, entities: Entities) -> Shape:
        if self.of not in entities.entities or not entities.reference(self.of, self.entity):
            raise ValueError(f"of: {self.of!r} has no reference to {self.entity}")
        return fields_of(entities[self.entity], self.show) | dict.fromkeys(self.figures, "number")


class Compose(Operation):
    """Text made from a row and the arguments; `{name}` and `{entity.field}` are filled in."""

    op = "compose"
    keyed = True
    text: dict[str, str]

    def run(self, call: Call, row: Json) -> Json:
        def fill(match: re.Match[str]) -> str:
            return str(Expression(match[1])(call.scope))

        return {name: re.sub(r"\{([\w.]+)\}", fill, text) for name, text in self.text.items()}

    def shape(self, entities: Entities) -> Shape:
        return dict.fromkeys(self.text, "string")


class Calendar(Operation):
    """Templates over rows that take a stretch of a day from a resource."""

    entity: str
    resource: str
    date: str = "date"
    start: str = "start"
    end: str = "end"
    hours: tuple[str, str] = ("08:00", "18:00")
    busy: Expr | None = None

    def length(self) -> Param:
        about = "length in minutes"
        kind = Field(kind="int", spec=(30, 120), step=30, about=about, bounds=(5, 600))
        return Param("duration_minutes", self.params.get("duration_minutes") or kind)

    def taken(self, call: Call) -> list[tuple[int, int]]:
        """The busy stretches of the resource's day, in order."""
        wanted = (call.args[self.resource], call.args[self.date])
        rows = [r for r in call.rows(self.entity) if (r[self.resource], r[self.date]) == wanted]
        kept = [r for r in rows if self.busy is None or self.busy(call.names(r))]
        return sorted((minutes(r[self.start]), minutes(r[self.end])) for r in kept)


class FreeSlots(Calendar):
    """Stretches of a resource's day that are still free and long enough."""

    op = "free_slots"

    def parameters(self, entities: Entities) -> list[Param]:
        where = [self.param(entities, Named(n)) for n in (self.resource, self.date)]
        found = [Param(p.name, p.field, anchor=p.name) for p in where]
        return [*found, self.length(), *super().parameters(entities)]

    def run(self, call: Call, row: Json) -> Json:
        opened, closed = map(minutes, self.hours)
        need, at, slots = call.args["duration_minutes"], opened, []
        for start, end in [*self.taken(call), (closed, closed)]:
            if start - at >= need:
                slots.append({"start": clock(at), "end": clock(start)})
            at = max(at, end)
        return {"count": len(slots), "slots": slots[:5]}

    def shape(self, entities: Entities) -> Shape:
        return {"count": "integer", "slots": [{"start": "string", "end": "string"}]}
