"""Tool-call rewards: is a turn a valid call, and is it the right one?"""

from __future__ import annotations

from collections.abc import Sequence

from sharpen.calls import parse_message
from sharpen.rows import call_from_wire
from sharpen.tools import check_call
from sharpen.types import Message, Score, Task, ToolCall, ToolSpec, Trajectory


def call_problems(message: Message, tools: Sequence[ToolSpec]) -> list[str]:
    """Why a message is not a valid call of the offered tools; empty when every call in it is."""
    offered = {tool.name: tool for tool in tools}
    if not message.tool_calls and not message.unparsed:
        return ["no tool call"]
    problems = [f"broken call: {bad.reason}" for bad in message.unparsed]
    for call in message.tool_calls:
        if call.name not in offered:
            problems.append(f"tool {call.name!r} is not offered")
        else:
            problems += [f"{call.name}: {text}" for text in check_call(call, offered[call.name])]
    return problems


def same_calls(found: Sequence[ToolCall], wanted: Sequence[ToolCall]) -> bool:
    """Equal as multisets: parallel calls have no order, but a repeated call is not the same as
    one."""
    rest = list(found)
    for call in wanted:
        match = next((c for c in rest if equal_call(c, call)), None)
        if match is None:
            return False
        rest.remove(match)
    return not rest


def equal_call(a: ToolCall, b: ToolCall) -> bool:
    return a.name == b.name and equal_value(a.arguments, b.arguments)


def equal_value(a: object, b: object) -> bool:
    """Equal in value and kind: 2 equals 2.0, but True is not 1, and case and blanks around text do
    not matter."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, str) and isinstance(b, str):
        return " ".join(a.split()).casefold() == " ".join(b.split()).casefold()
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal_value(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal_value, a, b))
    return a == b


class CallReward:
    """1 when the first turn makes exactly the calls of `gold["calls"]`; its parts say how near it
    came."""

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        message = trajectory.turns[0].message if trajectory.turns else parse_message("")
        wanted = [
            call_from_wire(c, task.id, f"gold.calls[{i}]") for i, c in enumerate(task.gold["calls"])
        ]
        problems = call_problems(message, task.tools)
        names = sorted(call.name for call in message.tool_calls)
        exact = not problems and same_calls(message.tool_calls, wanted)
        parts = {
            "valid_call": float(not problems),
            "right_tool": float(names == sorted(call.name for call in wanted)),
            "exact_call": float(exact),
        }
        return Score(parts["exact_call"], parts, "; ".join(problems))
