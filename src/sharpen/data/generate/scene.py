"""One row while it is played: a user asks for a tool, calls are really made."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from sharpen.calls import compact_json
from sharpen.config import Config, parse_config, read_yaml
from sharpen.data.generate.splits import Shelf, frames
from sharpen.types import Json, Message, ToolCall
from sharpen.world.domain import Domain, Tool
from sharpen.world.episode import FAULTS, Episode
from sharpen.world.fields import Family, sentence
from sharpen.world.phrases import fill, slots

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
    known: bool = True  # the answer without a call is gold
    writes: bool = False  # something has to be changed


class Part(Config):
    folder: str
    rows: int
    splits: dict[Family, float]
    kinds: dict[str, Kind]


@cache
def parts() -> dict[str, Part]:
    path = Path(__file__).with_name("sets.yaml")
    return {name: parse_config(Part, part, path.name) for name, part in read_yaml(path).items()}


class Fruitless(Exception):
    """A draw that leads nowhere; the next one may."""


def must(found: Found | None) -> Found:
    """What was found; nothing is fruitless."""
    if not found:
        raise Fruitless
    return found


@dataclass(slots=True)
class Scene:
    shelf: Shelf
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

    @property
    def domain(self) -> Domain:
        return self.shelf.world.domain(self.tool.category)

    def user(self, text: str) -> None:
        self.messages.append(Message("user", sentence(text)))

    def say(self, text: str) -> None:
        self.messages.append(Message("assistant", sentence(text)))

    def frame(self, kind: str) -> Any:
        return self.rng.choice(self.shelf.frames[kind])

    def sample(self, phrase: str, outcome: str = "ok") -> ToolCall:
        """A call of the tool with what the phrase speaks of, that has this outcome."""
        return must(self.episode.sample(self.tool, self.rng, using(self.tool, phrase), outcome))

    def request(self, phrase: str, outcome: str = "ok") -> ToolCall:
        """The user asks for such a call."""
        call = self.sample(phrase, outcome)
        self.user(fill(phrase, call.arguments))
        return call

    def perform(self, *calls: ToolCall, content: str = "") -> list[Json]:
        """Make calls, all at once, and make those again that a fault hit; the last answers."""
        results: dict[int, Json] = {}
        waiting = dict(enumerate(calls))
        while waiting:
            number = sum(len(m.tool_calls) for m in self.messages)
            made = [replace(c, id=f"call_{number + i}") for i, c in enumerate(waiting.values(), 1)]
            self.messages.append(Message("assistant", content, tuple(made)))
            for index, call in zip(waiting, made, strict=True):
                results[index] = self.episode.call(call)
                self.used[call.name] = self.domain.tools[call.name]
                text = compact_json(results[index])
                self.messages.append(Message("tool", text, name=call.name, tool_call_id=call.id))
            waiting = {i: c for i, c in waiting.items() if results[i].get("error") in FAULTS}
            content = frames("retry")[results[min(waiting)]["error"]] if waiting else ""
        return [results[index] for index in range(len(calls))]

    def serve(self, call: ToolCall) -> None:
        """Call the tool and answer."""
        self.last = self.tool, self.perform(call)[0]
        self.say(self.answer(*self.last, call))

    def answer(self, tool: Tool, result: Json, call: ToolCall) -> str:
        return fill(self.rng.choice(tool.operation.say), result, call.arguments)


def using(tool: Tool, phrase: str) -> list[str]:
    """The parameters that a phrase speaks of."""
    return [name for name in slots(phrase) if name in tool.params]


def lacking(tool: Tool, phrase: str) -> list[str]:
    """What the tool requires and a phrase leaves out."""
    return must([name for name in tool.required if name not in slots(phrase)])
