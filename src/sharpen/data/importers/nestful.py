"""NESTFUL: a request and the calls that solve it, where `$var1.field$` stands for what an earlier
call returned. References stay as they are; the final `var_result` is the gold's `result`.

The specification file lists some names more than once: the one that fits the call is taken. About
six in a hundred visible rows call a function that it does not list; `data check` names them.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from sharpen.data.importers import Importer, Rows
from sharpen.data.importers.reading import below, read_file
from sharpen.data.importers.shapes import beside, candidates, parameters
from sharpen.types import Json, Task, ToolSpec


def specs(path: Path) -> dict[str, list[ToolSpec]]:
    found = defaultdict(list)
    name = path.name.replace("-data", "-spec")
    for record in read_file(beside(path, name, "non-executable-glaive-spec.json")):
        row = record.value
        fields = row.get("query_parameters") or row.get("parameters")
        found[row["name"]].append(ToolSpec(row["name"], row["description"], parameters(fields)))
    return dict(found)


def best(options: list[ToolSpec], arguments: Json) -> ToolSpec:
    """The definition with the fewest arguments it does not know."""
    return min(options, key=lambda t: len(set(arguments) - set(t.parameters.get("properties", {}))))


def convert(row: Json, where: str, known: dict[str, list[ToolSpec]]) -> Rows:
    calls = [call for call in row["output"] if call["name"] != "var_result"]
    result = next((c["arguments"] for c in row["output"] if c["name"] == "var_result"), None)
    tools = {name: options[0] for name, options in known.items()}
    for call in calls:
        if call["name"] in known:
            tools[call["name"]] = best(known[call["name"]], call["arguments"])
    chosen = candidates([call["name"] for call in calls], tools, row["input"])
    yield Task("", row["input"], chosen, {"calls": calls, "result": result}, "calls")


def detect(row: Json) -> bool:
    return isinstance(row["input"], str) and "name" in row["output"][0]


IMPORTERS = (Importer("nestful", detect, convert, below("data"), specs),)
