"""The world: its categories, and episodes in which their tools really run.

An episode is a small state. `Episode.call` always answers with data: a result, or
`{"error": code, "message": …}`. Used by the environment, the rewards and the data builders.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from sharpen.tools import argument_problems
from sharpen.types import Json, SharpenError, ToolCall
from sharpen.world.domain import Domain, Tool, load_domain
from sharpen.world.expressions import ToolFailure
from sharpen.world.fields import TODAY, Family, plain
from sharpen.world.operations import Call
from sharpen.world.sampling import Sampler
from sharpen.world.state import Entity, Tables, base_rows, diff, seeded_rng

DOMAINS = Path(__file__).parent / "domains"
FAULTS = {
    "timeout": "the service did not answer in time; nothing was changed",
    "rate_limit": "too many requests; try again",
}
_MAX_NUMBER = 1e12
_SAMPLING_TRIES = 80  # arguments drawn before a tool counts as unable to reach an outcome


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
        """Returns the fault of call `number`, or empty."""
        if number in self.at:
            return self.at[number]
        if not (self.timeout or self.rate_limit):
            return ""
        drawn = seeded_rng("fault", self.seed, number).random()
        if drawn < self.timeout:
            return "timeout"
        if drawn < self.timeout + self.rate_limit:
            return "rate_limit"
        return ""


class World:
    """All categories of a folder of domain files, each read when it is first needed."""

    def __init__(self, folder: str | Path = DOMAINS):
        files = sorted(Path(folder).glob("*.yaml"))
        if not files:
            raise SharpenError(f"{folder}: no domain files (*.yaml)")
        # The first underscore of the name is the slash: travel_flights.yaml is travel/flights.
        self.files = {file.stem.replace("_", "/", 1): file for file in files}
        self.categories = list(self.files)
        self._domains: dict[str, Domain] = {}

    def domain(self, category: str) -> Domain:
        """Returns a category; an unknown one raises a SharpenError."""
        if category not in self.files:
            raise SharpenError(f"no category {category!r}; there are {', '.join(self.files)}")
        if category not in self._domains:
            domain = load_domain(self.files[category])
            if domain.category != category:
                raise SharpenError(f"{self.files[category].name}: category is {domain.category!r}")
            self._domains[category] = domain
        return self._domains[category]

    def tools(self, categories: Iterable[str] | None = None) -> Iterator[Tool]:
        """Yields the tools of these categories, or of all."""
        for category in categories or self.files:
            yield from self.domain(category).tools.values()

    def tool(self, name: str) -> Tool:
        """Returns a tool by name; an unknown one raises a SharpenError."""
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
        """Start an episode with the tools of these categories, or of all."""
        if family not in TODAY:
            raise SharpenError(f"family: expected {', '.join(TODAY)}, found {family!r}")
        domains = [self.domain(category) for category in (categories or self.files)]
        return Episode(domains, seed, family, faults or Faults())


shipped_world = cache(World)


class Episode:
    """One state and the tools that act on it."""

    def __init__(self, domains: Iterable[Domain], seed: int, family: Family, faults: Faults):
        self.domains = {domain.category: domain for domain in domains}
        self.seed = seed
        self.family: Family = family
        self.faults = faults
        today = str(TODAY[family])
        self.constants = {"today": today, "now": f"{today}T09:00"}
        self.reset()

    def reset(self) -> None:
        self.tables = Tables(self._base_rows)
        self.call_count = 0

    def _base_rows(self, entity: Entity) -> dict[str, Json]:
        category, name = entity.table.split(".")
        return base_rows(self.domains[category].entities, self.family, self.seed, name)

    # Tools and calls

    def tools(self) -> Iterator[Tool]:
        """Yields all tools of the episode."""
        for domain in self.domains.values():
            yield from domain.tools.values()

    def tool(self, name: str) -> Tool | None:
        """Returns a tool by name, or None."""
        for domain in self.domains.values():
            if name in domain.tools:
                return domain.tools[name]
        return None

    def call(self, call: ToolCall, offered: Container[str] | None = None) -> Json:
        """Execute one call and return its answer; whatever is wrong with the call is an answer.

        With `offered`, only these tools can be called.
        """
        fault = self.faults.kind(self.call_count)
        self.call_count += 1
        tool = self.tool(call.name)
        if tool is None or (offered is not None and call.name not in offered):
            return error_result("unknown_tool", f"there is no tool {call.name!r}")
        problems = argument_problems(tool.validator, call.arguments)
        if problems:
            problems.append(f"parameters: {', '.join(tool.params) or 'none'}")
            return error_result("invalid_argument", "; ".join(problems))
        if fault:
            return error_result(fault, FAULTS[fault])
        try:
            return self._execute(tool, call.arguments)
        except ToolFailure as failure:
            return error_result(failure.code, failure.message)

    def _execute(self, tool: Tool, arguments: Json) -> Json:
        args = tool.defaults | arguments
        for name, value in arguments.items():
            if isinstance(value, (int, float)) and abs(value) > _MAX_NUMBER:
                raise ToolFailure("invalid_argument", f"{name}: too large")
            if isinstance(value, float):
                args[name] = plain(value)
        entities = self.domains[tool.category].entities
        call = Call(entities, self.tables, tool.params, args, self.constants)
        result = tool.operation.execute(call)
        for entity, key, row in call.writes:
            self.tables.put(entity, key, row)
        return result

    def sample(
        self, tool: Tool, rng: random.Random, using: Iterable[str] = (), outcome: str = "ok"
    ) -> ToolCall | None:
        """Draw a call of `tool` that has this outcome in the present state.

        It has the required parameters and those under `using`. The outcome is that of
        `outcome_of`. Returns None if no such call was found.
        """
        sampler = Sampler(self, tool, rng)
        names = {*tool.required, *using}
        for _ in range(_SAMPLING_TRIES):
            arguments = sampler.arguments(names, misdirected=outcome == "not_found")
            call = ToolCall(tool.name, arguments)
            if outcome_of(self.fork().call(call)) == outcome:
                return call
        return None

    # State

    def fork(self) -> Episode:
        """Returns an episode in the same state, to try something; it injects no faults."""
        other = Episode(self.domains.values(), self.seed, self.family, Faults())
        other.restore(self.snapshot())
        return other

    def snapshot(self) -> Json:
        """Returns what was written so far, which is enough to come back to this state."""
        return {table: dict(edits) for table, edits in self.tables.edits.items()}

    def restore(self, snapshot: Json) -> None:
        """Go back to the state of a snapshot."""
        self.tables.edits = {table: dict(edits) for table, edits in snapshot.items()}

    def state(self) -> Json:
        """Returns every row, for a reader: table → key → row."""
        state: Json = {}
        for domain in self.domains.values():
            for entity in domain.entities.entities.values():
                state[entity.table] = dict(self.tables.rows(entity))
        return state

    def changes(self) -> Json:
        """Returns how the state differs from the start: table → key → row, or None if removed.

        Two end states are the same if their changes are equal.
        """
        changes: Json = {}
        for table, edits in self.tables.edits.items():
            category, name = table.split(".")
            entity = self.domains[category].entities[name]
            base = self._base_rows(entity)
            changed_rows: dict[str, Json | None] = {}
            for key, row in edits.items():
                if row != base.get(key):
                    changed_rows[key] = row and entity.public(row, base.get(key))
            if changed_rows:
                changes[table] = changed_rows
        return changes

    def same(self, other: Episode) -> bool:
        """Returns whether both are in the same end state."""
        return self.changes() == other.changes()

    def diff(self, expected: Episode) -> list[str]:
        """Returns one readable line per difference from the state of another episode."""
        return diff(self.changes(), expected.changes())

    def digest(self) -> str:
        """Returns a short hash of the start and of all changes."""
        parts = [sorted(self.domains), self.family, self.seed, self.changes()]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def error_result(code: str, message: str) -> Json:
    """Returns the answer to a call that failed."""
    return {"error": code, "message": message}


def outcome_of(result: Json) -> str:
    """Returns `ok`, `empty` if nothing was found, `partial` if rows were refused, or the error."""
    if "error" in result:
        return str(result["error"])
    if result.get("refused"):
        return "partial"
    return "empty" if result.get("count") == 0 else "ok"
