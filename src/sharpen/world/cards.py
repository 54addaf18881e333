"""A tool's card: everything a catalogue says about it, and the row of `agent_tools/tools.jsonl`."""

from __future__ import annotations

import hashlib

from sharpen.types import Json
from sharpen.world.domain import Domain, Tool
from sharpen.world.episode import Episode, Faults, World
from sharpen.world.phrases import fill, slots
from sharpen.world.state import seeded

EXAMPLES, SEEDS = 2, 20


def card_row(world: World, tool: Tool) -> Json:
    """The card as a JSON row. `reliability` and `latency_ms` are made up from the name."""
    domain = world.domain(tool.category)
    drawn = int.from_bytes(hashlib.blake2b(tool.name.encode(), digest_size=8).digest(), "big")
    return {
        "name": tool.name,
        "category": tool.category,
        "description": tool.spec.description,
        "parameters": tool.spec.parameters,
        "outputs": tool.outputs(),
        "capabilities": capabilities(domain, tool),
        "examples": examples(domain, tool),
        "reliability": round(0.95 + drawn % 1000 / 20_000, 3),
        "latency_ms": 30 + drawn // 1000 % 770 + (0 if tool.read_only else 120),
        "read_only": tool.read_only,
    }


def capabilities(domain: Domain, tool: Tool) -> list[str]:
    """What it does to what, and which keys it takes and gives: how tools chain."""
    entities, operation = domain.entities, tool.operation
    about = entities[operation.entity].noun if operation.entity else ""
    found = [f"{operation.op.replace('_', ' ')} {about}".strip()]
    found += [f"takes {entities[e].noun}" for e in tool.takes.values()]
    found += [f"gives {entities[e].noun}" for e in tool.yields.values()]
    return list(dict.fromkeys(found))


def examples(domain: Domain, tool: Tool) -> list[Json]:
    """Requests with the calls that serve them and their answers, each really executed."""
    found: list[Json] = []
    for seed in range(SEEDS):
        text = tool.operation.ask[len(found) % len(tool.operation.ask)]
        episode = Episode([domain], seed, "train", Faults())
        call = episode.sample(tool, seeded(tool.name, seed), slots(text))
        if call is not None:
            request, result = fill(text, call.arguments), episode.call(call)
            found.append({"request": request, "arguments": call.arguments, "result": result})
        if len(found) == EXAMPLES:
            break
    return found
