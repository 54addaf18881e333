"""Logs of tool use as text: Thought, Action, Action Input, Observation, Final Answer.

A `.txt` or `.log` file with one or more `Question:` blocks, or rows with the log in `prompt` or
`text`. Actions are `name` with an input on the next line, or `Name[input]`; `Finish[…]` is the
answer. Actions that the prompt explains become the tools. A step whose action cannot be read is
kept apart with its whole log.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sharpen.data.importers import importer
from sharpen.data.reading import Record, read_records
from sharpen.data.importers.shapes import joined, literal, rest
from sharpen.types import Dialog, Json, Message, RowError, ToolCall, ToolSpec

LABELS = "Question|ActionPath|Thought|Action Input|Action|Observation|Final Answer"
STEP = re.compile(rf"^[ \t]*({LABELS})[ \t]*\d*[ \t]*:", re.M)
QUESTION = re.compile(r"^[ \t]*Question[ \t]*:", re.M)
BRACKETS = re.compile(r"([\w.-]+)\[(.*)\]\.?$", re.S)
EXPLAINED = re.compile(r"^\(\d+\) (\w+)\[(\w+)\]: *(.*)$", re.M)
ONE_OF = re.compile(r"one of \[([^\]]+)\]")


def read(path: Path) -> Iterator[Record]:
    """A text file gives one record a question, with the text before the first as its header."""
    for record in read_records(path):
        if record.problem or not isinstance(record.value, str):
            yield record
            continue
        file, text = record.where.rsplit(":", 1)[0], record.value
        starts = [match.start() for match in QUESTION.finditer(text)]
        for at, end in zip(starts, [*starts[1:], len(text)], strict=False):
            line = 1 + text.count("\n", 0, at)
            yield Record(f"{file}:{line}", {"header": text[: starts[0]], "text": text[at:end]})
        if not starts:
            yield Record(record.where, raw=text[:2000], problem="no line starts with 'Question:'")


def tools_in(header: str, used: list[tuple[str, Any]]) -> dict[str, ToolSpec]:
    """What the header explains; else the names it lists, or that the log uses, with the inputs that
    the log gives them."""
    found = {}
    for name, parameter, text in EXPLAINED.findall(header):
        fields = {"properties": {parameter: {"type": "string"}}, "required": [parameter]}
        found[name] = ToolSpec(name, text.strip(), {"type": "object"} | fields)
    listed = [n.strip() for names in ONE_OF.findall(header) for n in names.split(",")]
    for name in listed or ([] if found else [n for n, _ in used if n != "Finish"]):
        line = re.search(rf"^{re.escape(name)}(?:\(.*?\))?: *(.+)$", header, re.M)
        given = [value for n, value in used if n == name]
        keys = dict.fromkeys(k for v in given for k in (v if isinstance(v, dict) else ["input"]))
        fields = {"type": "object", "properties": {key: {} for key in keys or ["input"]}}
        found.setdefault(name, ToolSpec(name, line[1] if line else "", fields))
    return found


def actions(steps: list[tuple[str, str]]) -> Iterator[tuple[str, Any]]:
    """The name and the input of every action."""
    for (label, text), (follows, given) in zip(steps, [*steps[1:], ("", "")], strict=False):
        match = BRACKETS.match(text)
        if label != "Action":
            continue
        if follows != "Action Input" and match:
            yield match[1], match[2]
            continue
        if follows != "Action Input" or not re.fullmatch(r"[\w .-]+", text):
            raise RowError("", f"an action that cannot be read: {text[:60]!r}")
        try:
            value = literal(given)
        except ValueError:
            value = given
        yield text, value if isinstance(value, dict) else given


def is_react(row: Json) -> bool:
    text = row.get("text") or row["prompt"]
    return "Question:" in text and re.search(r"^Action *\d*:", text, re.M) is not None


@importer(is_react, read)
def react(row: Json, where: str, side: None) -> Dialog:
    header, mark, log = (row.get("text") or row["prompt"]).rpartition("(END OF EXAMPLES)")
    header = header if mark else row.get("header", "")
    log = log[log.rindex("Question:") :] if "Question:" in log else log
    _, *parts = STEP.split(log)
    steps = [(k, text.strip()) for k, text in zip(parts[::2], parts[1::2], strict=True)]
    taken = list(actions(steps))
    listed = tools_in(header, taken)
    messages, name = [], ""
    for label, body in steps:
        if label == "Question":
            messages.append(Message("user", body))
        elif label in ("Thought", "Final Answer"):
            messages.append(Message("assistant", body))
        elif label == "Observation" and name != "Finish":
            messages.append(Message("tool", body, name=name))
        elif label == "Action":
            name, value = taken.pop(0)
            if name == "Finish":
                answer = next(map(str, value.values()), "") if isinstance(value, dict) else value
                messages.append(Message("assistant", answer))
                continue
            known = [*listed[name].parameters["properties"]] if name in listed else ["input"]
            arguments = value if isinstance(value, dict) else {known[0]: value}
            messages.append(Message("assistant", "", (ToolCall(name, arguments),)))
    tools = tuple(tool for name, tool in listed.items() if name != "Finish")
    return Dialog(joined(messages), tools, metadata=rest(row, "text", "prompt", "header"))
