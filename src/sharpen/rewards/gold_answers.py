"""What a right answer to a task says, turn by turn: one function per family of kinds.

`sharpen.kinds` names the function of each kind. The `gold` baseline plays them, so that every
benchmark is shown to be solvable, and `reward try` scores them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from sharpen.rewards.graphs import write_plan
from sharpen.rows import call_from_wire
from sharpen.types import Json, Message, RowError, Task, ToolCall
from sharpen.world.gold import DECISION_TEXTS, first_allowed, gold_trajectory


def plan_text(task: Task) -> list[Message]:
    """The plan as the text of a graph."""
    return [_say(write_plan(task.gold))]


def program_text(task: Task) -> list[Message]:
    """The reference program in a code block."""
    return [_say(f"```python\n{task.metadata['code']}\n```")]


def json_text(task: Task) -> list[Message]:
    """The wanted JSON value."""
    if "json" not in task.gold:
        raise _silent_gold(task)
    return [_say(json.dumps(task.gold["json"]))]


def set_text(task: Task) -> list[Message]:
    """All wanted items in one list."""
    answers = task.gold.get("answer") or task.gold.get("answers") or ()
    if not isinstance(answers, list):
        answers = [answers]
    return [_say("; ".join(str(answer) for answer in answers), task)]


def answer_text(task: Task) -> list[Message]:
    """The (first) right answer, or the reference query."""
    gold = task.gold
    answer = gold.get("answer") or gold.get("answers") or gold.get("sql") or ""
    if isinstance(answer, list):
        answer = answer[0] if answer else ""
    return [_say(str(answer), task)]


def service_actions(task: Task) -> list[Message]:
    """All of gold's actions in one turn, then what the customer is to be told."""
    actions = task.gold["actions"] or ()
    outputs = task.gold.get("outputs") or task.gold.get("communicate_info") or ()
    words = " ".join(str(output) for output in outputs) or DECISION_TEXTS["decline"]
    if not actions:
        return [_say(words)]
    calls = tuple(call_from_wire(call, task.id) for call in actions)
    return [Message("assistant", tool_calls=calls), _say(words)]


def exact_calls(task: Task) -> list[Message]:
    """Gold's calls; in source text where the task is about another language than Python."""
    language = task.gold.get("language")
    if not language:
        return world_turns(task)
    declared = {f["name"]: f["parameters"]["properties"] for f in task.metadata["functions"]}
    calls = []
    for wire_call in task.gold["calls"]:
        call = call_from_wire(wire_call, task.id)
        calls.append(_in_language(call, declared[call.name], language))
    return [Message("assistant", tool_calls=tuple(calls))]


def named_tools(task: Task) -> list[Message]:
    """Calls of gold's tools without arguments; of the first tool on offer where any is right."""
    names = task.gold.get("tools") or [task.tools[0].name]
    return [Message("assistant", tool_calls=tuple(ToolCall(name) for name in names))]


def decision_turn(task: Task) -> list[Message]:
    """A call of the first tool where calling is right, otherwise words that take the decision."""
    if task.gold["decision"] in ("call", "act"):
        return named_tools(task)
    return world_turns(task)


def world_turns(task: Task) -> list[Message]:
    """Gold's calls one per turn where the world executes them, and the closing words."""
    trajectory = gold_trajectory(task)
    if trajectory is None:
        raise _silent_gold(task)
    return [turn.message for turn in trajectory.turns]


def _say(text: str, task: Task | None = None) -> Message:
    if not text and task is not None:
        raise _silent_gold(task)
    return Message("assistant", text)


def _silent_gold(task: Task) -> RowError:
    return RowError(task.id, f"gold of kind {task.kind!r} does not say what is right")


def _in_language(call: ToolCall, fields: Json, language: str) -> ToolCall:
    """A call whose allowed values are written as source text of a language."""
    arguments = {}
    for name, value in first_allowed(call.arguments).items():
        arguments[name] = _literal(value, fields[name], language)
    return replace(call, arguments=arguments)


def _literal(value: Any, field: Json, language: str) -> str:
    """A JSON value as Java or JavaScript writes it."""
    if isinstance(value, str):
        return value
    type_name = str(field.get("type"))
    if isinstance(value, list):
        items = json.dumps(value)[1:-1]
        if language != "java":
            return f"[{items}]"
        if type_name == "ArrayList":
            return f"new ArrayList<>(Arrays.asList({items}))"
        return f"new int[]{{{items}}}"
    if isinstance(value, dict):
        if language != "java":
            return json.dumps(value)
        puts = " ".join(f"put({json.dumps(k)}, {json.dumps(v)});" for k, v in value.items())
        return f"new HashMap<>() {{{{ {puts} }}}}"
    endings = {"long": "L", "Bigint": "n"}
    if language == "java":
        endings["float"] = "f"
    return json.dumps(value) + endings.get(type_name, "")
