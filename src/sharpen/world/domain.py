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


class Domain:
    """A category: its entities and its tools, in the order of the file."""

    def __init__(self, about: str, entities: Entities, tools: dict[str, Tool]):
        self.category, self.about, self.entities, self.tools = (
            entities.category,
            about,
            entities,
            tools,
        )


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
        raise DomainError(
            [f"{at}: not YAML: {getattr(error, 'problem', '') or one_line(error)}"]
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DomainError([f"{path}: {one_line(error)}"]) from None
    return parse_config(DomainFile, values, path.name)


def load_domain(path: str | Path) -> Domain:
    """A domain file's tools, or a `DomainError` that lists all that is wrong."""
    path = Path(path)
    file = read_domain(path)
    problems: list[str] = []
    if not re.fullmatch(r"[a-z]+/[a-z_]+", file.category):
        problems.append(
            f"{path.name}: category: expected domain/subdomain, found {file.category!r}"
        )
    entities = Entities(file.category, load_entities(file, path.name, problems), file.pools)
    if problems:  # tools stand on the entities: their complaints would only repeat these
        raise DomainError(problems)
    tools: dict[str, Tool] = {}
    for name, values in file.tools.items():
        try:
            tools[name] = load_tool(name, values, entities, f"{path.name}: tools.{name}")
        except (SharpenError, ValueError) as error:
            text = one_line(error)
            problems.append(
                text if text.startswith(path.name) else f"{path.name}: tools.{name}: {text}"
            )
    if problems:
        raise DomainError(problems)
    return Domain(file.about, entities, tools)


def load_entities(file: DomainFile, where: str, problems: list[str]) -> dict[str, Entity]:
    found: dict[str, Entity] = {}
    for name, values in file.entities.items():
        at = f"{where}: entities.{name}"
        try:
            entity = parse_config(
                Entity, values | {"name": name, "table": f"{file.category}.{name}"}, at
            )
        except ConfigError as error:
            problems.append(str(error))
            continue
        found[name] = entity
        if not entity.fields or entity.fields[entity.key].kind not in ("id", "text", "choice"):
            problems.append(f"{at}: the first field is the key and must be id, text or choice")
        elif entity.key == name:
            problems.append(f"{at}: the key needs another name than its entity, such as {name}_id")
        for field_name, field in entity.fields.items():
            if field.entity and field.entity not in file.entities:
                problems.append(f"{at}.{field_name}: no entity {field.entity!r}")
            problems += [
                f"{at}.{field_name}: no pool {p!r}" for p in missing_pools(field, file.pools)
            ]
    return found


def missing_pools(field: Field, pools: Collection[str]) -> list[str]:
    if field.kind == "object":
        return [p for inner in field.spec.values() for p in missing_pools(inner, pools)]
    named = SLOT.findall(field.spec) if field.kind == "text" and isinstance(field.spec, str) else []
    return [name for name in named if name not in pools and name not in shared_pools()]


def load_tool(name: str, values: Json, entities: Entities, where: str) -> Tool:
    operation = OPERATIONS.get(str(values.get("op")))
    if operation is None:
        raise ConfigError(f"{where}: op: expected one of {', '.join(OPERATIONS)}")
    settings = {k: v for k, v in values.items() if k != "op"}
    if settings.get("entity", "") not in ("", *entities.entities):
        raise ConfigError(f"{where}: entity: no entity {settings['entity']!r}")
    if isinstance(settings.get("params"), dict):
        settings["params"] = {
            n: unlike(f, settings, entities) for n, f in settings["params"].items()
        }
    home = settings.get("into") or settings.get("entity")
    settings = quoted(settings, home, entities)
    settings["also"] = [
        quoted(new, new.get("entity"), entities) for new in settings.get("also", [])
    ]
    if not settings["also"]:
        del settings["also"]
    loaded = parse_config(operation, settings, where)
    params = loaded.parameters(entities)
    twice = [p.name for p in params if [q.name for q in params].count(p.name) > 1]
    unused = [n for n in loaded.params if n not in {p.name for p in params}]
    if twice or unused:
        text = f"{twice[0]!r} stands twice" if twice else f"{unused[0]!r} is not used by the tool"
        raise ConfigError(f"{where}: params: {text}")
    lost = [p for field in loaded.params.values() for p in missing_pools(field, entities.pools)]
    if lost:
        raise ConfigError(f"{where}: params: no pool {lost[0]!r}")
    shape = loaded.shape(entities) | dict.fromkeys(loaded.returns, "any")
    schema: Json = {"type": "object", "properties": {p.name: p.schema() for p in params}}
    required = [p.name for p in params if p.required]
    schema |= {"required": required} if required else {}
    schema["additionalProperties"] = False
    spec = ToolSpec(name, loaded.about, schema)
    return Tool(name, entities.category, loaded, {p.name: p for p in params}, shape, spec)


def unlike(field: Any, settings: Json, entities: Entities) -> Any:
    """`{like: fare, about: …}` → that field with another description."""
    if not isinstance(field, dict) or "like" not in field:
        return field
    owner, _, name = str(field["like"]).rpartition(".")
    owner = owner or settings.get("into") or settings.get("entity", "")
    known = entities.entities.get(owner)
    if known is None or name not in known.fields:
        raise ConfigError(f"params: like: no field {field['like']!r}")
    source = known.fields[name]
    rest = {k: v for k, v in field.items() if k != "like"}
    if name == known.key:
        return {"ref": owner, "about": source.about} | rest
    kept = {"kind": source.kind, "spec": source.spec, "about": source.about, "step": source.step}
    kept |= {"bounds": source.bounds, "free": source.free, "format": source.format}
    return kept | {"size": source.size} | rest


def quoted(settings: Json, entity: Any, entities: Entities) -> Json:
    """Under `set`, a bare value of a choice field stands for itself."""
    known = entities.entities.get(str(entity))
    if known is None or not isinstance(settings.get("set"), dict):
        return settings

    def literal(name: str, value: Any) -> Any:
        field = known.fields.get(name)
        if field is None:
            raise ConfigError(f"set: {known.name} has no field {name!r}")
        return repr(value) if field.kind == "choice" and value in field.spec else value

    return settings | {"set": {n: literal(n, v) for n, v in settings["set"].items()}}
