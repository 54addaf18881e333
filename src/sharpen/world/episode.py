"""The world: its categories, and episodes in which their tools really run. An episode is a small
state; `call` always answers with data: a result, or `{"error": code, "message": …}`."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from sharpen.tools import complaints
from sharpen.types import Json, SharpenError, ToolCall
from sharpen.world.domain import Domain, Tool, load_domain
from sharpen.world.expressions import ToolFailure
from sharpen.world.fields import TODAY, Family, Field, plain
from sharpen.world.operations import Call, Param
from sharpen.world.state import Entity, Tables, base_rows, diff, seeded

DOMAINS = Path(__file__).parent / "domains"
TRIES = 80  # arguments drawn before a tool is said not to reach an outcome from this state
LARGEST = 1e12
FAULTS = {
    "timeout": "the service did not answer in time; nothing was changed",
    "rate_limit": "too many requests; try again",
}


@dataclass(frozen=True, slots=True)
class Faults:
    """Injected failures: by rate, drawn from the seed, or at given calls (0 is the first)."""

    timeout: float = 0.0
    rate_limit: float = 0.0
    seed: int = 0
    at: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind in self.at.values():
            if kind not in FAULTS:
                raise SharpenError(f"faults: expected {' or '.join(FAULTS)}, found {kind!r}")

    def kind(self, number: int) -> str:
        if number in self.at or not (self.timeout or self.rate_limit):
            return self.at.get(number, "")
        drawn = seeded("fault", self.seed, number).random()
        if drawn < self.timeout:
            return "timeout"
        return "rate_limit" if drawn < self.timeout + self.rate_limit else ""


class World:
    """All categories of a folder of domain files, each read when it is first needed."""

    def __init__(self, folder: str | Path = DOMAINS):
        found = sorted(Path(folder).glob("*.yaml"))
        if not found:
            raise SharpenError(f"{folder}: no domain files (*.yaml)")
        self.files = {file.stem.replace("_", "/", 1): file for file in found}
        self.categories, self.loaded = list(self.files), dict[str, Domain]()

    def domain(self, category: str) -> Domain:
        if category not in self.files:
            raise SharpenError(f"no category {category!r}; there are {', '.join(self.files)}")
        if category not in self.loaded:
            domain = load_domain(self.files[category])
            if domain.category != category:
                raise SharpenError(f"{self.files[category].name}: category is {domain.category!r}")
            self.loaded[category] = domain
        return self.loaded[category]

    def tools(self, categories: Iterable[str] | None = None) -> Iterator[Tool]:
        for category in categories or self.files:
            yield from self.domain(category).tools.values()

    def tool(self, name: str) -> Tool:
        for tool in self.tools():
            if tool.name == name:
                return tool
        raise SharpenError(f"no tool {name!r} in the world")

    def episode(
        self,
        categories: Iterable[str] | None = None,
        seed: int = 0,
        family: Family = "train",
        faults: Faults | None = None,
    ) -> Episode:
        if family not in TODAY:
            raise SharpenError(f"family: expected {', '.join(TODAY)}, found {family!r}")
        domains = [self.domain(c) for c in (categories or self.files)]
        return Episode(domains, seed, family, faults or Faults())


shipped_world = cache(World)


class Episode:
    """One state and the tools that act on it."""

    def __init__(self, domains: Iterable[Domain], seed: int, family: Family, faults: Faults):
        self.domains = {domain.category: domain for domain in domains}
        self.seed, self.faults = seed, faults
        self.family: Family = family
        self.constants = {"today": str(TODAY[family]), "now": f"{TODAY[family]}T09:00"}
        self.reset()

    def reset(self) -> None:
        self.tables, self.calls = Tables(self.base), 0

    def base(self, entity: Entity) -> dict[str, Json]:
        category, name = entity.table.split(".")
        return base_rows(self.domains[category].entities, self.family, self.seed, name)

    def tools(self) -> Iterator[Tool]:
        for domain in self.domains.values():
            yield from domain.tools.values()

    def tool(self, name: str) -> Tool | None:
        found = (domain.tools[name] for domain in self.domains.values() if name in domain.tools)
        return next(found, None)

    def call(self, call: ToolCall, offered: Container[str] | None = None) -> Json:
        """Execute one call, of the tools on offer; whatever is wrong with it is the answer."""
        fault, self.calls = self.faults.kind(self.calls), self.calls + 1
        tool = self.tool(call.name)
        if tool is None or (offered is not None and call.name not in offered):
            return failure("unknown_tool", f"there is no tool {call.name!r}")
        if problems := complaints(tool.validator, call.arguments):
            problems.append(f"parameters: {', '.join(tool.params) or 'none'}")
            return failure("invalid_argument", "; ".join(problems))
        if fault:
            return failure(fault, FAULTS[fault])
        try:
            return self.execute(tool, call.arguments)
        except ToolFailure as error:
            return failure(error.code, error.message)

    def execute(self, tool: Tool, arguments: Json) -> Json:
        args = tool.defaults | arguments
        for name, value in arguments.items():
            if isinstance(value, (int, float)) and abs(value) > LARGEST:
                raise ToolFailure("invalid_argument", f"{name}: too large")
            if isinstance(value, float):
                args[name] = plain(value)
        entities = self.domains[tool.category].entities
        running = Call(entities, self.tables, tool.params, args, self.constants)
        result = tool.operation.execute(running)
        for entity, key, row in running.writes:
            self.tables.put(entity, key, row)
        return result

    def fork(self) -> Episode:
        """The same state, to try something without consequences or injected faults."""
        other = Episode(self.domains.values(), self.seed, self.family, Faults())
        other.restore(self.snapshot())
        return other

    def snapshot(self) -> Json:
        """What was written so far; small, and enough to come back to this state."""
        return {table: dict(edits) for table, edits in self.tables.edits.items()}

    def restore(self, snapshot: Json) -> None:
        self.tables.edits = {table: dict(edits) for table, edits in snapshot.items()}

    def state(self) -> Json:
        """Every row, for a reader: table → key → row."""
        found = [e for d in self.domains.values() for e in d.entities.entities.values()]
        return {entity.table: dict(self.tables.rows(entity)) for entity in found}

    def changes(self) -> Json:
        """What differs from the start, as end states are compared: table → key → row, or None."""
        out: Json = {}
        for table, edits in self.tables.edits.items():
            category, name = table.split(".")
            entity = self.domains[category].entities[name]
            base, written = self.base(entity), dict[str, Json | None]()
            for key, row in edits.items():
                if row != base.get(key):
                    written[key] = row and entity.public(row, base.get(key))
            out |= {table: written} if written else {}
        return out

    def same(self, other: Episode) -> bool:
        """Whether both ended in the same state."""
        return self.changes() == other.changes()

    def diff(self, wanted: Episode) -> list[str]:
        return diff(self.changes(), wanted.changes())

    def digest(self) -> str:
        start = [sorted(self.domains), self.family, self.seed, self.changes()]
        return hashlib.sha256(json.dumps(start, sort_keys=True).encode()).hexdigest()[:16]

    def sample(
        self, tool: Tool, rng: random.Random, using: Iterable[str] = (), outcome: str = "ok"
    ) -> ToolCall | None:
        """A call of `tool` with its required parameters and those under `using`, that has this
        outcome (`ok`, or an error's code) in the present state; None when none was found."""
        sampler, names = Sampler(self, tool, rng), {*tool.required, *using}
        for _ in range(TRIES):
            call = ToolCall(tool.name, sampler.arguments(names, outcome == "not_found"))
            if outcome_of(self.fork().call(call)) == outcome:
                return call
        return None


def failure(code: str, message: str) -> Json:
    return {"error": code, "message": message}


def outcome_of(result: Json) -> str:
    """`ok`, `empty` for nothing found, `partial` for rows that were refused, or an error's code."""
    if "error" in result or result.get("refused"):
        return str(result.get("error", "partial"))
    return "empty" if result.get("count") == 0 else "ok"


class Sampler:
    """Draws arguments of one tool around a row of the present state, so that conditions are met."""

    def __init__(self, episode: Episode, tool: Tool, rng: random.Random):
        self.tool, self.rng, self.tables = tool, rng, episode.tables
        self.family: Family = episode.family
        self.entities = episode.domains[tool.category].entities

    def keys(self, entity: str) -> list[str]:
        return list(self.tables.rows(self.entities[entity]))

    def value(self, field: Field) -> Any:
        draw = self.entities.drawn(field, self.family)
        return draw(self.rng.random, self.rng.sample, self.keys)

    def arguments(self, names: Container[str], misdirected: bool = False) -> Json:
        """Values for these parameters; misdirected ones have a key that nothing has."""
        tool, home = self.tool, self.tool.operation.entity
        rows = list(self.tables.rows(self.entities[home]).values()) if home else []
        anchor = self.rng.choice(rows) if rows else {}
        wanted = [param for param in tool.params.values() if param.name in names]
        found = {param.name: self.argument(param, anchor) for param in wanted}
        keys = [name for name in tool.takes if isinstance(found.get(name), str)]
        for name in keys[:1] if misdirected else ():
            entity = self.entities[tool.takes[name]]
            found[name] = self.value(entity.fields[entity.key])
        return found

    def argument(self, param: Param, anchor: Json) -> Any:
        operation = self.tool.operation
        if param.many:
            return self.several(param, param.many, anchor)
        if param.anchor and anchor.get(param.anchor) not in (None, []):
            return self.near(param.op, anchor[param.anchor])
        own = operation.keyed and param.field.entity == operation.entity
        return anchor[param.name] if own and param.name in anchor else self.value(param.field)

    def near(self, op: str, value: Any) -> Any:
        """A condition's value that a row with `value` meets."""
        if op in ("<=", "<", ">=", ">") and not isinstance(value, str):
            span = abs(value) * 0.25 + (0 if isinstance(value, float) else 1)
            moved = value + (span if op in ("<=", "<") else -span)
            whole = abs(moved) >= 10 or isinstance(value, int)
            return max(0 if value >= 0 else moved, round(moved) if whole else round(moved, 1))
        if op == "contains":
            return max(str(value).split(), key=len).strip(".,;:").lower()
        return self.rng.choice(value) if op == "has" else value

    def several(self, param: Param, many: tuple[int, int], anchor: Json) -> list[Any]:
        count = self.rng.randint(max(many[0], 1), min(many[1], 3))
        first = anchor.get(param.anchor or param.name.removesuffix("s"))
        found = [first] if first is not None else []
        while len(found) < count:
            value = self.value(param.field)
            if value in found and count > many[0]:
                count -= 1
            elif value not in found:
                found.append(value)
        return found
