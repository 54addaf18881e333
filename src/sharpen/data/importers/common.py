"""What all importers share: the registry of formats, detectors, helpers for fields and turns."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sharpen.data.check import ParsedRow
from sharpen.data.reading import Split
from sharpen.types import Json, Message, RowError, SharpenError, Task

FORMATS: dict[str, Importer] = {}
_PARENT_FOLDERS = 3  # how far above the rows a file that belongs to them is looked for


@dataclass(frozen=True)
class Importer:
    """One format: how its records are recognised, found and converted.

    It is also the decorator that registers a converter, under the converter's name:

        @Importer(has("riddle solution"))
        def riddles(row: Json) -> Task: ...
    """

    detect: Callable[[Any], object]  # true for a record of this format
    names: str = ""  # pattern of the names of the format's files in a folder
    side: Callable[[Path], Any] | None = None  # loads what stands beside the rows, once
    split: Split | None = None  # turns the records of a file into other records
    placed: bool = False  # whether the converter also takes where the record is
    name: str = ""
    convert: Any = None  # (record, where if `placed`, what `side` loaded) → a row

    def __call__(self, convert: Callable[..., ParsedRow]) -> Any:
        name = convert.__name__
        FORMATS[name] = replace(self, name=name, convert=convert)
        return convert

    def recognises(self, value: Any) -> bool:
        """Is the value a record of this format?"""
        try:
            return bool(self.detect(value))
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            return False  # the detector looked for something that another format does not have


# Records and their fields ------------------------------------------------------------------------


def has(fields: str) -> Callable[[Any], bool]:
    """Return a detector of objects with all these fields, or with those of another side of `|`."""
    alternatives = [set(names.split()) for names in fields.split("|")]

    def detect(value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        return any(names <= set(value) for names in alternatives)

    return detect


def require(condition: object, reason: str) -> None:
    """Reject the record for this reason if the condition is false. The caller adds its place."""
    if not condition:
        raise RowError("", reason)


def first_filled(row: Json, *keys: str) -> Any:
    """Return the first of these fields that is neither missing nor empty, or None."""
    for key in keys:
        if row.get(key):
            return row[key]
    return None


def pick_fields(row: Json, *keys: str) -> Json:
    """Return these fields, where the row has them."""
    return {key: row[key] for key in keys if key in row}


def other_fields(row: Json, *known: str) -> Json:
    """Return the fields that have no place of their own: a row's metadata."""
    return {key: value for key, value in row.items() if key not in known}


def parse_literal(text: str) -> Any:
    """Return text as JSON, or otherwise as a Python literal. ValueError if it is neither."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"neither JSON nor a literal: {text[:60]!r}") from None


def to_text(value: Any) -> str:
    """Return a text as it is, and any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def find_side_file(path: Path, *names: str) -> Path:
    """Return a file that belongs to the rows at `path`: in the same folder or up to three above."""
    folder = (path if path.is_dir() else path.parent).resolve()
    for place in (folder, *folder.parents[:_PARENT_FOLDERS]):
        for name in names:
            if (place / name).exists():
                return place / name
    raise SharpenError(f"{path}: needs {' or '.join(names)} in its folder or above, none is there")


# Tasks and turns ---------------------------------------------------------------------------------


def task(
    kind: str, instruction: str, gold: Json, *, tools: Any = (), difficulty: str = "", **more: Any
) -> Task:
    """Return a task. Of the further arguments, `id` is its id and the others are its metadata."""
    task_id = str(more.pop("id", ""))
    return Task(task_id, instruction, tools, gold, kind, difficulty, metadata=more)


def merge_turns(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Merge neighbouring messages of one speaker; a call stays with the words before it."""
    merged: list[Message] = []
    for message in messages:
        if merged and _same_turn(merged[-1], message):
            contents = (merged[-1].content, message.content)
            text = "\n".join(content for content in contents if content)
            merged[-1] = replace(message, content=text)
        else:
            merged.append(message)
    return tuple(merged)


def _same_turn(previous: Message, message: Message) -> bool:
    if message.role not in ("user", "assistant") or previous.tool_calls:
        return False
    return previous.role == message.role and previous.trained == message.trained
