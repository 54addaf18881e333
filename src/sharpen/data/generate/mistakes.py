"""Calls that go wrong as those of a small model do, for dialogs in which a call is corrected: the
wrong one is there to be read, what follows is trained."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from sharpen.types import ToolCall
from sharpen.world.domain import Tool
from sharpen.world.episode import Episode

ERRORS = ("unknown_tool", "invalid_argument", "not_found")  # of which the caller is the cause
VERBS = ("get", "find", "search", "list", "update", "rank", "check")


def mistake(call: ToolCall, episode: Episode, rng: random.Random) -> ToolCall | None:
    """The call gone wrong in one of the ways below, or None where no way leads to an error."""
    tools = list(episode.tools())
    tool = next(tool for tool in tools if tool.name == call.name)
    others = rng.sample(tools, len(tools))
    ways = [wrong_name, wrong_tool, wrong_tool, wrong_key, wrong_names, wrong_value]
    for way in rng.sample(ways, len(ways)):
        for wrong in way(call, tool, others, rng):
            if episode.fork().call(wrong).get("error") in ERRORS:
                return wrong
    return None


def wrong_name(call: ToolCall, tool: Tool, others: list[Tool], rng: random.Random) -> Iterator:
    """A tool that there is not: with another verb, or a word less."""
    verb, *words = call.name.split("_")
    known, left = {other.name for other in others}, words[:-1] if len(words) > 1 else words
    names = [f"{rng.choice(VERBS)}_{'_'.join(words)}", "_".join([verb, *left])]
    yield from (replace(call, name=name) for name in names if name not in known)


def wrong_tool(call: ToolCall, tool: Tool, others: list[Tool], rng: random.Random) -> Iterator:
    """A tool that takes the key of something else, and gets this one."""
    keys = [call.arguments[name] for name in tool.takes if name in call.arguments]
    for other in others:
        if keys and isinstance(keys[0], str) and len(other.required) == 1:
            given = dict.fromkeys(other.required, keys[0])
            if {*other.takes.values()}.isdisjoint(tool.takes.values()):
                yield replace(call, name=other.name, arguments=given)


def wrong_key(call: ToolCall, tool: Tool, others: list[Tool], rng: random.Random) -> Iterator:
    """A key without its first letters, or with a digit less."""
    for name in (name for name in tool.takes if isinstance(call.arguments.get(name), str)):
        key = call.arguments[name]
        for wrong in rng.sample([key.split("-")[-1], key[:-1], f" {key}"], 3):
            yield replace(call, arguments=call.arguments | {name: wrong})


def wrong_names(call: ToolCall, tool: Tool, others: list[Tool], rng: random.Random) -> Iterator:
    """An argument that the tool does not take: one more, or in another's stead; or one less."""
    given = list(call.arguments)
    foreign = [name for other in others for name in other.params if name not in tool.params]
    if given and foreign:
        name, new = rng.choice(given), foreign[0]
        rest = {n: value for n, value in call.arguments.items() if n != name}
        more = call.arguments | {new: call.arguments[name]}
        for arguments in rng.sample([rest, more, rest | {new: call.arguments[name]}], 3):
            yield replace(call, arguments=arguments)


def wrong_value(call: ToolCall, tool: Tool, others: list[Tool], rng: random.Random) -> Iterator:
    """A choice in words of one's own."""
    fields = tool.spec.parameters["properties"]
    for name, value in call.arguments.items():
        if "enum" in fields.get(name, {}) and isinstance(value, str):
            words = value.replace("_", " ")
            yield replace(call, arguments=call.arguments | {name: rng.choice([f"{words}s", words])})
