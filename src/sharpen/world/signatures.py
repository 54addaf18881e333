"""The words of an operation's signature: the parameters and the parts of an answer that each stands
for, given the settings of a tool. Called by `operations.py` and, for `Param`, by episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sharpen.types import Json
from sharpen.world.expressions import Condition
from sharpen.world.fields import Field, value_schema

if TYPE_CHECKING:
    from sharpen.world.operations import Operation
    from sharpen.world.state import Entity

Shape = Any  # Field, a JSON type's name, [Shape] or {name: Shape}
UNSET: Json = {"none": 0.0, "calc": None, "default": None}  # of a field that becomes a parameter
_LIMIT_WORDS = {
    "<=": "upper limit for",
    "<": "upper limit for",
    ">=": "lower limit for",
    ">": "lower limit for",
    "contains": "words to look for in",
}
_TOP = Field(kind="int", spec=(1, 5), about="how many to return", bounds=(1, 10))
_DURATION = Field(kind="int", spec=(30, 120), step=30, about="length in minutes", bounds=(5, 600))


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of a tool. `anchor` and `op` tie it to a field of the rows that it selects."""

    name: str
    field: Field
    required: bool = True
    default: Any = None
    many: tuple[int, int] | None = None  # least and most items, if it takes a list
    anchor: str = ""
    op: str = "="

    def schema(self) -> Json:
        """Returns the JSON schema of the parameter."""
        schema = value_schema(self.field)
        if self.many:
            least, most = self.many
            description = schema.pop("description")
            schema = {
                "type": "array",
                "items": schema,
                "minItems": least,
                "description": description,
                "maxItems": most,
                "uniqueItems": True,
            }
        if self.default is not None:
            schema["default"] = self.default
        return schema


# Parameters ---------------------------------------------------------------------------------------


def word_params(tool: Any, word: str) -> list[Param]:
    """Returns the parameters that a word before the arrow stands for.

    The word is one of these, or a setting that holds the name of a parameter. `tool` is an
    Operation; which further settings it has depends on which one.
    """
    key = tool.home.key if tool.entity else ""
    match word:
        case "key":
            return [_own_param(tool, key, tool.home.reference())] if key else []
        case "first" | "second" | "source" | "target":
            name = getattr(tool, word, f"{word}_{key}")
            return [_own_param(tool, name, tool.home.reference())]
        case "keys4" | "keys6":
            most = int(word.removeprefix("keys"))
            return [_own_param(tool, f"{key}s", tool.home.reference(), many=(2, most))]
        case "filters":
            return [_filter_param(tool, c) for c in tool.conditions if c.name]
        case "with":
            return [_named_param(tool, c.name, c.required, c.value) for c in tool.with_]
        case "change":
            is_only_field = len(tool.change) == 1
            return [_named_param(tool, name, required=is_only_field) for name in tool.change]
        case "place":
            places = [_named_param(tool, name) for name in (tool.resource, "date")]
            return [replace(place, anchor=place.name) for place in places]
        case "top":
            return [Param(word, _TOP, required=False, default=3)]
        case "duration_minutes":
            return [_own_param(tool, word, _DURATION)]
        case "group_by":
            if len(tool.group) < 2:
                return []
            about = "field to group the figures by"
            return [Param(word, Field(kind="choice", spec=tool.group, about=about))]
        case "from_unit":
            return [_own_param(tool, tool.source, _unit_field(tool, "unit to convert from"))]
        case "to_unit":
            return [_own_param(tool, tool.target, _unit_field(tool, "unit to convert to"))]
    name = getattr(tool, word, word)
    return [_named_param(tool, name)] if name else []


def _unit_field(tool: Any, about: str) -> Field:
    return Field(kind="choice", spec=tuple(tool.table), about=about)


def _own_param(
    tool: Operation, name: str, field: Field, many: tuple[int, int] | None = None
) -> Param:
    """Returns a parameter that an operation brings along; `params` of the file may describe it."""
    return Param(name, tool.params.get(name) or field, many=many)


def _named_param(tool: Operation, name: str, required: bool = True, default: Any = None) -> Param:
    """Returns a parameter by name: declared under `params`, or a field of one of the entities."""
    homes = [home for home in (getattr(tool, "into", ""), tool.entity) if home]
    for fields in (tool.params, *(tool.entities[home].fields for home in homes)):
        if name in fields:
            return Param(name, fields[name], required, default)
    where = " or ".join(homes) or "any entity"
    raise ValueError(f"parameter {name!r} is neither under params nor a field of {where}")


def _filter_param(tool: Operation, condition: Condition) -> Param:
    """Returns the parameter of a condition: its field, with a description of what it does."""
    op = condition.op
    compared = tool.home.select([condition.field])[condition.field]
    changes = dict(UNSET)
    if op in _LIMIT_WORDS:
        changes["about"] = f"{_LIMIT_WORDS[op]} the {compared.about}"
    if op == "has":
        changes["kind"] = "ref" if compared.entity else "choice"
    return Param(
        condition.name,
        tool.params.get(condition.name) or compared.model_copy(update=changes),
        condition.required,
        condition.value,
        many=(1, 4) if op == "in" else None,
        anchor=condition.field,
        op=op,
    )


# Answers ------------------------------------------------------------------------------------------


def answer_shape(tool: Any, word: str) -> dict[str, Shape]:
    """Returns the parts of an answer that a word after the arrow stands for.

    The word is one of these, a setting that names fields, or `name:kind`. `tool` is an Operation;
    which further settings it has depends on which one.
    """
    home: Any = tool.home if tool.entity else None
    match word:
        case "rows":
            score = {tool.score: "number"} if getattr(tool, "score", "") else {}
            return {home.plural: [home.select(tool.show) | score]}
        case "children":
            children: dict[str, Shape] = {}
            for name, fields in tool.include.items():
                child = tool.entities[name]
                children[child.plural] = [child.select(fields)]
            return children
        case "spread":
            return {f"by_{tool.group}": "object"} if tool.group else {}
        case "groups":
            figures = dict.fromkeys(tool.figures, "number")
            return {"groups": [figures]} if tool.group else figures
        case "slots":
            return {"slots": [{"start": "string", "end": "string"}]}
        case "refused":
            return {"refused": [{home.key: home.reference(), "reason": "string"}]}
        case "choice" | "ref" | "list":
            return {tool.field: _changed_field(tool, home, word)}
        case "restored":
            owner, _, name = tool.restore.partition(".")
            return tool.entities[owner].select([name])
        case "first" | "second":
            return _prefix_names(word, home.select(tool.fields))
        case "source" | "target":
            return _prefix_names(word, home.select([tool.field]))
        case "made":
            return tool.made.select(tool.show)
        case "key":
            return {home.key: home.reference()}
    return _plain_shape(tool, home, word)


def _prefix_names(prefix: str, fields: dict[str, Field]) -> dict[str, Shape]:
    return {f"{prefix}_{name}": field for name, field in fields.items()}


def _changed_field(tool: Any, home: Entity, kind: str) -> Field:
    """Returns the field that a tool changes; raises if it is of another kind or lacks a value."""
    field = home.select([tool.field])[tool.field]
    if field.kind != kind:
        raise ValueError(f"field: {tool.field!r} is not of kind {kind}")
    if kind == "choice":
        for value in (*tool.from_, tool.to):
            if value not in field.spec:
                known = ", ".join(map(str, field.spec))
                raise ValueError(f"{tool.field} has no value {value!r}; it has {known}")
    return field


def _plain_shape(tool: Any, home: Any, word: str) -> dict[str, Shape]:
    """Returns the shape of `name`, `name:kind` or `name:[kind]`.

    A name that is a setting stands for what the setting holds: fields, or names of figures.
    """
    name, _, kind = word.partition(":")
    value = getattr(tool, name) if name in type(tool).model_fields else name
    names: Sequence[str] = [value] if isinstance(value, str) else list(value)
    if not kind:
        return home.select(names) if names or name == "show" else {}
    item_kind = kind.strip("[]")
    item: Shape = home.reference() if item_kind == "key" else item_kind
    return dict.fromkeys(names, [item] if kind.startswith("[") else item)
