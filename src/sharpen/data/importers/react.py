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

from sharpen.data.importers import Importer, Rows
from sharpen.data.importers.reading import Record, read_records
from sharpen.data.importers.shapes import joined, literal
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
        for at, end in zip(starts, [*starts[1:], len(text)], strict=True):
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


def action(text: str, given: str | None) -> tuple[str, Any]:
    """An action's name and input."""
    match = BRACKETS.match(text)
    if match and given is None:
        return match[1], match[2]
    if given is None or not re.fullmatch(r"[\w .-]+", text):
        raise ValueError(f"an action that cannot be read: {text[:60]!r}")
    try:
        value = literal(given)
    except ValueError:
        value = given
    return text, value if isinstance(value, dict) else given


def steps(text: str) -> list[tuple[str, str]]:
    parts = STEP.split(text)
    return [(label, body.strip()) for label, body in zip(parts[1::2], parts[2::2], strict=True)]


def convert(row: Json, where: str, side: None) -> Rows:
    whole = row.get("text") or row["prompt"]
    header, mark, log = whole.rpartition("(END OF EXAMPLES)")
    header = header if mark else row.get("header", "")
    log = log[log.rindex("Question:") :] if "Question:" in log else log
    messages, parsed, finished, taken, name = [], [], False, steps(log), ""
    for index, (label, body) in enumerate(taken):
        if label == "Action":
            follows = taken[index + 1] if index + 1 < len(taken) else ("", "")
            try:
                parsed.append(action(body, follows[1] if follows[0] == "Action Input" else None))
            except ValueError as error:
                raise RowError(where, str(error)) from None
    listed = tools_in(header, parsed)
    for label, body in taken:
        if label == "Question":
            messages.append(Message("user", body))
        elif label == "Thought" or label == "Final Answer":
            messages.append(Message("assistant", body))
        elif label == "Action":
            name, value = parsed.pop(0)
            finished = name == "Finish"
            if finished:
                messages.append(Message("assistant", as_answer(value)))
                continue
            known = [*listed[name].parameters["properties"]] if name in listed else ["input"]
            arguments = value if isinstance(value, dict) else {known[0]: value}
            messages.append(Message("assistant", "", (ToolCall(name, arguments),)))
        elif label == "Observation" and not finished:
            messages.append(Message("tool", body, name=name))
    tools = tuple(tool for name, tool in listed.items() if name != "Finish")
    metadata = {k: v for k, v in row.items() if k not in ("text", "prompt", "header")}
    yield Dialog(joined(messages), tools, metadata=metadata)


def as_answer(value: Any) -> str:
    return value if isinstance(value, str) else next(iter(map(str, value.values())), "")


def detect(row: Json) -> bool:
    text = row.get("text") or row["prompt"]
    return "Question:" in text and re.search(r"^Action *\d*:", text, re.M) is not None


IMPORTERS = (Importer("react", detect, convert, read),)
