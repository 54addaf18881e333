"""The starter set of the quickstart: one request, three candidate tools, one right call, as
`starter.yaml` has them."""

from __future__ import annotations

import random
from typing import Literal

from sharpen.config import read_yaml
from sharpen.data.generate.dialog_draft import HERE
from sharpen.data.generate.plans import written
from sharpen.types import Dialog, Message, Task, ToolCall, ToolSpec

CANDIDATES = 3
MOST_MISSES = 2000  # in a row: then there is nothing new left to say


def starter_dialogs(split: Literal["train", "test"], count: int, seed: int = 0) -> list[Dialog]:
    """Requests with their right call, each different from all others of the split."""
    tools = read_yaml(HERE / "starter.yaml")["tools"]
    specs = {}
    for name, tool in tools.items():
        schema = {"type": "object", "properties": tool["parameters"]}
        schema["required"] = list(tool["parameters"])
        specs[name] = ToolSpec(name, tool["description"], schema)
    chance, names, misses = random.Random(f"starter:{split}:{seed}"), list(tools), 0
    dialogs: dict[str, Dialog] = {}
    while len(dialogs) < count and misses < MOST_MISSES:
        name = names[len(dialogs) % len(names)] if misses < 50 else chance.choice(names)
        values = {}
        for field, schema in tools[name]["parameters"].items():
            values[field] = chance.choice(schema.get("enum") or tools[name]["values"][field][split])
        request = chance.choice(tools[name][split]).format(**values)
        others = chance.sample([n for n in names if n != name], CANDIDATES - 1)
        offered = tuple(specs[n] for n in chance.sample([name, *others], CANDIDATES))
        misses += 1
        if request not in dialogs:
            misses, row = 0, f"starter-{split}-{len(dialogs)}"
            call = Message("assistant", tool_calls=(ToolCall(name, values),))
            said = Message("user", request), call
            dialogs[request] = Dialog(said, offered, row, "tool_selection")
    return list(dialogs.values())


def starter_task(dialog: Dialog) -> Task:
    """The same request as something to be solved."""
    user, answer = dialog.messages
    gold = {"calls": written(*answer.tool_calls)}
    return Task(dialog.id, user.content, dialog.tools, gold, kind="call")
