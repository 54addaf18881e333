"""The tools of one split, and which of them a row offers.

`draw.py` takes requests and candidate tools from here. Train, dev and test have different
categories of tools, so no tool of a held-out split is ever trained on.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Collection, Sequence

from sharpen.types import SharpenError
from sharpen.world.domain import Tool
from sharpen.world.episode import World
from sharpen.world.fields import Family
from sharpen.world.state import seeded_rng

_HELD_OUT_SHARES: dict[Family, float] = {"test": 0.10, "dev": 0.06}
_MIN_CATEGORIES = 3  # one per split
_NEAREST_FACTOR = 2  # distractors are drawn from this many times as many nearest tools


def split_categories(categories: Sequence[str]) -> dict[str, Family]:
    """Assign each category to a split. The hash of its name decides, so order does not matter."""
    if len(categories) < _MIN_CATEGORIES:
        raise SharpenError(
            f"categories: {len(categories)} cannot be split into train, dev and test; "
            f"give at least {_MIN_CATEGORIES}"
        )
    by_hash = sorted(categories, key=lambda name: hashlib.sha256(name.encode()).digest())
    held_out: dict[str, Family] = {}
    for split, share in _HELD_OUT_SHARES.items():
        count = max(1, round(len(categories) * share))
        first = len(held_out)
        for name in by_hash[first : first + count]:
            held_out[name] = split
    return {name: held_out.get(name, "train") for name in categories}


class ToolPool:
    """The tools of one split, in an order that depends on the seed."""

    def __init__(self, world: World, split: Family, seed: int):
        self.world = world
        self.split: Family = split
        split_of = split_categories(world.categories)
        categories = [name for name in world.categories if split_of[name] == split]
        self.tools = list(world.tools(categories))
        seeded_rng("shelf", seed, split).shuffle(self.tools)

    def pick_request(self, number: int, must_write: bool = False) -> tuple[Tool, str]:
        """Returns the tool and the phrasing of the request with this number.

        Every tool comes once before any tool comes again, with its next phrasing.
        """
        tools = self.tools
        if must_write:
            tools = [tool for tool in tools if not tool.read_only]
        tool = tools[number % len(tools)]
        phrasings = tool.operation.ask
        first = seeded_rng("ask", tool.name).randrange(len(phrasings))
        return tool, phrasings[(first + number // len(tools)) % len(phrasings)]

    def draw_candidates(
        self,
        needed: Sequence[Tool],
        count: int,
        rng: random.Random,
        withheld: Sequence[Tool] = (),
        same_category: float = 1.0,
    ) -> list[Tool]:
        """Returns the needed tools among distractors, `count` in all if there are enough.

        The share `same_category` of the distractors are similar tools of the category, the rest
        come from other categories of the split. Withheld tools are never offered.
        """
        target = needed[0] if needed else withheld[0]
        excluded = {*needed, *withheld}
        siblings = self.world.domain(target.category).tools.values()
        similar = [tool for tool in siblings if tool not in excluded]
        # ties are broken at random: one draw per tool
        similar.sort(key=lambda tool: (-_similarity(target, tool), rng.random()))
        distractors = max(0, count - len(needed))
        similar_count = min(len(similar), math.ceil(distractors * same_category))
        nearest = similar[: similar_count * _NEAREST_FACTOR]
        foreign = []
        for tool in self.tools:
            if tool.category != target.category and tool not in excluded:
                foreign.append(tool)
        foreign_count = min(len(foreign), distractors - similar_count)

        candidates = list(needed)
        candidates += rng.sample(nearest, similar_count)
        candidates += rng.sample(foreign, foreign_count)
        rng.shuffle(candidates)
        return candidates


def _similarity(first: Tool, second: Tool) -> int:
    """Returns how easily the second tool is mistaken for the first."""
    shared_words = set(first.name.split("_")) & set(second.name.split("_"))
    similarity = 2 * len(shared_words)
    if first.operation.entity == second.operation.entity:
        similarity += 2
    if first.operation.op == second.operation.op:
        similarity += 1
    return similarity


def touched_entities(tool: Tool) -> set[str]:
    """Returns the entities that a tool reads, writes, takes keys of or returns keys of."""
    operation = tool.operation
    entities = {operation.entity, getattr(operation, "into", "")}
    entities.update(tool.takes.values())
    entities.update(tool.yields.values())
    return entities - {""}


def tools_to_withhold(tool: Tool, siblings: Collection[Tool]) -> list[Tool]:
    """Returns the tool and all siblings that touch the same entities and might replace it."""
    entities = touched_entities(tool)
    withheld = []
    for sibling in siblings:
        if sibling is tool or touched_entities(sibling) & entities:
            withheld.append(sibling)
    return withheld
