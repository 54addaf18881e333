"""A domain file → its tools, ready to run; or a list of every problem in it, by tool and field.

Called by `World` and by the check of domain files. docs/world.md describes the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import yaml
from pydantic import Field as Setting

from sharpen.config import Config, ConfigError, one_line, parse_config, read_yaml
from sharpen.tools import validator_for
from sharpen.types import Json, SharpenError, ToolSpec
from sharpen.world import reading, writing  # noqa: F401  they register the operations
from sharpen.world.fields import Field, value_schema
from sharpen.world.operations import OPERATIONS, Operation
from sharpen.world.signatures import UNSET, Param, Shape
from sharpen.world.state import Entities, Entity


class DomainError(SharpenError):
    """A domain file that cannot be used; `problems` lists everything that is wrong with it."""

    def __init__(self, problems: list[str]):
        super().__init__("; ".join(problems))
        self.problems = problems


# Tools and domains --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Tool:
    """One executable tool: its operation with settings, and what was derived from them."""

    name: str
    category: str
    operation: Operation
    params: dict[str, Param]
    shape: Shape
    spec: ToolSpec

    @cached_property
    def validator(self) -> Any:
        """The compiled JSON schema of its arguments."""
        return validator_for(json.dumps(self.spec.parameters))

    @cached_property
    def defaults(self) -> Json:
        """Every parameter with its default, or None."""
        return {param.name: param.default for param in self.params.values()}

    @property
    def read_only(self) -> bool:
        """Whether calls leave the state as it is."""
        return not self.operation.writes

    @property
    def required(self) -> list[str]:
        """Names of the parameters that every call must give."""
        return [param.name for param in self.params.values() if param.required]

    @property
    def takes(self) -> dict[str, str]:
        """Parameters that take a key, with the entity whose key it is."""
        return {
            param.name: param.field.entity for param in self.params.values() if param.field.entity
        }

    @property
    def yields(self) -> dict[str, str]:
        """Paths of the answer that hold keys (`flights[].flight_id`), with the entity."""
        return dict(_find_key_paths(self.shape, ""))

    def outputs(self) -> Json:
        """Returns the JSON schema of a successful answer."""
        return _shape_schema(self.shape)


@dataclass(frozen=True, eq=False)
class Domain:
    """A category: its entities and its tools, in the order of the file."""

    category: str
    about: str
    entities: Entities
    tools: dict[str, Tool]


def _find_key_paths(shape: Shape, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(shape, list):
        yield from _find_key_paths(shape[0], f"{path}[]")
    elif isinstance(shape, dict):
        for name, inner in shape.items():
            yield from _find_key_paths(inner, f"{path}.{name}" if path else name)
    elif isinstance(shape, Field) and shape.entity:
        if shape.kind == "list":
            path += "[]"
        yield path, shape.entity


def _shape_schema(shape: Shape) -> Json:
    if isinstance(shape, list):
        return {"type": "array", "items": _shape_schema(shape[0])}
    if isinstance(shape, dict):
        properties = {name: _shape_schema(inner) for name, inner in shape.items()}
        return {"type": "object", "properties": properties}
    if isinstance(shape, Field):
        schema = value_schema(shape)
        # Limits hold for arguments; a computed value may lie outside.
        schema.pop("minimum", None)
        schema.pop("maximum", None)
        if shape.none:
            schema["type"] = [schema["type"], "null"]
        return schema
    if shape == "any":
        return {}
    return {"type": [shape, "null"] if shape == "number" else shape}


# Reading a file -----------------------------------------------------------------------------------


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # pyright: ignore
    """YAML as writers mean it: only true/false are booleans, 09:30 is text, keys do not repeat."""

    yaml_implicit_resolvers: ClassVar[Json] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Json:
        """Refuse a mapping with a repeated key, of which YAML would keep the last."""
        keys = [self.construct_object(key) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                text = f"the key {key!r} stands twice"
                raise yaml.constructor.ConstructorError(None, None, text, node.start_mark)
        return super().construct_mapping(node, deep)


# Tag, pattern and possible first characters of every value that is not text.
_PLAIN_VALUES = (
    ("bool", r"true|false", "tf"),
    ("int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?[0-9]+\.[0-9]+", "-+0123456789"),
    ("null", r"null|~|", ["n", "~", ""]),
)
for _tag, _pattern, _first in _PLAIN_VALUES:
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first
    )


class _DomainFile(Config):
    """The outermost keys of a domain file."""

    category: str
    about: str
    entities: dict[str, Entity]
    tools: dict[str, dict[str, Any]]
    pools: dict[str, list[str]] = Setting({})


def load_domain(path: str | Path) -> Domain:
    """Read a domain file, or raise a `DomainError` that lists all that is wrong."""
    path = Path(path)
    try:
        file = parse_config(_DomainFile, read_yaml(path, _Loader), path.name)
    except ConfigError as error:
        raise DomainError([str(error)]) from None
    entities = Entities(file.category, file.entities, file.pools)
    problems = list(_entity_problems(entities))
    tools: dict[str, Tool] = {}
    if not problems:  # the problems of tools would only repeat those of their entities
        for name, settings in file.tools.items():
            try:
                tools[name] = _load_tool(name, settings, entities)
            except (SharpenError, ValueError) as error:
                text = one_line(error).removeprefix(f"tools.{name}: ")
                problems.append(f"tools.{name}: {text}")
    if problems:
        raise DomainError([f"{path.name}: {text}" for text in problems])
    return Domain(file.category, file.about, entities, tools)


def _entity_problems(entities: Entities) -> Iterator[str]:
    if not re.fullmatch(r"[a-z]+/[a-z_]+", entities.category):
        yield f"category: expected domain/subdomain, found {entities.category!r}"
    for name, entity in entities.entities.items():
        if not entity.key or entity.fields[entity.key].kind != "id":
            yield f"entities.{name}: the first field is the key and must be an id"
        if entity.key == name:
            yield f"entities.{name}: the key needs another name, such as {name}_id"
        for field_name, field in entity.fields.items():
            if field.entity and field.entity not in entities.entities:
                yield f"entities.{name}.{field_name}: no entity {field.entity!r}"
        try:
            entities.get_drawer(entity, "train")
        except ValueError as error:
            yield f"entities.{name}: {error}"


# Reading a tool -----------------------------------------------------------------------------------


def _load_tool(name: str, settings: Json, entities: Entities) -> Tool:
    operation_class = OPERATIONS.get(str(settings.pop("op", "")))
    if operation_class is None:
        raise ConfigError(f"op: expected one of {', '.join(OPERATIONS)}")
    values = _expand_settings(settings, entities) | {"entities": entities}
    operation = parse_config(operation_class, values, f"tools.{name}")
    params = _collect_params(operation)
    for field in operation.params.values():
        entities.get_drawer(field, "train")  # refuses a pool that does not exist
    spec = ToolSpec(name, operation.about, _parameters_schema(params))
    return Tool(name, entities.category, operation, params, operation.shape(), spec)


def _expand_settings(settings: Json, entities: Entities) -> Json:
    """Resolve the short forms: `like` among parameters, and bare choice values under `set`."""
    home = str(settings.get("into") or settings.get("entity"))
    expanded = _quote_choices(settings, home, entities)
    params = settings.get("params")
    if isinstance(params, dict):
        fields = {name: _resolve_like(field, home, entities) for name, field in params.items()}
        expanded = expanded | {"params": fields}
    also = settings.get("also")
    if isinstance(also, list):
        rows = [_quote_choices(new_row, "", entities) for new_row in also]
        expanded = expanded | {"also": rows}
    return expanded


def _quote_choices(effect: Any, home: str, entities: Entities) -> Any:
    """Quote bare values of choice fields under `set`, as its values are read as expressions."""
    assignments = effect.get("set") if isinstance(effect, dict) else None
    if not assignments or not isinstance(assignments, dict):
        return effect
    fields = entities[home or effect["entity"]].select(assignments)
    quoted = dict(assignments)
    for name, value in assignments.items():
        field = fields[name]
        if field.kind == "choice" and value in field.spec:
            quoted[name] = repr(value)
    return effect | {"set": quoted}


def _resolve_like(field: Any, home: str, entities: Entities) -> Any:
    """Turn `{like: fare, about: …}` into the settings of that field with the changes."""
    if not isinstance(field, dict) or "like" not in field:
        return field
    owner, name = f"{home}.{field['like']}".split(".")[-2:]
    changes = {key: value for key, value in field.items() if key != "like"}
    original = entities[owner].select([name])[name]
    return dict(original) | UNSET | changes


def _collect_params(operation: Operation) -> dict[str, Param]:
    """Returns the parameters by name; refuses repeated ones, and declared ones without a use."""
    params = operation.parameters()
    names = [param.name for param in params]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"params: {name!r} stands twice")
    for name in operation.params:
        if name not in names:
            raise ConfigError(f"params: {name!r} is not used by the tool")
    return {param.name: param for param in params}


def _parameters_schema(params: dict[str, Param]) -> Json:
    schema: Json = {
        "type": "object",
        "properties": {name: param.schema() for name, param in params.items()},
    }
    required = [name for name, param in params.items() if param.required]
    if required:
        schema["required"] = required
    schema["additionalProperties"] = False
    return schema
