"""STAR: recorded user–wizard dialogs; the wizard's queries are the calls, the knowledge base's items
the answers. Drafts (`request_suggestions`) and the user's stage directions are not part of the dialog.

A constraint is a value or a comparison; a comparison becomes `{"op": …, "value": …}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sharpen.data.importers import Importer, has
from sharpen.data.importers.reading import below
from sharpen.data.importers.shapes import beside, joined, literal
from sharpen.records import read_json
from sharpen.types import Dialog, Json, Message, RowError, ToolCall, ToolSpec

COMPARISON = re.compile(r"api\.(\w+)\((.*)\)$", re.S)
OPERATOR = {
    "type": "object",
    "properties": {"op": {"type": "string"}, "value": {}},
    "required": ["op", "value"],
}


def apis(path: Path) -> dict[str, ToolSpec]:
    folder = beside(path, "apis/apis", "apis")
    return {file.stem: tool(file.stem, read_json(file)) for file in sorted(folder.glob("*.json"))}


def tool(name: str, api: Json) -> ToolSpec:
    fields = {}
    for field in api["input"]:
        kind: Json = {
            "type": {"Integer": "integer", "Boolean": "boolean"}.get(field["Type"], "string")
        }
        if field.get("Categories"):
            kind |= {"enum": field["Categories"]}
        fields[field["Name"]] = {"anyOf": [kind, OPERATOR], "description": field["ReadableName"]}
    needed = [n for n in api["required"] if n in fields]
    schema = {"type": "object", "properties": fields} | ({"required": needed} if needed else {})
    return ToolSpec(name, name.replace("_", " ").capitalize() + ".", schema)


def argument(text: Any, where: str) -> Any:
    if not isinstance(text, str):
        return text
    match = COMPARISON.match(text)
    try:
        if match is None:
            return literal(text)
        value = literal(f"[{match[2]}]") if match[1] == "is_one_of" else literal(match[2])
    except ValueError as error:
        raise RowError(where, f"constraint: {error}") from None
    return value if match[1] == "is_equal_to" else {"op": match[1], "value": value}


def convert(row: Json, where: str, known: dict[str, ToolSpec]) -> Iterator[Dialog]:
    messages, names = [], [c["Task"] for c in row["Scenario"]["WizardCapabilities"]]
    for event in row["Events"]:
        who, action = event["Agent"], event["Action"]
        if who == "User" and action == "utter":
            messages.append(Message("user", event["Text"]))
        elif who == "Wizard" and action in ("utter", "pick_suggestion"):
            messages.append(Message("assistant", event["Text"]))
        elif who == "Wizard" and action == "query":
            names.append(event["APIName"])
            given = {k: argument(v, where) for c in event["Constraints"] for k, v in c.items()}
            given = {k: v for k, v in given.items() if v is not None}
            messages.append(Message("assistant", "", (ToolCall(event["APIName"], given),)))
        elif who == "KnowledgeBase":
            answer = {"item": event.get("Item"), "total": event["TotalItems"]}
            text = json.dumps(answer, ensure_ascii=False)
            messages.append(Message("tool", text, name=event["APIName"]))
    if not any(m.role == "assistant" for m in messages):
        raise RowError(where, "the wizard never speaks")
    if missing := [name for name in names if name not in known]:
        raise RowError(where, f"no API {missing[0]!r} in apis/")
    tools = tuple(known[name] for name in dict.fromkeys(names))
    scenario = {k: row["Scenario"].get(k) for k in ("Happy", "MultiTask", "UserTask", "WizardTask")}
    metadata = {"completion": row["CompletionLevel"], **scenario}
    yield Dialog(joined(messages), tools, id=str(row["DialogueID"]), metadata=metadata)


IMPORTERS = (
    Importer("star", "wizard dialogs", has("Events", "Scenario"), convert, below("dialog"), apis),
)
