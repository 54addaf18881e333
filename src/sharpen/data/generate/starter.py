"""The starter set of the quickstart: one request, three candidate tools, one right call.

`starter.yaml` declares the tools, their values and the phrasings, train and test apart.
"""

from __future__ import annotations

import random
from importlib import resources
from typing import Any, Literal

import yaml

from sharpen.rows import message_to_wire
from sharpen.types import Dialog, Message, Task, ToolCall, ToolSpec

CANDIDATES = 3


def starter_dialogs(split: Literal["train", "test"], count: int, seed: int = 0) -> list[Dialog]:
    """Requests with their right call, each different from all others of the split."""
    declared = yaml.safe_load(
        resources.files("sharpen.data.generate").joinpath("starter.yaml").read_text("utf-8")
    )["tools"]
    specs = {name: tool_spec(name, tool) for name, tool in declared.items()}
    chance = random.Random(f"starter:{split}:{seed}")
    dialogs: dict[str, Dialog] = {}
    names = list(declared)
    misses = 0  # in a row; many mean that there is nothing new left to say
    while len(dialogs) < count and misses < 2000:
        name = names[len(dialogs) % len(names)] if misses < 50 else chance.choice(names)
        request, arguments = make_request(declared[name], split, chance)
        others = chance.sample([n for n in names if n != name], CANDIDATES - 1)
        offered = chance.sample([name, *others], CANDIDATES)
        if request in dialogs:
            misses += 1
            continue
        misses = 0
        call = Message("assistant", tool_calls=(ToolCall(name, arguments),))
        dialogs[request] = Dialog(
            (Message("user", request), call),
            tuple(specs[n] for n in offered),
            id=f"starter-{split}-{len(dialogs)}",
            task_type="tool_selection",
        )
    return list(dialogs.values())


def starter_task(dialog: Dialog) -> Task:
    """The same request as something to be solved."""
    user, answer = dialog.messages
    gold = {"calls": [c["function"] for c in message_to_wire(answer)["tool_calls"]]}
    return Task(dialog.id, user.content, dialog.tools, gold, kind="call")


def tool_spec(name: str, tool: dict[str, Any]) -> ToolSpec:
    parameters = {
        "type": "object",
        "properties": tool["parameters"],
        "required": list(tool["parameters"]),
    }
    return ToolSpec(name, tool["description"], parameters)


def make_request(
    tool: dict[str, Any], split: str, chance: random.Random
) -> tuple[str, dict[str, Any]]:
    values = {
        name: chance.choice(schema.get("enum") or tool["values"][name][split])
        for name, schema in tool["parameters"].items()
    }
    return chance.choice(tool[split]).format(**values), values
