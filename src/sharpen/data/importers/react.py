"""Imports ReAct logs: text files, or rows with such a text, of thoughts, actions and observations.

Question: …
Thought 1: …
Action 1: Search[…]        or        Action: search
Observation 1: …                     Action Input: …
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sharpen.data.importers.common import (
    Importer,
    merge_turns,
    other_fields,
    parse_literal,
    require,
)
from sharpen.data.importers.tools import ToolCatalogue
from sharpen.data.reading import Record
from sharpen.types import Dialog, Json, Message, ToolCall, ToolSpec

_Action = tuple[str, Any]  # the name, and the input: a text or an object
_Step = tuple[str, str]  # the label, and the text after it

_LABELS = "Question|ActionPath|Thought|Action Input|Action|Observation|Final Answer"
_LABEL = re.compile(rf"^[ \t]*({_LABELS})[ \t]*\d*[ \t]*:", re.M)
_QUESTION = re.compile(r"(?m)^[ \t]*Question[ \t]*:")
_ACTION_LINE = re.compile(r"^Action *\d*:", re.M)
_ACTION_WITH_INPUT = re.compile(r"(?s)([\w.-]+)\[(.*)\]\.?$")
_ACTION_NAME = re.compile(r"[\w .-]+")
_TOOL_LINE = re.compile(r"(?m)^\(\d+\) (\w+)\[(\w+)\]: *(.*)$")
_TOOL_LIST = re.compile(r"one of \[([^\]]+)\]")
_END_OF_EXAMPLES = "(END OF EXAMPLES)"
_FINISH = "Finish"  # the action that gives the answer


def _one_record_per_question(records: Iterator[Record], file: Path) -> Iterator[Record]:
    """Split a text at its questions; the text before the first one is the header of them all."""
    for record in records:
        text = record.value
        if record.problem or not isinstance(text, str):
            yield record
            continue
        starts = [match.start() for match in _QUESTION.finditer(text)]
        if not starts:
            yield Record(record.where, raw=text[:2000], problem="no line starts with 'Question:'")
            continue
        header = text[: starts[0]]
        ends = [*starts[1:], len(text)]
        for start, end in zip(starts, ends, strict=True):
            line = 1 + text.count("\n", 0, start)
            yield Record(f"{file}:{line}", {"header": header, "text": text[start:end]})


def _is_react(row: Json) -> bool:
    text = row.get("text") or row["prompt"]
    return "Question:" in text and _ACTION_LINE.search(text) is not None


@Importer(_is_react, split=_one_record_per_question)
def react(row: Json) -> Dialog:
    """ReAct logs: thoughts and actions are assistant turns, observations are tool results.

    `Finish[…]` is the answer. A log with an action that cannot be read is rejected as a whole.
    """
    header, mark, log = (row.get("text") or row["prompt"]).rpartition(_END_OF_EXAMPLES)
    if not mark:
        header = row.get("header", "")
    if "Question:" in log:
        log = log[log.rindex("Question:") :]
    _, *parts = _LABEL.split(log)
    steps = []
    for label, text in zip(parts[::2], parts[1::2], strict=True):
        steps.append((label, text.strip()))
    actions = list(_read_actions(steps))
    tools = _describe_tools(header, actions)
    messages = _to_messages(steps, actions, tools)
    offered_tools = tuple(tool for name, tool in tools.items() if name != _FINISH)
    metadata = other_fields(row, "text", "prompt", "header")
    return Dialog(merge_turns(messages), offered_tools, metadata=metadata)


def _read_actions(steps: Sequence[_Step]) -> Iterator[_Action]:
    """Yield every action: `Name[input]`, or a name whose input is the next step."""
    for index, (label, text) in enumerate(steps):
        if label != "Action":
            continue
        next_label = ""
        next_text = ""
        if index + 1 < len(steps):
            next_label, next_text = steps[index + 1]
        if next_label != "Action Input":
            match = _ACTION_WITH_INPUT.match(text)
            require(match, f"an action that cannot be read: {text[:60]!r}")
            assert match  # `require` has raised otherwise
            yield match[1], match[2]
            continue
        is_name = _ACTION_NAME.fullmatch(text)
        require(is_name, f"an action that cannot be read: {text[:60]!r}")
        yield text, _read_input(next_text)


def _read_input(text: str) -> Any:
    """Return an action's input as an object if it is one, otherwise as the text."""
    try:
        value = parse_literal(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def _describe_tools(header: str, actions: Sequence[_Action]) -> ToolCatalogue:
    """Return the tools that the header explains, or otherwise those that it lists or the log uses.

    The parameters of the latter are the inputs in the log.
    """
    tools: ToolCatalogue = {}
    for name, parameter, text in _TOOL_LINE.findall(header):
        parameters = {
            "type": "object",
            "properties": {parameter: {"type": "string"}},
            "required": [parameter],
        }
        tools[name] = ToolSpec(name, text.strip(), parameters)
    names = []
    for tool_list in _TOOL_LIST.findall(header):
        names += [name.strip() for name in tool_list.split(",")]
    if not names and not tools:
        names = [name for name, _ in actions if name != _FINISH]
    for name in names:
        line = re.search(rf"^{re.escape(name)}(?:\(.*?\))?: *(.+)$", header, re.M)
        description = line[1] if line else ""
        properties = {key: {} for key in _input_names(name, actions)}
        parameters = {"type": "object", "properties": properties}
        tools.setdefault(name, ToolSpec(name, description, parameters))
    return tools


def _input_names(tool_name: str, actions: Sequence[_Action]) -> list[str]:
    """Return the names of the inputs that a log gives to a tool; a plain text is `input`."""
    names: list[str] = []
    for name, value in actions:
        if name == tool_name:
            names += value if isinstance(value, dict) else ["input"]
    return list(dict.fromkeys(names)) or ["input"]


def _to_messages(
    steps: Sequence[_Step], actions: Sequence[_Action], tools: ToolCatalogue
) -> list[Message]:
    remaining_actions = iter(actions)
    messages = []
    name = ""
    for label, text in steps:
        if label == "Question":
            messages.append(Message("user", text))
        elif label in ("Thought", "Final Answer"):
            messages.append(Message("assistant", text))
        elif label == "Observation" and name != _FINISH:
            messages.append(Message("tool", text, name=name))
        elif label == "Action":
            name, value = next(remaining_actions)
            if name == _FINISH:
                messages.append(Message("assistant", _answer_of(value)))
            else:
                call = ToolCall(name, _arguments_of(name, value, tools))
                messages.append(Message("assistant", "", (call,)))
    return messages


def _answer_of(value: Any) -> str:
    """Return the answer that `Finish` is given, as a text or as the first field of an object."""
    if isinstance(value, dict):
        return next(map(str, value.values()), "")
    return value


def _arguments_of(name: str, value: Any, tools: ToolCatalogue) -> Json:
    """Return an action's input as arguments; a plain text is the tool's first parameter."""
    if isinstance(value, dict):
        return value
    parameter = "input"
    if name in tools:
        parameter = next(iter(tools[name].parameters["properties"]))
    return {parameter: value}
