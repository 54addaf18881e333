"""ToolAlpaca: an API with its functions, and instances: runs with intermediate steps (dialogs) or
instructions with golden answers (tasks).

`public_apis.json` is a list of links without instructions; none of it can become a row, so it is
not recognised as this format.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from sharpen.data.importers import Importer, Rows, has
from sharpen.data.importers.reading import Record, read_records
from sharpen.data.importers.shapes import call_from, calls_to_gold, literal, parameters
from sharpen.types import Dialog, Json, Message, Task, ToolSpec

PARAMETERS = re.compile(r"\s*Parameters: (\{.*?\})\s*(?:\nOutput:|$)", re.S)


def read(path: Path) -> Iterator[Record]:
    """One record for each run and each instruction with golden answers."""
    for record in read_records(path):
        api = record.value
        if record.problem or not has("Function_Description")(api):
            yield record
            continue
        golden = zip(api.get("Instructions") or [], api.get("Golden_Answers") or [], strict=False)
        runs = api.get("Instances") or []
        for number, case in enumerate(chain(runs, golden), 1):
            yield Record(f"{record.where}#{number}", {"api": api, "case": case})


def tool(name: str, text: str) -> ToolSpec:
    match = PARAMETERS.search(text)
    fields = literal(match[1]) if match else {}
    return ToolSpec(name, text.split("\nParameters:")[0].strip(), parameters(fields))


def convert(value: Json, where: str, side: None) -> Rows:
    api, case = value["api"], value["case"]
    described = api["Function_Description"].items()
    tools = tuple(tool(name, text) for name, text in described if name != "components")
    metadata = {"api": api["Name"], "category": api.get("Category", "")}
    row_id = f"{api['Name']}-{where.rsplit('#', 1)[1]}"
    if not isinstance(case, dict):
        request, answers = case
        steps = [{"name": a["Action"], "arguments": a["Action_Input"]} for a in answers]
        gold = {"calls": calls_to_gold(call_from(step, where) for step in steps)}
        yield Task(row_id, request, tools, gold, "calls", metadata=metadata)
        return
    messages = [Message("user", case["input"])]
    for (name, given, log), observation in case["intermediate_steps"]:
        thought = log.split("\nASSISTANT Action:")[0].split("\nAction:")[0].strip()
        call = call_from({"name": name, "arguments": given}, where)
        messages += [
            Message("assistant", thought, (call,)),
            Message("tool", observation, name=name),
        ]
    messages.append(Message("assistant", case["output"]))
    yield Dialog(tuple(messages), tools, id=row_id, metadata=metadata)


IMPORTERS = (Importer("toolalpaca", has("api", "case"), convert, read),)
