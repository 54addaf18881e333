"""What all operation templates share: parameters, one execution, guards, and row selection.

A tool is one template with settings; a template is a class whose fields are the settings a domain
file may give it. It says which parameters its tool takes, what it answers, and how the answer is
found. `reading` and `writing` hold the templates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import Field as Setting

from sharpen.config import Config
from sharpen.types import Json
from sharpen.world.expressions import (
    Condition,
    Expr,
    Named,
    NamedParam,
    ToolFailure,
    Where,
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
            about = out.pop("description")
            out = {"type": "array", "items": out, "minItems": self.many[0], "description": about}
            out |= {"maxItems": self.many[1], "uniqueItems": True}
        return out | ({"default": self.default} if self.default is not None else {})


def conflict(message: str) -> ToolFailure:
    return ToolFailure("conflict", message)


@dataclass(slots=True)
class Call:
    """One execution: the arguments, the state it reads, and what it wants to write."""

    entities: Entities
    tables: Tables
    params: Mapping[str, Param]
    args: Json
    constants: Json
    home: Entity | None  # the tool's own entity
    scope: Scope = field(init=False)
    writes: list[tuple[Entity, str, Json | None]] = field(default_factory=list)

    @property
    def entity(self) -> Entity:
        assert self.home is not None, "only templates with an entity ask for it"
        return self.home

    def find(self, entity: str, key: Any) -> Json:
        return self.tables.find(self.entities[entity], key)

    def own(self, name: str) -> Json:
        """The row of the tool's own entity that the argument `name` is the key of."""
        return self.tables.find(self.entity, self.args[name])

    def rows(self, entity: str) -> Iterable[Json]:
        return self.tables.rows(self.entities[entity]).values()

    def children(self, child: str, row: Json) -> list[Json]:
        """The rows of `child` that refer to a row of the tool's own entity."""
        by, key = self.entities.reference(child, self.entity.name), row[self.entity.key]
        return [other for other in self.rows(child) if other[by] == key]

    def given(self, names: Iterable[Named], entity: Entity) -> Json:
        """The arguments under these names that are fields of `entity` and were given."""
        known = {n.name: self.args.get(n.name) for n in names if n.name in entity.fields}
        return {name: value for name, value in known.items() if value is not None}

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

    def change(self, entity: Entity, row: Json, changes: Json) -> Json:
        """Write over some fields of a row; answers with them as they are stored."""
        stored = {name: entity.fields[name].coerce(value) for name, value in changes.items()}
        self.writes.append((entity, row[entity.key], row | stored))
        return stored


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
    keyed: ClassVar[bool] = False  # the tool takes the key of one row of its entity
    writes: ClassVar[bool] = False
    answers: ClassVar[Shape] = {}

    def key_param(self, entities: Entities, name: str = "", **settings: Any) -> Param:
        entity = entities[self.entity]
        said = self.params.get(name) or entity.fields[entity.key]
        kind = Field(kind="ref", spec=self.entity, about=said.about, question=said.question)
        return Param(name or entity.key, kind, **settings)

    def keys_param(self, entities: Entities, most: int) -> Param:
        return self.key_param(entities, f"{entities[self.entity].key}s", many=(2, most))

    def param(self, entities: Entities, named: Named, home: str = "") -> Param:
        """A parameter by name: declared under `params`, or a field of one of the entities."""
        homes = [name for name in (home, self.entity) if name]
        known = [self.params, *(entities[name].fields for name in homes)]
        found = next((fields[named.name] for fields in known if named.name in fields), None)
        if found is None:
            where = " or ".join(homes) or "any entity"
            text = f"parameter {named.name!r} is neither under params nor a field of {where}"
            raise ValueError(text)
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
                raise conflict(message)

    def execute(self, call: Call) -> Json:
        row = call.own(call.entity.key) if self.keyed and self.entity else None
        call.enter(row)
        self.guard(call.scope)
        result = self.run(call, row or {})
        for name, expression in self.returns.items():
            result[name] = call.scope[name] = tidy(expression(call.scope))
        return result

    def run(self, call: Call, row: Json) -> Json:
        return {}

    def shape(self, entities: Entities) -> Shape:
        """What a successful answer looks like, without `returns`. It is asked for once, when the
        file is read, so it also refuses settings that do not fit the entities."""
        return self.answers


def tidy(value: Any) -> Any:
    return plain(round(value, 4)) if isinstance(value, float) else value


class Selecting(Operation):
    """Templates over the rows that conditions keep."""

    entity: str
    where: tuple[Where, ...] = ()
    keep: Expr | None = None

    def parameters(self, entities: Entities) -> list[Param]:
        entity = entities[self.entity]
        entity.select(condition.field for condition in self.where)
        filters = [self.filter_param(entity, c) for c in self.where if c.param]
        return filters + super().parameters(entities)

    def filter_param(self, entity: Entity, condition: Condition) -> Param:
        """The parameter of a condition: its field's kind, with a description of what it does."""
        named, op = condition.param or Named(""), condition.op
        base = entity.select([condition.field])[condition.field]
        changed = {"none": 0.0, "calc": None, "default": None}
        if op in LIMITS:
            changed |= {"about": f"{LIMITS[op]} the {base.about}", "question": ""}
        if op in ("on", "has"):
            changed["kind"] = "date" if op == "on" else "ref" if base.entity else "choice"
        kind = self.params.get(named.name) or base.model_copy(update=changed)
        many = (1, 4) if op == "in" else None
        return Param(named.name, kind, named.required, named.default, many, condition.field, op)

    def selected(self, call: Call) -> list[Json]:
        rows = call.rows(self.entity)
        for condition in self.where:
            rows = [row for row in rows if condition.holds(row, call.args)]
        if self.keep is not None:
            rows = [row for row in rows if self.keep(call.names(row))]
        return list(rows)


class Calendar(Operation):
    """Templates over rows that take a stretch of a day from a resource."""

    entity: str
    resource: str
    date: str = "date"
    start: str = "start"
    end: str = "end"
    hours: tuple[str, str] = ("08:00", "18:00")
    busy: Expr | None = None

    def day_params(self, entities: Entities, *more: str) -> list[Param]:
        """The resource, the day and the length of a stretch."""
        about, name = "length in minutes", "duration_minutes"
        kind = Field(kind="int", spec=(30, 120), step=30, about=about, bounds=(5, 600))
        places = [self.param(entities, Named(n)) for n in (self.resource, self.date, *more)]
        return [*places, Param(name, self.params.get(name) or kind)]

    def taken(self, call: Call) -> list[tuple[int, int]]:
        """The busy stretches of the resource's day, in order."""
        wanted = (call.args[self.resource], call.args[self.date])
        rows = [r for r in call.rows(self.entity) if (r[self.resource], r[self.date]) == wanted]
        kept = [r for r in rows if self.busy is None or self.busy(call.names(r))]
        return sorted((minutes(r[self.start]), minutes(r[self.end])) for r in kept)
