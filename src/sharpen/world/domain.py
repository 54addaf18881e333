"""A domain file → its tools, ready to run; or every problem in it, by tool and field."""

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
from sharpen.world.operations import OPERATIONS, UNSET, Operation, Param, Shape
from sharpen.world.state import Entities, Entity


class DomainError(SharpenError):
    """A domain file that cannot be used, with everything that is wrong with it."""

    def __init__(self, problems: list[str]):
        super().__init__("; ".join(problems))
        self.problems = problems


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # pyright: ignore
    """YAML as writers mean it: only true/false are booleans, 09:30 is text, a key stands once."""

    yaml_implicit_resolvers: ClassVar[Json] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Json:
        keys = [self.construct_object(key) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                text = f"the key {key!r} stands twice"
                raise yaml.constructor.ConstructorError(None, None, text, node.start_mark)
        return super().construct_mapping(node, deep)


for tag, pattern, first in (
    ("bool", r"true|false", "tf"),
    ("int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?[0-9]+\.[0-9]+", "-+0123456789"),
    ("null", r"null|~|", ["n", "~", ""]),
):
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), first)


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
        return validator_for(json.dumps(self.spec.parameters))

    @cached_property
    def defaults(self) -> Json:
        return {p.name: p.default for p in self.params.values()}

    @property
    def read_only(self) -> bool:
        return not self.operation.writes

    @property
    def required(self) -> list[str]:
        return [p.name for p in self.params.values() if p.required]

    @property
    def takes(self) -> dict[str, str]:
        """Parameters that take a key, with the entity it is a key of."""
        return {p.name: p.field.entity for p in self.params.values() if p.field.entity}

    @property
    def yields(self) -> dict[str, str]:
        """Paths of the answer that hold keys (`flights[].flight_id`), with the entity."""
        return dict(key_paths(self.shape, ""))

    def outputs(self) -> Json:
        """The JSON schema of a successful answer."""
        return shape_schema(self.shape)


def key_paths(shape: Shape, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(shape, list):
        yield from key_paths(shape[0], f"{path}[]")
    elif isinstance(shape, dict):
        for name, inner in shape.items():
            yield from key_paths(inner, f"{path}.{name}" if path else name)
    elif isinstance(shape, Field) and shape.entity:
        yield (f"{path}[]" if shape.kind == "list" else path), shape.entity


def shape_schema(shape: Shape) -> Json:
    if isinstance(shape, list):
        return {"type": "array", "items": shape_schema(shape[0])}
    if isinstance(shape, dict):
        return {"type": "object", "properties": {n: shape_schema(s) for n, s in shape.items()}}
    if isinstance(shape, Field):
        schema = {k: v for k, v in value_schema(shape).items() if k not in ("minimum", "maximum")}
        return schema | ({"type": [schema["type"], "null"]} if shape.none else {})
    if shape == "any":
        return {}
    return {"type": [shape, "null"] if shape == "number" else shape}


@dataclass(frozen=True, eq=False)
class Domain:
    """A category: its entities and its tools, in the order of the file."""

    category: str
    about: str
    entities: Entities
    tools: dict[str, Tool]


class DomainFile(Config):
    """The outermost keys of a domain file."""

    category: str
    about: str
    entities: dict[str, Entity]
    tools: dict[str, dict[str, Any]]
    pools: dict[str, list[str]] = Setting({})


def load_domain(path: str | Path) -> Domain:
    """A domain file's tools, or a `DomainError` that lists all that is wrong."""
    path, tools = Path(path), dict[str, Tool]()
    try:
        file = parse_config(DomainFile, read_yaml(path, Loader), path.name)
    except ConfigError as error:
        raise DomainError([str(error)]) from None
    entities = Entities(file.category, file.entities, file.pools)
    problems = list(entity_problems(entities))
    # Tools stand on the entities: they would only repeat what is wrong with these.
    for name, values in ({} if problems else file.tools).items():
        try:
            tools[name] = load_tool(name, values, entities)
        except (SharpenError, ValueError) as error:
            text = one_line(error).removeprefix(f"tools.{name}: ")
            problems.append(f"tools.{name}: {text}")
    if problems:
        raise DomainError([f"{path.name}: {text}" for text in problems])
    return Domain(file.category, file.about, entities, tools)


def entity_problems(entities: Entities) -> Iterator[str]:
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
            entities.drawn(entity, "train")
        except ValueError as error:
            yield f"entities.{name}: {error}"


def load_tool(name: str, values: Json, entities: Entities) -> Tool:
    operation = OPERATIONS.get(str(values.pop("op", "")))
    if operation is None:
        raise ConfigError(f"op: expected one of {', '.join(OPERATIONS)}")
    home = str(values.get("into") or values.get("entity"))
    settings = quoted(values, home, entities) | {"entities": entities}
    if isinstance(values.get("params"), dict):
        settings["params"] = {n: unlike(f, home, entities) for n, f in values["params"].items()}
    if isinstance(values.get("also"), list):
        settings["also"] = [quoted(new, "", entities) for new in values["also"]]
    tool = parse_config(operation, settings, f"tools.{name}")
    taken = tool.parameters()
    params = {param.name: param for param in taken}
    wrong = [f"{param.name!r} stands twice" for param in taken if params[param.name] is not param]
    wrong += [f"{name!r} is not used by the tool" for name in tool.params if name not in params]
    if wrong:
        raise ConfigError(f"params: {wrong[0]}")
    for field in tool.params.values():
        entities.drawn(field, "train")  # refuses a pool that is not there
    schema: Json = {"type": "object", "properties": {n: p.schema() for n, p in params.items()}}
    required = [n for n, p in params.items() if p.required]
    schema |= {"required": required} if required else {}
    spec = ToolSpec(name, tool.about, schema | {"additionalProperties": False})
    return Tool(name, entities.category, tool, params, tool.shape(), spec)


def unlike(field: Any, home: str, entities: Entities) -> Any:
    """`{like: fare, about: …}` → that field with another description."""
    if not isinstance(field, dict) or "like" not in field:
        return field
    owner, name = f"{home}.{field['like']}".split(".")[-2:]
    rest = {key: value for key, value in field.items() if key != "like"}
    return dict(entities[owner].select([name])[name]) | UNSET | rest


def quoted(effect: Any, home: str, entities: Entities) -> Any:
    """Under `set`, a bare value of a choice field stands for itself."""
    given = effect.get("set") if isinstance(effect, dict) else None
    if not given or not isinstance(given, dict):
        return effect
    fields = entities[home or effect["entity"]].select(given)
    bare = [n for n, v in given.items() if fields[n].kind == "choice" and v in fields[n].spec]
    return effect | {"set": given | {name: repr(given[name]) for name in bare}}
