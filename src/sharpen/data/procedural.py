"""Makes tasks from a seed, of adjustable difficulty, for reinforcement learning on small models.

A source is named `procedural/arithmetic:train?levels=0-2&count=512&seed=1` or
`procedural/tools:ood?levels=1`. `test` has the same kind of problems as `train` and shares none
with it; `ood` (out of distribution) has other numbers, operators, tools, values and words. The
same name gives the same bytes. `sources` calls it.
"""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from urllib.parse import parse_qsl

from pydantic import Field

from sharpen.calls import assistant_text, compact_json
from sharpen.config import Config, parse_config
from sharpen.data.generate.dialog_draft import mentioned_parameters
from sharpen.data.generate.plans import calls_to_json
from sharpen.data.generate.sets import frames
from sharpen.data.generate.tool_pool import split_categories
from sharpen.types import Message, SharpenError, Task, ToolCall
from sharpen.world.episode import shipped_world
from sharpen.world.fields import Family
from sharpen.world.phrases import fill, slots
from sharpen.world.state import seeded_rng

PREFIX = "procedural/"
_SPLITS = ("train", "test", "ood")
_MAX_MISSES = 2000  # tries in a row without a new task: then there is nothing new left
_TEST_SHARE = 0.2
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_Draft = tuple[str, Task] | None  # what makes a task different from others, and the task


class _Settings(Config):
    """The part of a name after `?`."""

    levels: str = Field("0", pattern=r"^\d(-\d)?$")
    count: int = Field(256, ge=1)
    seed: int = 0


def procedural_tasks(name: str) -> Iterator[Task]:
    """Yield the tasks of a source, taking its levels in turn."""
    source, _, query = name.removeprefix(PREFIX).partition("?")
    kind, _, split = source.partition(":")
    if kind not in _MAKERS or split not in _SPLITS:
        kinds = "|".join(_MAKERS)
        splits = "|".join(_SPLITS)
        raise SharpenError(f"{name!r}: expected {PREFIX}{kinds}:{splits}?levels=0-2&count=256")
    settings = parse_config(_Settings, dict(parse_qsl(query, keep_blank_values=True)), name)
    levels = frames("procedural")[kind]
    first_level = int(settings.levels[0])
    last_level = int(settings.levels[-1])
    if not first_level <= last_level < len(levels):
        raise SharpenError(f"{name!r}: levels {settings.levels}: there are 0 to {len(levels) - 1}")
    make_task = _MAKERS[kind]
    seen = set[str]()
    draw_count = 0
    misses = 0
    while len(seen) < settings.count:
        level = first_level + len(seen) % (last_level - first_level + 1)
        rng = seeded_rng(PREFIX, kind, split, settings.seed, draw_count)
        draft = make_task(split == "ood", *levels[level], rng)
        draw_count += 1
        misses += 1
        if misses > _MAX_MISSES:
            raise SharpenError(f"{name!r}: there are only {len(seen)} different tasks")
        if draft is None:
            continue
        key, task = draft
        if key in seen or split not in ("ood", _split_of(key)):
            continue
        seen.add(key)
        misses = 0
        task_id = f"{kind}-{split}-{settings.seed}-{len(seen) - 1}"
        yield replace(task, id=task_id, difficulty=f"{kind} {level}")


def _split_of(key: str) -> str:
    """Return `train` or `test`. It depends on the problem alone, so that no seed mixes them."""
    first_byte = hashlib.sha256(key.encode()).digest()[0]
    return "test" if first_byte < _TEST_SHARE * 256 else "train"


def _make_arithmetic_task(
    out_of_distribution: bool, operands: int, largest: int, signs: str, rng: random.Random
) -> _Draft:
    """Draw an expression of `operands` numbers. The last arguments are a level of `frames.yaml`."""
    low = 0
    high = largest
    if out_of_distribution:
        low = largest + 1
        high = 2 * largest
        signs = "+-" if signs == "+" else "+-*"
    value = rng.randint(low, high)
    text = str(value)
    for step in range(operands - 1):
        sign = rng.choice(signs)
        other = rng.randint(low, high)
        operand_text = f"({text})" if step else text
        if rng.random() < 0.5:
            if sign != "*":  # from left to right, only a product needs the brackets
                operand_text = text
            text = f"{operand_text} {sign} {other}"
            value = _OPERATORS[sign](value, other)
        else:
            text = f"{other} {sign} {operand_text}"
            value = _OPERATORS[sign](other, value)
    usual_questions, other_questions = frames("procedural")["questions"]
    questions = other_questions if out_of_distribution else usual_questions
    question = rng.choice(questions).format(text)
    return text, Task("", question, gold={"answer": str(value)}, kind="math")


def _make_tool_task(
    out_of_distribution: bool,
    offered_count: int,
    call_count: int,
    phrases: list[str] | None,
    rng: random.Random,
) -> _Draft:
    """Draw a task of the tool world that needs `call_count` calls.

    `phrases` say how calls are asked for: the usual one and the one of `ood`. Without them, calls
    are asked for in the tools' own words. Returns None where the drawn words leave out a required
    argument.
    """
    family: Family = "dev" if out_of_distribution else "train"
    world = shipped_world()
    seed = rng.randrange(1 << 30)
    families = split_categories(world.categories)
    categories = [name for name in world.categories if families[name] == family]
    category = rng.choice(categories)
    episode = world.episode([category], seed, family)
    all_tools = list(world.domain(category).tools.values())
    gold_tools = rng.sample(all_tools, call_count)
    gold_calls = []
    requests = []
    for tool in gold_tools:
        text = rng.choice(tool.operation.ask)
        call = episode.sample(tool, rng, mentioned_parameters(tool, text))
        if call is None or not set(tool.required) <= set(slots(text)):
            return None
        episode.call(call)
        gold_calls += calls_to_json(call)
        if phrases:
            phrase = phrases[1] if out_of_distribution else phrases[0]
            requests.append(_spell_out(call, phrase))
        else:
            requests.append(fill(text, call.arguments))
    other_tools = [tool for tool in all_tools if tool not in gold_tools]
    offered_tools = [*gold_tools, *rng.sample(other_tools, offered_count - call_count)]
    rng.shuffle(offered_tools)
    instruction = " ".join(requests)
    specs = tuple(tool.spec for tool in offered_tools)
    gold = {"categories": [category], "seed": seed, "family": family, "calls": gold_calls}
    key = compact_json([instruction, gold_calls])
    return key, Task("", instruction, specs, gold, "tool_state")


def _spell_out(call: ToolCall, phrase: str) -> str:
    """Fill a phrase with a call: its text, its name and its arguments in words."""
    text = assistant_text(Message("assistant", tool_calls=(call,)), "")
    arguments = [f"{name} {compact_json(value)}" for name, value in call.arguments.items()]
    arguments_text = ", ".join(arguments) or "no arguments"
    return phrase.format(call=text, name=call.name, given=arguments_text)


_MAKERS: dict[str, Callable[..., _Draft]] = {
    "arithmetic": _make_arithmetic_task,
    "tools": _make_tool_task,
}
