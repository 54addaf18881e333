"""Calls that go wrong as those of a small model do.

`DialogDraft.execute_calls` makes them in dialogs in which a call is corrected: the wrong call is in
the context, the correction is trained.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from sharpen.types import Json, ToolCall
from sharpen.world.domain import Tool
from sharpen.world.episode import Episode

_CALLER_ERRORS = ("unknown_tool", "invalid_argument", "not_found")
_VERBS = ("get", "find", "search", "list", "update", "rank", "check")


def make_mistake(call: ToolCall, episode: Episode, rng: random.Random) -> ToolCall | None:
    """Returns the call made wrongly, or None where none of the ways leads to an error."""
    tools = list(episode.tools())
    tool = next(tool for tool in tools if tool.name == call.name)
    shuffled_tools = rng.sample(tools, len(tools))
    for way in rng.sample(_WAYS, len(_WAYS)):
        for wrong_call in way(call, tool, shuffled_tools, rng):
            result = episode.fork().call(wrong_call)
            if result.get("error") in _CALLER_ERRORS:
                return wrong_call
    return None


# Each way yields wrong calls one by one and draws only for those that are looked at: the numbers
# drawn afterwards depend on it.


def _use_unknown_name(
    call: ToolCall, tool: Tool, tools: list[Tool], rng: random.Random
) -> Iterator[ToolCall]:
    """Name a tool that does not exist: with another verb, or without the last word."""
    existing = {other.name for other in tools}
    verb, *words = call.name.split("_")
    other_verb = f"{rng.choice(_VERBS)}_{'_'.join(words)}"
    shorter_words = words[:-1] if len(words) > 1 else words
    shorter = "_".join([verb, *shorter_words])
    for name in (other_verb, shorter):
        if name not in existing:
            yield replace(call, name=name)


def _use_wrong_tool(
    call: ToolCall, tool: Tool, tools: list[Tool], rng: random.Random
) -> Iterator[ToolCall]:
    """Give the key to a tool that takes keys of something else."""
    keys = [call.arguments[name] for name in tool.takes if name in call.arguments]
    if not keys or not isinstance(keys[0], str):
        return
    for other in tools:
        takes_other_keys = set(other.takes.values()).isdisjoint(tool.takes.values())
        if len(other.required) == 1 and takes_other_keys:
            yield replace(call, name=other.name, arguments={other.required[0]: keys[0]})


def _misspell_key(
    call: ToolCall, tool: Tool, tools: list[Tool], rng: random.Random
) -> Iterator[ToolCall]:
    """Write a key without its first letters, without its last digit, or after a blank."""
    for name in tool.takes:
        key = call.arguments.get(name)
        if not isinstance(key, str):
            continue
        misspelled = [key.split("-")[-1], key[:-1], f" {key}"]
        for wrong_key in rng.sample(misspelled, len(misspelled)):
            yield replace(call, arguments=call.arguments | {name: wrong_key})


def _use_wrong_parameters(
    call: ToolCall, tool: Tool, tools: list[Tool], rng: random.Random
) -> Iterator[ToolCall]:
    """Leave an argument out, add one that the tool does not take, or do both."""
    names = list(call.arguments)
    foreign_name = _find_foreign_parameter(tool, tools)
    if not names or not foreign_name:
        return
    name = rng.choice(names)
    foreign: Json = {foreign_name: call.arguments[name]}
    others = {other: value for other, value in call.arguments.items() if other != name}
    variants = [others, call.arguments | foreign, others | foreign]
    for arguments in rng.sample(variants, len(variants)):
        yield replace(call, arguments=arguments)


def _find_foreign_parameter(tool: Tool, tools: list[Tool]) -> str:
    """Returns the first parameter of other tools that this tool does not take, or nothing."""
    for other in tools:
        for name in other.params:
            if name not in tool.params:
                return name
    return ""


def _reword_choice(
    call: ToolCall, tool: Tool, tools: list[Tool], rng: random.Random
) -> Iterator[ToolCall]:
    """Write the value of a choice with blanks for underscores, or in the plural."""
    schemas = tool.spec.parameters["properties"]
    for name, value in call.arguments.items():
        if "enum" in schemas.get(name, {}) and isinstance(value, str):
            words = value.replace("_", " ")
            reworded = rng.choice([f"{words}s", words])
            yield replace(call, arguments=call.arguments | {name: reworded})


_Way = Callable[[ToolCall, Tool, list[Tool], random.Random], Iterator[ToolCall]]
_WAYS: list[_Way] = [
    _use_unknown_name,
    _use_wrong_tool,
    _use_wrong_tool,  # twice as likely as the others
    _misspell_key,
    _use_wrong_parameters,
    _reword_choice,
]
