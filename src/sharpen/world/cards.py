"""A tool's card: everything that a catalogue says about it. Called by the data builder, which
writes the cards to `agent_tools/tools.jsonl`.
"""

from __future__ import annotations

import hashlib

from sharpen.types import Json
from sharpen.world.domain import Domain, Tool
from sharpen.world.episode import Episode, Faults, World
from sharpen.world.phrases import fill, slots
from sharpen.world.state import seeded_rng

_EXAMPLES = 2
_MAX_SEEDS = 20  # episodes tried for the examples


def card_row(world: World, tool: Tool) -> Json:
    """Returns the card as a JSON row. `reliability` and `latency_ms` are made up from the name."""
    domain = world.domain(tool.category)
    name_hash = hashlib.blake2b(tool.name.encode(), digest_size=8).digest()
    number = int.from_bytes(name_hash, "big")
    latency_ms = 30 + number // 1000 % 770
    if not tool.read_only:
        latency_ms += 120
    return {
        "name": tool.name,
        "category": tool.category,
        "description": tool.spec.description,
        "parameters": tool.spec.parameters,
        "outputs": tool.outputs(),
        "capabilities": _list_capabilities(domain, tool),
        "examples": _make_examples(domain, tool),
        "reliability": round(0.95 + number % 1000 / 20_000, 3),
        "latency_ms": latency_ms,
        "read_only": tool.read_only,
    }


def _list_capabilities(domain: Domain, tool: Tool) -> list[str]:
    """Returns what the tool does, and which keys it takes and gives: how tools can be chained."""
    entities = domain.entities
    operation = tool.operation
    noun = entities[operation.entity].noun if operation.entity else ""
    action = operation.op.replace("_", " ")
    capabilities = [f"{action} {noun}".strip()]
    capabilities += [f"takes {entities[name].noun}" for name in tool.takes.values()]
    capabilities += [f"gives {entities[name].noun}" for name in tool.yields.values()]
    return list(dict.fromkeys(capabilities))


def _make_examples(domain: Domain, tool: Tool) -> list[Json]:
    """Returns requests with the calls that serve them and the answers of real executions."""
    examples: list[Json] = []
    phrasings = tool.operation.ask
    for seed in range(_MAX_SEEDS):
        phrasing = phrasings[len(examples) % len(phrasings)]
        episode = Episode([domain], seed, "train", Faults())
        call = episode.sample(tool, seeded_rng(tool.name, seed), slots(phrasing))
        if call is not None:
            request = fill(phrasing, call.arguments)
            result = episode.call(call)
            examples.append({"request": request, "arguments": call.arguments, "result": result})
        if len(examples) == _EXAMPLES:
            break
    return examples
