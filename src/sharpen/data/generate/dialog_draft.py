"""Where a row is played: the tools of a split, the kinds of rows as `sets.yaml` has them, and the
scene in which a user asks for a tool and calls are really made."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from sharpen.calls import compact_json
from sharpen.config import Config, parse_config, read_yaml
from sharpen.data.generate.mistakes import mistake
from sharpen.types import Json, Message, SharpenError, ToolCall
from sharpen.world.domain import Domain, Tool
from sharpen.world.episode import FAULTS, Episode, World
from sharpen.world.fields import Family, sentence
from sharpen.world.phrases import fill, slots
from sharpen.world.state import seeded

HELD_OUT: dict[Family, float] = {"test": 0.10, "dev": 0.06}
SIMILAR = 2  # distractors are drawn from this many times as many nearest tools
HERE = Path(__file__).parent
Tools = Sequence[Tool]
Found = TypeVar("Found")


class Kind(Config):
    """One kind of row, as `sets.yaml` describes it; the usual values are those of a dialog."""

    play: tuple[str, ...]
    share: float = 1.0
    task_type: str = ""  # empty for a task
    offered: tuple[int | tuple[int, int], ...] = ((3, 5),)
    same: tuple[float, ...] = (1.0,)
    shapes: tuple[tuple[str, ...], ...] = ()
    frame: str = ""  # of a plan; else whichever fits
    tries: int = 8  # to find a plan
    faults: tuple[int, ...] = ()
    mistakes: tuple[int, ...] = ()
    known: bool = True  # the answer without a call is gold
    writes: bool = False  # something has to be changed


class Part(Config):
    folder: str
    rows: int
    splits: dict[Family, float]
    kinds: dict[str, Kind]


@cache
def parts() -> dict[str, Part]:
    described = read_yaml(HERE / "sets.yaml")
    return {name: parse_config(Part, part, "sets.yaml") for name, part in described.items()}


@cache
def frames(part: str) -> Any:
    """What `frames.yaml` says for a split, or under another of its headings."""
    return read_yaml(HERE / "frames.yaml")[part]


def split_categories(categories: Sequence[str]) -> dict[str, Family]:
    """Category → split. A category's place is decided by its name alone."""
    ordered = sorted(categories, key=lambda name: hashlib.sha256(name.encode()).digest())
    if len(ordered) < 3:
        raise SharpenError(f"{len(ordered)} categories cannot be split: three are the least")
    found: dict[str, Family] = {}
    for split, share in HELD_OUT.items():
        count = max(1, round(len(categories) * share))
        found |= dict.fromkeys(ordered[len(found) : len(found) + count], split)
    return {name: found.get(name, "train") for name in categories}


class ToolPool:
    """The tools of one split, in an order that belongs to the seed."""

    def __init__(self, world: World, split: Family, seed: int):
        self.world = world
        self.split: Family = split
        places = split_categories(world.categories)
        self.tools = list(world.tools([name for name in places if places[name] == split]))
        seeded("shelf", seed, split).shuffle(self.tools)

    def ask(self, index: int, writing: bool = False) -> tuple[Tool, str]:
        """The request with this number: every tool once, then every tool's next phrasing."""
        tools = [tool for tool in self.tools if not (writing and tool.read_only)]
        tool = tools[index % len(tools)]
        start = seeded("ask", tool.name).randrange(len(tool.operation.ask))
        return tool, tool.operation.ask[(start + index // len(tools)) % len(tool.operation.ask)]

    def candidates(
        self, needed: Tools, count: int, rng: random.Random, barred: Tools = (), same: float = 1.0
    ) -> list[Tool]:
        """The needed tools among distractors: the nearest of their category for a share of `same`,
        the rest from the split's other categories. `barred` tools stay out."""
        first, out = needed[0] if needed else barred[0], {*needed, *barred}
        near = [t for t in self.world.domain(first.category).tools.values() if t not in out]
        near.sort(key=lambda t: (-likeness(first, t), rng.random()))
        wanted = max(0, count - len(needed))
        close = min(len(near), math.ceil(wanted * same))
        far = [t for t in self.tools if t.category != first.category and t not in out]
        shown = [*needed, *rng.sample(near[: close * SIMILAR], close)]
        shown += rng.sample(far, min(len(far), wanted - close))
        rng.shuffle(shown)
        return shown


def likeness(a: Tool, b: Tool) -> int:
    """How easily `b` is taken for `a`."""
    words = set(a.name.split("_")) & set(b.name.split("_"))
    same_kind = a.operation.op == b.operation.op
    return 2 * len(words) + 2 * (a.operation.entity == b.operation.entity) + same_kind


def touches(tool: Tool) -> set[str]:
    own = tool.operation.entity, getattr(tool.operation, "into", "")
    return {*own, *tool.takes.values(), *tool.yields.values()} - {""}


class DrawFailed(Exception):
    """A draw that leads nowhere; the next one may."""


def require_draw(found: Found | None) -> Found:
    """What was found; nothing is fruitless."""
    if not found:
        raise DrawFailed
    return found


@dataclass(slots=True)
class DialogDraft:
    shelf: ToolPool
    episode: Episode
    rng: random.Random
    kind: Kind
    tool: Tool  # what is being asked for
    text: str  # and in which words
    level: int
    messages: list[Message] = field(default_factory=list)
    used: dict[str, Tool] = field(default_factory=dict)
    barred: list[Tool] = field(default_factory=list)
    gold: Json = field(default_factory=dict)
    quiet: bool = False  # nothing is called from first to last
    last: tuple[Tool, Json] | None = None
    mistaken: int = -1  # the number of the call that goes wrong first

    @property
    def domain(self) -> Domain:
        return self.shelf.world.domain(self.tool.category)

    def bar(self) -> None:
        """Keep the tool off the offer, and what touches the same and might serve in its stead."""
        mine, tools = touches(self.tool), self.domain.tools.values()
        self.barred = [tool for tool in tools if tool is self.tool or touches(tool) & mine]

    def user(self, text: str) -> None:
        self.messages.append(Message("user", sentence(text)))

    def say(self, text: str) -> None:
        self.messages.append(Message("assistant", sentence(text)))

    def frame(self, kind: str) -> Any:
        return self.rng.choice(frames(self.shelf.split)[kind])

    def sample(self, phrase: str, outcome: str = "ok") -> ToolCall:
        """A call of the tool with what the phrase speaks of, that has this outcome."""
        return require_draw(
            self.episode.sample(self.tool, self.rng, using(self.tool, phrase), outcome)
        )

    def request(self, phrase: str, outcome: str = "ok") -> ToolCall:
        """The user asks for such a call."""
        call = self.sample(phrase, outcome)
        self.user(fill(phrase, call.arguments))
        return call

    def perform(self, *calls: ToolCall, content: str = "") -> Json:
        """Make calls, all at once, and those again that a fault or a mistake spoilt; the last
        answer."""
        number, again, excuse, result = sum(len(m.tool_calls) for m in self.messages), [], "", {}
        meant = [replace(call, id=f"call_{number + i}") for i, call in enumerate(calls, 1)]
        made, at = [*meant], self.mistaken - number
        if 0 <= at < len(made):
            made[at] = require_draw(mistake(made[at], self.episode, self.rng))
        self.messages.append(Message("assistant", content, tuple(made), trained=made == meant))
        for call, right in zip(made, meant, strict=True):
            result = self.episode.call(call)
            if tool := self.domain.tools.get(call.name):
                self.used[call.name] = tool
            text = compact_json(result)
            self.messages.append(Message("tool", text, name=call.name, tool_call_id=call.id))
            if result.get("error") in FAULTS or call != right:
                again.append(right)
                excuse = excuse or frames("again")[result["error"]]
        return self.perform(*again, content=excuse) if again else result

    def serve(self, call: ToolCall) -> None:
        self.tell((self.tool, call, self.perform(call)))

    def tell(self, *done: tuple[Tool, ToolCall, Json]) -> None:
        """Answer with what was done."""
        self.last = done[-1][0], done[-1][2]
        said = [fill(self.rng.choice(t.operation.say), r, c.arguments) for t, c, r in done]
        self.say(" ".join(said))


def using(tool: Tool, phrase: str) -> list[str]:
    """The parameters that a phrase speaks of."""
    return [name for name in slots(phrase) if name in tool.params]


def lacking(tool: Tool, phrase: str) -> list[str]:
    """What the tool requires and a phrase leaves out."""
    return require_draw([name for name in tool.required if name not in slots(phrase)])
