"""What all operations share: their settings, what their tools take and answer, and how they run.

A tool is an operation with settings. An operation is a method that runs a call; its arguments are
settings of its own, and the fields of its class are settings that several operations share. Its
signature (`filters with top -> count:integer rows`) names the parameters of its tools and the parts
of their answers; `signatures.py` says what each word stands for. `reading.py` and `writing.py` hold
the operations; `domain.py` makes tools of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, TypeVar, get_type_hints

from pydantic import Field as Setting
from pydantic import InstanceOf, create_model

from sharpen.config import Config
from sharpen.types import Json
from sharpen.world.expressions import Expr, Named, ToolFailure
from sharpen.world.fields import Field, plain
from sharpen.world.signatures import Param, Shape, answer_shape, word_params
from sharpen.world.state import Entities, Entity, Scope, Tables

_RunMethod = TypeVar("_RunMethod", bound=Callable[..., Json])
Names = tuple[str, ...]
OPERATIONS: dict[str, type[Operation]] = {}


# One call -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Call:
    """One execution of a tool.

    Its writes are applied after it has succeeded, so that a call which fails changes nothing.
    """

    entities: Entities
    tables: Tables
    params: Mapping[str, Param]
    args: Json
    constants: Json
    row: Json = field(default_factory=dict)  # the one whose key the tool takes
    scope: Scope = field(init=False)
    writes: list[tuple[Entity, str, Json | None]] = field(default_factory=list)

    def find(self, entity: str, key: Any) -> Json:
        """Returns a row. The failure says so if the key belongs to an entity of another kind."""
        try:
            return self.tables.find(self.entities[entity], key)
        except ToolFailure as failure:
            message = failure.message
            if isinstance(key, str):
                for other in self.entities.entities.values():
                    if self.tables.get(other, key):
                        message += f", which is the key of another kind: {other.noun}"
                        break
            raise ToolFailure(failure.code, message) from None

    def rows(self, entity: str) -> Iterable[Json]:
        """Returns all rows of an entity as they are now."""
        return self.tables.rows(self.entities[entity]).values()

    def children(self, child: str, parent: Entity) -> list[Json]:
        """Returns the rows of `child` that refer to the call's row."""
        reference = self.entities.reference(child, parent.name)
        key = self.row[parent.key]
        return [row for row in self.rows(child) if row[reference] == key]

    def given_args(self, names: Iterable[str]) -> Json:
        """Returns the arguments among `names` that have a value."""
        return {name: self.args[name] for name in names if self.args.get(name) is not None}

    def make_scope(self, row: Json) -> Scope:
        """Returns the names that an expression sees for a row.

        An argument hides a field of its name; an optional one that was not given hides nothing.
        """
        names: Json = dict.fromkeys(self.params)
        names |= self.constants
        names |= row
        names |= {name: value for name, value in self.args.items() if value is not None}
        return Scope(self.entities, self.find, names)

    def open_scope(self) -> None:
        """Set the scope and look up every reference among the arguments.

        An unknown key fails. The row of the parameter `new_flight_id` becomes `new_flight`.
        """
        self.scope = self.make_scope(self.row)
        for param in self.params.values():
            argument = self.args.get(param.name)
            if param.field.kind != "ref" or argument is None:
                continue
            keys = argument if param.many else [argument]
            rows = [self.find(param.field.spec, key) for key in keys]
            self.scope.setdefault(param.name.removesuffix("_id"), rows[0])

    def change(self, entity: Entity, row: Json, changes: Json) -> Json:
        """Change some fields of a row and return their values as they are stored."""
        stored = {name: entity.fields[name].coerce(value) for name, value in changes.items()}
        self.writes.append((entity, row[entity.key], row | stored))
        return stored


def refuse(when: bool, why: str, code: str = "conflict") -> None:
    """Fail the call with this error if the condition holds."""
    if when:
        raise ToolFailure(code, why)


def tidy(value: Any) -> Any:
    """Returns a computed number with at most four decimals, and anything else as it is."""
    return plain(round(value, 4)) if isinstance(value, float) else value


# Operations ---------------------------------------------------------------------------------------


def operation(signature: str) -> Callable[[_RunMethod], _RunMethod]:
    """Mark a method as an operation: `@operation("what it takes -> what it answers")`."""
    input_text, answer_text = signature.split("->")

    def mark(run: _RunMethod) -> _RunMethod:
        vars(run)["signature"] = (input_text.split(), answer_text.split())
        return run

    return mark


class Operation(Config):
    """The settings that every tool of a domain file has, whatever its operation."""

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
    run_settings: ClassVar[list[str]]  # the settings that are arguments of `run`
    input_words: ClassVar[list[str]]
    answer_words: ClassVar[list[str]]
    writes: ClassVar[bool] = False

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Register each operation of a class, with a model of its settings."""
        for run in list(vars(cls).values()):
            if hasattr(run, "signature"):
                cls._register(run)

    @classmethod
    def _register(cls, run: Any) -> None:
        hints = get_type_hints(run, include_extras=True)
        fields: dict[str, Any] = {}
        settings = list(inspect.signature(run).parameters.values())[2:]  # without self and call
        for setting in settings:
            default = ... if setting.default is setting.empty else setting.default
            alias = setting.name.rstrip("_")  # `from_` stands for `from`
            fields[setting.name] = (hints[setting.name], Setting(default, alias=alias))
        model = create_model(run.__name__, __base__=cls, **fields)
        model.op = run.__name__.rstrip("_")
        model.run = run
        model.run_settings = list(fields)
        model.input_words, model.answer_words = run.signature
        OPERATIONS[model.op] = model

    @cached_property
    def home(self) -> Entity:
        """The tool's own entity."""
        return self.entities[self.entity]

    @cached_property
    def keyed(self) -> bool:
        """Whether the tool takes the key of one row of its entity."""
        return bool(self.entity) and "key" in self.input_words

    def parameters(self) -> list[Param]:
        """Returns what the tool takes, in order."""
        params: list[Param] = []
        for word in self.input_words:
            params += word_params(self, word)
        return params

    def shape(self) -> Shape:
        """Returns what a successful answer looks like."""
        shape: dict[str, Shape] = {}
        for word in self.answer_words:
            shape |= answer_shape(self, word)
        return shape | dict.fromkeys(self.returns, "any")

    def guard(self, scope: Scope) -> None:
        """Fail where a `deny` holds or a `require` does not."""
        for refused, message in self.deny.items():
            refuse(refused(scope), message, "permission")
        for needed, message in self.require.items():
            refuse(not needed(scope), message)

    def execute(self, call: Call) -> Json:
        """Run a call and return its answer; a call that is refused raises a ToolFailure."""
        if self.keyed:
            call.row = call.find(self.entity, call.args[self.home.key])
        call.open_scope()
        checks_rows_itself = "refused" in self.answer_words
        if not checks_rows_itself:
            self.guard(call.scope)
        settings = {name: getattr(self, name) for name in self.run_settings}
        result = type(self).run(self, call, **settings)
        for name, expression in self.returns.items():
            value = tidy(expression(call.scope))
            result[name] = value
            call.scope[name] = value
        return result
