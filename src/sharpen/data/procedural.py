"""Tasks made from a seed, of adjustable difficulty, for reinforcement learning on small models:
`procedural/arithmetic:train?levels=0-2&count=512&seed=1`, `procedural/tools:ood?levels=1`.
`test` has the kind of problems that `train` has and none of the same; `ood` has other numbers,
operators, tools, values and words. The same name gives the same bytes.
"""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import parse_qsl

from pydantic import Field

from sharpen.calls import assistant_text, compact_json
from sharpen.config import Config, parse_config
from sharpen.data.generate.dialog_draft import frames, split_categories, using
from sharpen.data.generate.plans import written
from sharpen.types import Message, SharpenError, Task, ToolCall
from sharpen.world.episode import shipped_world
from sharpen.world.fields import Family
from sharpen.world.phrases import fill, slots
from sharpen.world.state import seeded

PREFIX, SPLITS = "procedural/", ("train", "test", "ood")
MOST_MISSES = 2000  # in a row: then there is nothing new left to ask
TEST_SHARE = 0.2
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
Found = tuple[str, Task] | None  # what makes a task different from others, and the task


class Settings(Config):
    levels: str = Field("0", pattern=r"^\d(-\d)?$")
    count: int = Field(256, ge=1)
    seed: int = 0


def procedural_tasks(name: str) -> Iterator[Task]:
    """The tasks of a source, levels in turn."""
    place, _, query = name.removeprefix(PREFIX).partition("?")
    kind, _, split = place.partition(":")
    if kind not in MAKERS or split not in SPLITS:
        kinds, splits = "|".join(MAKERS), "|".join(SPLITS)
        raise SharpenError(f"{name!r}: expected {PREFIX}{kinds}:{splits}?levels=0-2&count=256")
    settings = parse_config(Settings, dict(parse_qsl(query, keep_blank_values=True)), name)
    levels = frames("procedural")[kind]
    first, last = int(settings.levels[0]), int(settings.levels[-1])
    if not first <= last < len(levels):
        raise SharpenError(f"{name!r}: levels {settings.levels}: there are 0 to {len(levels) - 1}")
    seen, drawn, misses = set[str](), 0, 0
    while len(seen) < settings.count:
        level = first + len(seen) % (last - first + 1)
        rng = seeded(PREFIX, kind, split, settings.seed, drawn)
        found = MAKERS[kind](split == "ood", *levels[level], rng)
        drawn, misses = drawn + 1, misses + 1
        if misses > MOST_MISSES:
            raise SharpenError(f"{name!r}: there are only {len(seen)} different tasks")
        if found and found[0] not in seen and split in ("ood", split_of(found[0])):
            seen.add(found[0])
            misses, own = 0, f"{kind}-{split}-{settings.seed}-{len(seen) - 1}"
            yield replace(found[1], id=own, difficulty=f"{kind} {level}")


def split_of(key: str) -> str:
    """A problem's split is decided by the problem alone."""
    return "test" if hashlib.sha256(key.encode()).digest()[0] < TEST_SHARE * 256 else "train"


def arithmetic(strange: bool, operands: int, largest: int, signs: str, rng: random.Random) -> Found:
    low, high = (largest + 1, 2 * largest) if strange else (0, largest)
    if strange:
        signs = "+-" if signs == "+" else "+-*"
    value = rng.randint(low, high)
    text = str(value)
    for at in range(operands - 1):
        sign, other = rng.choice(signs), rng.randint(low, high)
        inner = f"({text})" if at else text
        if rng.random() < 0.5:
            text = f"{text if sign != '*' else inner} {sign} {other}"
            value = OPERATORS[sign](value, other)
        else:
            text, value = f"{other} {sign} {inner}", OPERATORS[sign](other, value)
    question = rng.choice(frames("procedural")["questions"][strange]).format(text)
    return text, Task("", question, gold={"answer": str(value)}, kind="math")


def tools(
    strange: bool, offered: int, count: int, way: list[str] | None, rng: random.Random
) -> Found:
    """`way` is how calls are asked for, if not in the tools' own words."""
    family: Family = "dev" if strange else "train"
    world, seed = shipped_world(), rng.randrange(1 << 30)
    places = split_categories(world.categories)
    category = rng.choice([name for name in world.categories if places[name] == family])
    episode = world.episode([category], seed, family)
    known = list(world.domain(category).tools.values())
    chosen, calls, asked = rng.sample(known, count), [], []
    for tool in chosen:
        text = rng.choice(tool.operation.ask)
        call = episode.sample(tool, rng, using(tool, text))
        if call is None or not {*tool.required} <= {*slots(text)}:
            return None
        episode.call(call)
        calls += written(call)
        asked.append(spell(call, way, strange) if way else fill(text, call.arguments))
    shown = [*chosen, *rng.sample([t for t in known if t not in chosen], offered - count)]
    rng.shuffle(shown)
    gold = {"categories": [category], "seed": seed, "family": family, "calls": calls}
    instruction, specs = " ".join(asked), tuple(tool.spec for tool in shown)
    return compact_json([instruction, calls]), Task("", instruction, specs, gold, "tool_state")


def spell(call: ToolCall, phrases: list[str], strange: bool) -> str:
    text = assistant_text(Message("assistant", tool_calls=(call,)), "")
    given = [f"{key} {compact_json(value)}" for key, value in call.arguments.items()]
    given = ", ".join(given) or "no arguments"
    return phrases[strange].format(call=text, name=call.name, given=given)


MAKERS = {"arithmetic": arithmetic, "tools": tools}
