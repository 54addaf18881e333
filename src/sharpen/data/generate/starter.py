"""The starter set of the quickstart: one request, three tools on offer, one right call.

The `quickstart` recipe and many tests call `starter_dialogs`. Requests and values are in
`starter.yaml`.
"""

from __future__ import annotations

import random
from typing import Literal

from sharpen.config import read_yaml
from sharpen.data.generate.plans import calls_to_json
from sharpen.data.generate.sets import HERE
from sharpen.types import Dialog, Json, Message, Task, ToolCall, ToolSpec

_CANDIDATES = 3
_TURNS_END = 50  # misses in a row after which tools no longer take turns
_MAX_MISSES = 2000  # in a row: then every request has been made


def starter_dialogs(split: Literal["train", "test"], count: int, seed: int = 0) -> list[Dialog]:
    """Returns up to `count` dialogs with different requests, each with its right call."""
    tools = read_yaml(HERE / "starter.yaml")["tools"]
    names = list(tools)
    specs = {name: _tool_spec(name, tool) for name, tool in tools.items()}
    rng = random.Random(f"starter:{split}:{seed}")
    dialogs: dict[str, Dialog] = {}
    misses = 0
    while len(dialogs) < count and misses < _MAX_MISSES:
        name = names[len(dialogs) % len(names)]  # the tools take turns …
        if misses >= _TURNS_END:
            name = rng.choice(names)  # … until one of them has no new request left
        values = _draw_values(tools[name], split, rng)
        request = rng.choice(tools[name][split]).format(**values)
        others = rng.sample([other for other in names if other != name], _CANDIDATES - 1)
        offered_names = rng.sample([name, *others], _CANDIDATES)
        if request in dialogs:
            misses += 1
            continue
        misses = 0
        call = ToolCall(name, values)
        dialogs[request] = Dialog(
            messages=(Message("user", request), Message("assistant", tool_calls=(call,))),
            tools=tuple(specs[offered] for offered in offered_names),
            id=f"starter-{split}-{len(dialogs)}",
            task_type="tool_selection",
        )
    return list(dialogs.values())


def _tool_spec(name: str, tool: Json) -> ToolSpec:
    """Returns the spec of a tool in `starter.yaml`; all its parameters are required."""
    parameters = {
        "type": "object",
        "properties": tool["parameters"],
        "required": list(tool["parameters"]),
    }
    return ToolSpec(name, tool["description"], parameters)


def _draw_values(tool: Json, split: str, rng: random.Random) -> Json:
    """Draw a value for every parameter of a tool."""
    values = {}
    for name, schema in tool["parameters"].items():
        options = schema.get("enum") or tool["values"][name][split]
        values[name] = rng.choice(options)
    return values


def starter_task(dialog: Dialog) -> Task:
    """Returns the dialog's request as a task with its call as gold."""
    request, answer = dialog.messages
    gold = {"calls": calls_to_json(*answer.tool_calls)}
    return Task(dialog.id, request.content, dialog.tools, gold, kind="calls")
