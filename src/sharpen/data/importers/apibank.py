"""API-Bank dialogs: a JSONL file of User, AI and API turns each, tools in `all_apis.csv`.

One file of the visible folder is empty and is kept apart.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from sharpen.data.importers import Importer, Rows, has
from sharpen.data.importers.reading import Record, data_files, read_file
from sharpen.data.importers.shapes import as_text, beside, joined, parameters
from sharpen.types import Dialog, Json, Message, RowError, ToolCall, ToolSpec

FIELD = re.compile(r"(\w+): (\w+)")


def read(path: Path) -> Iterator[Record]:
    """One record a file: the list of its turns."""
    for file in data_files(path):
        if path.is_dir() and file.suffix != ".jsonl":
            continue
        found = read_file(file)
        first = next(found, None)
        if first and not first.problem and not has("role")(first.value):
            yield Record(first.where, problem="not a turn of an API-Bank dialog")
            continue
        records = [first, *found] if first else []
        bad = next((r for r in records if r.problem), None)
        turns = [r.value for r in records]
        problem = f"line {bad.where.rsplit(':', 1)[1]}: {bad.problem}" if bad else ""
        problem = problem or ("" if records else "empty file")
        raw = file.read_bytes() if problem else b""
        yield Record(f"{file}:1", None if problem else turns, raw, problem)


def catalogue(path: Path) -> dict[str, ToolSpec]:
    tools = {}
    for record in read_file(beside(path, "all_apis.csv", "data/all_apis.csv")):
        name, text = record.value["类名"], record.value["api_info"]
        if "=" in text:
            info: Json = {n.targets[0].id: ast.literal_eval(n.value) for n in ast.parse(text).body}  # type: ignore[attr-defined]
        else:  # no description: the signature `(image: str)` is all there is
            info = {"input_parameters": dict(FIELD.findall(record.value["input_parameters"]))}
        described = info.get("description", "")
        tools[name] = ToolSpec(name, described, parameters(info["input_parameters"]))
    return tools


def convert(turns: list[Json], where: str, tools: dict[str, ToolSpec]) -> Rows:
    messages, used = [], {}
    for turn in turns:
        if turn["role"] in ("User", "AI"):
            messages.append(
                Message("user" if turn["role"] == "User" else "assistant", turn["text"])
            )
            continue
        name, result = turn["api_name"], turn["result"]
        if name not in tools:
            raise RowError(where, f"no API {name!r} in all_apis.csv")
        used[name] = tools[name]
        failed = result.get("exception")
        answer = {"error": failed} if failed else result["output"]
        messages.append(Message("assistant", "", (ToolCall(name, turn["param_dict"]),)))
        messages.append(Message("tool", as_text(answer), name=name))
    stem = Path(where.rsplit(":", 1)[0]).stem
    for name in stem.split("-"):  # the file's name lists the APIs whose descriptions were given
        used |= {name: tools[name]} if name in tools else {}
    yield Dialog(joined(messages), tuple(used.values()), id=stem)


def detect(turns: list[Json]) -> bool:
    return turns[0]["role"] in ("User", "AI") and "text" in turns[0]


IMPORTERS = (Importer("apibank", detect, convert, read, catalogue),)
