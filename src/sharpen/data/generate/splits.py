"""Keeping train, dev and test apart: whole categories are held out, every split has its own
phrases and values, and a guard turns away each row that comes too near one of another split.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sharpen.config import read_yaml
from sharpen.data.check import calls_of
from sharpen.data.overlap import GRAM, MAX_OVERLAP, STOP, WORD, leaves, mask, said_by_user
from sharpen.types import Dialog, SharpenError, Task
from sharpen.world.domain import Tool
from sharpen.world.episode import World
from sharpen.world.fields import Family
from sharpen.world.state import seeded

HELD_OUT: dict[Family, float] = {"test": 0.10, "dev": 0.06}
Tools = Sequence[Tool]
SIMILAR = 2  # distractors are drawn from this many times as many nearest tools


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


@cache
def frames(part: str) -> Any:
    """What `frames.yaml` says for a split, or under another of its headings."""
    return read_yaml(Path(__file__).parent / "frames.yaml")[part]


class Shelf:
    """The tools of one split, in an order that belongs to the seed."""

    def __init__(self, world: World, split: Family, seed: int):
        self.world = world
        self.split: Family = split
        places = split_categories(world.categories)
        self.tools = list(world.tools([name for name in places if places[name] == split]))
        seeded("shelf", seed, split).shuffle(self.tools)
        self.frames: dict[str, list[Any]] = frames(split)

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


def look_alikes(tools: Iterable[Tool], tool: Tool) -> list[Tool]:
    """Tools that touch what `tool` touches, so that one of them might serve in its stead."""
    touched = touches(tool)
    return [t for t in tools if t is tool or touches(t) & touched]


def touches(tool: Tool) -> set[str]:
    own = tool.operation.entity, getattr(tool.operation, "into", "")
    return {*own, *tool.takes.values(), *tool.yields.values()} - {""}


class Guard:
    """Nothing verbatim, no 13 words in a row and no near copy may stand in two splits; within one
    file, no request may stand twice, values masked."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}  # instruction or 13 words → split
        self.asked: set[tuple[str, str]] = set()  # file and instruction, as it is and masked
        self.rows_with: dict[str, dict[str, set[frozenset[str]]]] = {}  # split → word → rows

    def admit(self, noun: Dialog | Task, split: Family, file: str, fresh: bool = True) -> bool:
        """May the row stand in `file`? Without `fresh`, values alone may make a difference."""
        said = said_by_user(noun)
        hidden = mask(said[0], leaves([call.arguments for call in calls_of(noun)]))
        words = WORD.findall(hidden.lower())
        shape, text = " ".join(words), " ".join(WORD.findall(said[0].lower()))
        content = frozenset(w for w in words if w not in STOP and w != "value")
        runs = [text, *(gram for one in said for gram in grams_of(one))]
        if not content or (file, shape if fresh else text) in self.asked:
            return False
        if any(self.said.get(run, split) != split for run in runs):
            return False
        if any(self.near(content, other) for other in self.rows_with if other != split):
            return False
        self.said |= dict.fromkeys(runs, split)
        self.asked |= {(file, shape), (file, text)}
        index = self.rows_with.setdefault(split, {})
        for word in content:
            index.setdefault(word, set()).add(content)
        return True

    def near(self, content: frozenset[str], split: str) -> bool:
        """Shares a row of `split` too many words? It must have one of the few rarest of them."""
        index = self.rows_with[split]
        needed = math.floor(MAX_OVERLAP * len(content)) + 1
        rarest = sorted(content, key=lambda word: len(index.get(word, ())))
        for word in rarest[: len(content) - needed + 1]:
            for row in index.get(word, ()):
                common = len(content & row)
                if common > MAX_OVERLAP * (len(content) + len(row) - common):
                    return True
        return False


def grams_of(text: str) -> list[str]:
    words = WORD.findall(text.lower())
    return [" ".join(words[at : at + GRAM]) for at in range(len(words) - GRAM + 1)]
