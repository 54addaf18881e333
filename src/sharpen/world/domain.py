"""A domain file → its tools, ready to run; or every problem in it, by tool and field."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field as Setting

try:
    from yaml import CSafeLoader as SafeLoader  # ten times as fast, where libyaml is there
except ImportError:
    from yaml import SafeLoader

from sharpen.config import Config, ConfigError, one_line, parse_config
from sharpen.tools import validator_for
from sharpen.types import Json, SharpenError, ToolSpec
from sharpen.world import editing, making, reading
from sharpen.world.fields import Field, shared_pools, value_schema
from sharpen.world.phrases import SLOT
from sharpen.world.state import Entities, Entity
from sharpen.world.templates import Operation, Param, Shape

OPERATIONS: dict[str, type[Operation]] = {
    cls.op: cls
    for module in (reading, making, editing)
    for cls in vars(module).values()
    if isinstance(cls, type) and issubclass(cls, Operation) and "op" in vars(cls) and cls.op
}


class DomainError(SharpenError):
    """A domain file that cannot be used, with everything that is wrong with it."""

    def __init__(self, problems: list[str]):
        super().__init__("; ".join(problems))
        self.problems = problems


class Loader(SafeLoader):  # pyright: ignore[reportGeneralTypeIssues]
    """YAML as writers mean it: only true/false are booleans, 09:30 is text, a key stands once."""


Loader.yaml_implicit_resolvers = {}
for tag, pattern, first in (
    ("bool", r"true|false", "tf"),
    ("int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?[0-9]+\.[0-9]+", "-+0123456789"),
    ("null", r"null|~|", ["n", "~", ""]),
):
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), first)


def unique_mapping(loader: Any, node: yaml.MappingNode) -> Json:
    pairs = [(loader.construct_object(k), loader.construct_object(v, True)) for k, v in node.value]
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [k for k, _ in pairs]
        twice = next(n for n in names if names.count(n) > 1)
        raise yaml.constructor.ConstructorError(
            None, None, f"the key {twice!r} stands twice", node.start_mark
        )
    return values


Loader.add_constructor("tag:yaml.org,2002:map", unique_mapping)


@dataclass(frozen=True, eq=False)
class Tool:
    """One executable tool: its template with settings, and what was derived from them."""

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
        found = {p.name: p.field.entity for p in self.params.values()}
        return {name: entity for name, entity in found.items() if entity}

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
    entities: dict[str, dict[str, Any]]
    tools: dict[str, dict[str, Any]]
    pools: dict[str, list[str]] = Setting({})


def read_domain(path: Path) -> DomainFile:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f"{path.name}:{mark.line + 1}" if mark else path.name
        text = getattr(error, "problem", "") or one_line(error)
        raise DomainError([f"{at}: not YAML: {text}"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DomainError([f"{path}: {one_line(error)}"]) from None
    return parse_config(DomainFile, values, path.name)


def load_domain(path: str | Path) -> Domain:
    """A domain file's tools, or a `DomainError` that lists all that is wrong."""
    path = Path(path)
    file, problems, tools = read_domain(path), list[str](), dict[str, Tool]()
    if not re.fullmatch(r"[a-z]+/[a-z_]+", file.category):
        problems.append(f"category: expected domain/subdomain, found {file.category!r}")
    entities = Entities(file.category, load_entities(file, problems), file.pools)
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


def load_entities(file: DomainFile, problems: list[str]) -> dict[str, Entity]:
    found: dict[str, Entity] = {}
    for name, values in file.entities.items():
        at = f"entities.{name}"
        named = values | {"name": name, "table": f"{file.category}.{name}"}
        try:
            entity = found[name] = parse_config(Entity, named, at)
        except ConfigError as error:
            problems.append(str(error))
            continue
        if not entity.fields or entity.fields[entity.key].kind not in ("id", "text", "choice"):
            problems.append(f"{at}: the first field is the key and must be id, text or choice")
        elif entity.key == name:
            problems.append(f"{at}: the key needs another name than its entity, such as {name}_id")
        for field_name, field in entity.fields.items():
            missing = [f"pool {name!r}" for name in missing_pools(field, file.pools)]
            if field.entity and field.entity not in file.entities:
                missing.append(f"entity {field.entity!r}")
            problems += [f"{at}.{field_name}: no {what}" for what in missing]
    return found


def missing_pools(field: Field, pools: Collection[str]) -> list[str]:
    if field.kind == "object":
        return [p for inner in field.spec.values() for p in missing_pools(inner, pools)]
    named = SLOT.findall(field.spec) if field.kind == "text" and isinstance(field.spec, str) else []
    return [name for name in named if name not in pools and name not in shared_pools()]


def load_tool(name: str, values: Json, entities: Entities) -> Tool:
    operation = OPERATIONS.get(str(values.get("op")))
    if operation is None:
        raise ConfigError(f"op: expected one of {', '.join(OPERATIONS)}")
    if values.get("entity", "") not in ("", *entities.entities):
        raise ConfigError(f"entity: no entity {values['entity']!r}")
    settings = quoted(values, values.get("into") or values.get("entity"), entities)
    del settings["op"]
    if isinstance(values.get("params"), dict):
        like = {n: unlike(f, values, entities) for n, f in values["params"].items()}
        settings["params"] = like
    if "also" in values:
        settings["also"] = [quoted(new, new.get("entity"), entities) for new in values["also"]]
    loaded = parse_config(operation, settings, f"tools.{name}")
    params: dict[str, Param] = {}
    for param in loaded.parameters(entities):
        if param.name in params:
            raise ConfigError(f"params: {param.name!r} stands twice")
        params[param.name] = param
    for declared, field in loaded.params.items():
        if declared not in params:
            raise ConfigError(f"params: {declared!r} is not used by the tool")
        for pool in missing_pools(field, entities.pools):
            raise ConfigError(f"params: no pool {pool!r}")
    shape = loaded.shape(entities) | dict.fromkeys(loaded.returns, "any")
    schema: Json = {"type": "object", "properties": {n: p.schema() for n, p in params.items()}}
    required = [n for n, p in params.items() if p.required]
    schema |= {"required": required} if required else {}
    spec = ToolSpec(name, loaded.about, schema | {"additionalProperties": False})
    return Tool(name, entities.category, loaded, params, shape, spec)


def unlike(field: Any, settings: Json, entities: Entities) -> Any:
    """`{like: fare, about: …}` → that field with another description."""
    if not isinstance(field, dict) or "like" not in field:
        return field
    owner, _, name = str(field["like"]).rpartition(".")
    owner = owner or settings.get("into") or settings.get("entity", "")
    known = entities.entities.get(owner)
    if known is None or name not in known.fields:
        raise ConfigError(f"params: like: no field {field['like']!r}")
    source, rest = known.fields[name], {k: v for k, v in field.items() if k != "like"}
    if name == known.key:
        return {"ref": owner, "about": source.about} | rest
    kept = ("kind", "spec", "about", "step", "bounds", "free", "format", "size")
    return {key: getattr(source, key) for key in kept} | rest


def quoted(settings: Json, entity: Any, entities: Entities) -> Json:
    """Under `set`, a bare value of a choice field stands for itself."""
    known, given = entities.entities.get(str(entity)), settings.get("set")
    if known is None or not isinstance(given, dict):
        return dict(settings)
    fields = known.select(given) if given else {}
    literal = {
        name: repr(value) if fields[name].kind == "choice" and value in fields[name].spec else value
        for name, value in given.items()
    }
    return settings | {"set": literal}
