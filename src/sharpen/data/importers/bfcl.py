"""Berkeley Function-Calling Leaderboard rows; answers come from `possible_answer/` beside them.

Gold is `{"calls": […]}`; with `"match": "allowed"` an argument holds the list of values that count
as right. A row of an irrelevance category has no answer file: its gold is no call at all. REST rows
have an example response instead of a call, multi-turn rows one list of calls for each turn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sharpen.data.importers import Importer, Rows, has
from sharpen.data.importers.openai import messages as chat
from sharpen.data.importers.reading import below, read_file
from sharpen.data.importers.shapes import calls_to_gold, literal, python_call, tools_from
from sharpen.types import Json, RowError, SharpenError, Task


def answers(path: Path) -> dict[str, Any]:
    """Every answer of the `possible_answer` folder near the questions, by id."""
    places = [path if path.is_dir() else path.parent, path.parent, *path.resolve().parents[1:2]]
    folder = next((p / "possible_answer" for p in places if (p / "possible_answer").is_dir()), None)
    if folder is None:
        return {}
    found = {}
    for file in sorted(folder.glob("*.json")) if path.is_dir() else [folder / path.name]:
        for record in read_file(file) if file.is_file() else ():
            if record.problem:
                raise SharpenError(f"{record.where}: {record.problem}")
            found[record.value["id"]] = record.value["ground_truth"]
    return found


def gold_of(row: Json, where: str, found: dict[str, Any]) -> tuple[str, Json]:
    truth = found.get(row["id"])
    if truth is None:
        if "irrelevance" in row["id"]:
            return "calls", {"calls": []}
        if "relevance" in row["id"]:
            return "timing", {"decision": "call"}
        raise RowError(where, f"no answer for {row['id']} in possible_answer/")
    if isinstance(truth, str):
        return "rest", {"response": literal(truth)}
    if "involved_classes" in row:
        turns = [calls_to_gold(python_call(c, where) for c in turn) for turn in truth]
        return "multi_turn", {"turns": turns}
    if all(isinstance(c, str) for c in truth):
        return "calls", {"calls": calls_to_gold(python_call(c, where) for c in truth)}
    calls = [{"name": n, "arguments": a} for call in truth for n, a in call.items()]
    return "calls", {"calls": calls, "match": "allowed"}


def convert(row: Json, where: str, found: dict[str, Any]) -> Rows:
    turns = row["question"] if isinstance(row["question"][0], list) else [row["question"]]
    kind, gold = gold_of(row, where, found)
    first = chat(turns[0], where)
    if first[-1].role != "user":
        raise RowError(where, "the question does not end with the user")
    rest = {k: v for k, v in row.items() if k not in ("id", "question", "function")}
    rest |= {"turns": turns[1:]} if len(turns) > 1 else {}
    yield Task(
        row["id"],
        first[-1].content,
        tools_from(row.get("function"), where),
        gold,
        kind,
        context=first[:-1],
        metadata=rest | {"category": row["id"].rsplit("_", 1)[0]},
    )


def detect(row: Json) -> bool:
    return has("id", "question")(row) and isinstance(row["question"], list)


IMPORTERS = (Importer("bfcl", detect, convert, below(r"^BFCL.*question|^BFCL"), answers),)
