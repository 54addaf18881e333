"""What all operations share: settings, what their tools take and answer, and one execution.

A tool is an operation with settings. Families are classes whose fields are settings that operations
share; an operation is a method that runs a call, and its arguments are settings of its own. Its
signature (`filters with top -> count:integer rows`) says what a tool takes and answers with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar, get_type_hints

from pydantic import Field as Setting
from pydantic import InstanceOf, create_model

from sharpen.config import Config
from sharpen.types import Json
from sharpen.world.expressions import Condition, Expr, Named, ToolFailure
from sharpen.world.fields import Field, plain, value_schema
from sharpen.world.state import Entities, Entity, Scope, Tables

Run = TypeVar("Run", bound=Callable[..., Json])
Names = tuple[str, ...]
Shape = Any  # Field, a JSON type's name, [Shape] or {name: Shape}
OPERATIONS: dict[str, type[Operation]] = {}
LIMITS = {"<=": "upper limit for", "<": "upper limit for", ">=": "lower limit for"}
LIMITS |= {">": "lower limit for", "contains": "words to look for in"}
UNSET: Json = {"none": 0.0, "calc": None, "default": None}  # of a field that becomes a parameter
TOP = Field(kind="int", spec=(1, 5), about="how many to return", bounds=(1, 10))
LENGTH = Field(kind="int", spec=(30, 120), step=30, about="length in minutes", bounds=(5, 600))


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


@dataclass(slots=True)
class Call:
    """One execution. Writes wait for its end, so that a call which fails changes nothing."""

    entities: Entities
    tables: Tables
    params: Mapping[str, Param]
    args: Json
    constants: Json
    row: Json = field(default_factory=dict)  # the one whose key the tool takes
    scope: Scope = field(init=False)
    writes: list[tuple[Entity, str, Json | None]] = field(default_factory=list)

    def find(self, entity: str, key: Any) -> Json:
        """The row; a key of something else is told to be one."""
        try:
            return self.tables.find(self.entities[entity], key)
        except ToolFailure as error:
            others = self.entities.entities.values()
            nouns = [o.noun for o in others if isinstance(key, str) and self.tables.get(o, key)]
            what = f", which is the key of another kind: {nouns[0]}" if nouns else ""
            raise ToolFailure(error.code, error.message + what) from None

    def rows(self, entity: str) -> Iterable[Json]:
        return self.tables.rows(self.entities[entity]).values()

    def children(self, child: str, parent: Entity) -> list[Json]:
        """The rows of `child` that refer to the row."""
        by, key = self.entities.reference(child, parent.name), self.row[parent.key]
        return [other for other in self.rows(child) if other[by] == key]

    def given(self, names: Iterable[str]) -> Json:
        return {name: self.args[name] for name in names if self.args.get(name) is not None}

    def names(self, row: Json) -> Scope:
        """A scope over `row`; an optional argument that was not given hides nothing."""
        given = {name: value for name, value in self.args.items() if value is not None}
        known = dict.fromkeys(self.params) | self.constants | row | given
        return Scope(self.entities, self.find, known)

    def enter(self) -> None:
        """Open the scope and follow every reference among the arguments; an unknown one fails."""
        self.scope = self.names(self.row)
        for param in self.params.values():
            if param.field.kind == "ref" and self.args.get(param.name) is not None:
                keys = self.args[param.name] if param.many else [self.args[param.name]]
                found = [self.find(param.field.spec, key) for key in keys]
                self.scope.setdefault(param.name.removesuffix("_id"), found[0])

    def change(self, entity: Entity, row: Json, changes: Json) -> Json:
        """Write over some fields of a row; answers with them as they are stored."""
        stored = {name: entity.fields[name].coerce(value) for name, value in changes.items()}
        self.writes.append((entity, row[entity.key], row | stored))
        return stored


def refuse(when: bool, why: str, code: str = "conflict") -> None:
    if when:
        raise ToolFailure(code, why)


def tidy(value: Any) -> Any:
    return plain(round(value, 4)) if isinstance(value, float) else value


def operation(signature: str) -> Callable[[Run], Run]:
    """Marks a method as an operation: `@operation("what it takes -> what it answers")`."""

    def mark(run: Run) -> Run:
        vars(run)["signature"] = [words.split() for words in signature.split("->")]
        return run

    return mark


class Operation(Config):
    """What every tool of a domain file says, whatever its operation."""

    about: str
    goal: str
    ask: list[str]
    say: list[str]
    vague: str = ""
    pick: str = ""
    entity: str = ""
    params: dict[str, Field] = Setting({})
    with_: tuple[Named, ...] = Setting((), alias="with")
    require: dict[Expr, str] = Setting({})
    deny: dict[Expr, str] = Setting({})
    returns: dict[str, Expr] = Setting({})
    entities: InstanceOf[Entities]

    op: ClassVar[str]
    run: ClassVar[Callable[..., Json]]
    signature: ClassVar[list[list[str]]]
    own: ClassVar[list[str]]  # the settings that `run` gets
    writes: ClassVar[bool] = False

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Registers the operations of a family, each with a model of its settings."""
        for run in [value for value in vars(cls).values() if hasattr(value, "signature")]:
            hints, fields = get_type_hints(run, include_extras=True), dict[str, Any]()
            for setting in list(inspect.signature(run).parameters.values())[2:]:
                default = ... if setting.default is setting.empty else setting.default
                alias = setting.name.rstrip("_")  # `from_` stands for `from`
                fields[setting.name] = (hints[setting.name], Setting(default, alias=alias))
            made = create_model(run.__name__, __base__=cls, **fields)
            made.op, made.run, made.own = run.__name__.rstrip("_"), run, list(fields)
            made.signature = run.signature
            OPERATIONS[made.op] = made

    @cached_property
    def home(self) -> Entity:
        """The tool's own entity."""
        return self.entities[self.entity]

    @cached_property
    def keyed(self) -> bool:
        """Whether the tool takes the key of one row of its entity."""
        return bool(self.entity) and "key" in self.signature[0]

    def parameters(self) -> list[Param]:
        return [param for word in self.signature[0] for param in takes(self, word)]

    def shape(self) -> Shape:
        """What a successful answer looks like."""
        found: dict[str, Shape] = {}
        for word in self.signature[1]:
            found |= answers(self, word)
        return found | dict.fromkeys(self.returns, "any")

    def guard(self, scope: Scope) -> None:
        for refused, message in self.deny.items():
            refuse(refused(scope), message, "permission")
        for needed, message in self.require.items():
            refuse(not needed(scope), message)

    def execute(self, call: Call) -> Json:
        if self.keyed:
            call.row = call.find(self.entity, call.args[self.home.key])
        call.enter()
        if "refused" not in self.signature[1]:  # else each row is looked at by itself
            self.guard(call.scope)
        result = type(self).run(self, call, **{name: getattr(self, name) for name in self.own})
        for name, expression in self.returns.items():
            result[name] = call.scope[name] = tidy(expression(call.scope))
        return result


def takes(tool: Any, word: str) -> list[Param]:
    """What a word before the arrow stands for: one of these, or a setting that names it."""
    key = tool.home.key if tool.entity else ""
    match word:
        case "key":
            return [own(tool, key, tool.home.reference())] if key else []
        case "first" | "second" | "source" | "target":
            return [own(tool, getattr(tool, word, f"{word}_{key}"), tool.home.reference())]
        case "keys4" | "keys6":
            return [own(tool, f"{key}s", tool.home.reference(), many=(2, int(word[-1])))]
        case "filters":
            return [filter_param(tool, c) for c in tool.conditions if c.name]
        case "with":
            return [param(tool, c.name, c.required, c.value) for c in tool.with_]
        case "change":
            return [param(tool, name, len(tool.change) == 1) for name in tool.change]
        case "place":
            places = [param(tool, name) for name in (tool.resource, "date")]
            return [replace(place, anchor=place.name) for place in places]
        case "top":
            return [Param(word, TOP, required=False, default=3)]
        case "duration_minutes":
            return [own(tool, word, LENGTH)]
        case "group_by":
            kind = Field(kind="choice", spec=tool.group, about="field to group the figures by")
            return [Param(word, kind)] if len(tool.group) > 1 else []
        case "from_unit" | "to_unit":
            way, name = ("from", tool.source) if word == "from_unit" else ("to", tool.target)
            kind = Field(kind="choice", spec=tuple(tool.table), about=f"unit to convert {way}")
            return [own(tool, name, kind)]
    name: str = getattr(tool, word, word)
    return [param(tool, name)] if name else []


def own(tool: Operation, name: str, kind: Field, **more: Any) -> Param:
    """A parameter that an operation brings along, unless the file describes it."""
    return Param(name, tool.params.get(name) or kind, **more)


def param(tool: Operation, name: str, required: bool = True, default: Any = None) -> Param:
    """A parameter by name: declared under `params`, or a field of one of the entities."""
    homes = [home for home in (getattr(tool, "into", ""), tool.entity) if home]
    for fields in (tool.params, *(tool.entities[home].fields for home in homes)):
        if name in fields:
            return Param(name, fields[name], required, default)
    where = " or ".join(homes) or "any entity"
    raise ValueError(f"parameter {name!r} is neither under params nor a field of {where}")


def filter_param(tool: Operation, condition: Condition) -> Param:
    """The parameter of a condition: its field's kind, with a description of what it does."""
    name, op, required, default = condition.name, condition.op, condition.required, condition.value
    base, changed = tool.home.select([condition.field])[condition.field], dict(UNSET)
    if op in LIMITS:
        changed["about"] = f"{LIMITS[op]} the {base.about}"
    if op == "has":
        changed["kind"] = "ref" if base.entity else "choice"
    kind = tool.params.get(name) or base.model_copy(update=changed)
    return Param(name, kind, required, default, (1, 4) if op == "in" else None, condition.field, op)


def answers(tool: Any, word: str) -> dict[str, Shape]:
    """What a word behind it stands for: one of these, a setting with fields, or `name:kind`."""
    home, entities = tool.entity and tool.home, tool.entities
    match word:
        case "rows":
            score = {tool.score: "number"} if getattr(tool, "score", "") else {}
            return {home.plural: [home.select(tool.show) | score]}
        case "children":
            shown = [(entities[child], names) for child, names in tool.include.items()]
            return {child.plural: [child.select(names)] for child, names in shown}
        case "spread":
            return {f"by_{tool.group}": "object"} if tool.group else {}
        case "groups":
            numbers = dict.fromkeys(tool.figures, "number")
            return {word: [numbers]} if tool.group else numbers
        case "slots":
            return {word: [{"start": "string", "end": "string"}]}
        case "refused":
            return {word: [{home.key: home.reference(), "reason": "string"}]}
        case "choice" | "ref" | "list":  # the field that is changed, which must be one
            found = home.select([tool.field])[tool.field]
            if found.kind != word:
                raise ValueError(f"field: {tool.field!r} is not of kind {word}")
            for value in (*tool.from_, tool.to) if word == "choice" else ():
                if value not in found.spec:
                    known = ", ".join(map(str, found.spec))
                    raise ValueError(f"{tool.field} has no value {value!r}; it has {known}")
            return {tool.field: found}
        case "restored":
            owner, _, name = tool.restore.partition(".")
            return entities[owner].select([name])
        case "first" | "second" | "source" | "target":
            names = tool.fields if word in ("first", "second") else [tool.field]
            return {f"{word}_{n}": kind for n, kind in home.select(names).items()}
        case "made":
            return tool.made.select(tool.show)
        case "key":
            return {home.key: home.reference()}
    name, _, kind = word.partition(":")
    said = getattr(tool, name) if name in type(tool).model_fields else name
    names = [said] if isinstance(said, str) else list(said)
    if kind:
        one = home.reference() if "key" in kind else kind.strip("[]")
        return dict.fromkeys(names, [one] if kind.startswith("[") else one)
    return home.select(names) if names or name == "show" else {}
