"""STAR: recorded user–wizard dialogs; the wizard's queries are the calls, the knowledge base's
items the answers. Drafts and stage directions are not part of the dialog.

In 59 of the 512 visible dialogs the user left before the wizard said a word; nothing can be learnt
from them, and 88.5% stay. A constraint is a value or a comparison; a comparison becomes
`{"op": …, "value": …}`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from sharpen.data.importers import Importer, Rows, has
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


def argument(text: Any, spec: ToolSpec, name: str) -> Any:
    if not isinstance(text, str) or text in ("", "null"):
        return text or None
    if match := COMPARISON.match(text):
        if not match[2]:
            return None
        value = literal(f"[{match[2]}]") if match[1] == "is_one_of" else literal(match[2])
        return value if match[1] == "is_equal_to" else {"op": match[1], "value": value}
    field = spec.parameters["properties"].get(name, {"anyOf": [{}]})
    bare = field["anyOf"][0].get("type") == "string" and text[0] not in "\"'"
    return text if bare else literal(text)  # codes such as 0314 are written without quotes


def convert(row: Json, where: str, known: dict[str, ToolSpec]) -> Rows:
    messages, names = [], [c["Task"] for c in row["Scenario"]["WizardCapabilities"]]
    for event in row["Events"]:
        who, action = event["Agent"], event["Action"]
        if who == "User" and action == "utter":
            messages.append(Message("user", event["Text"]))
        elif who == "Wizard" and action in ("utter", "pick_suggestion"):
            messages.append(Message("assistant", event["Text"]))
        elif who == "Wizard" and action == "query":
            name = event["APIName"]
            names.append(name)
            pairs = [pair for constraint in event["Constraints"] for pair in constraint.items()]
            given = {k: argument(v, known[name], k) for k, v in pairs}
            given = {k: v for k, v in given.items() if v is not None}
            messages.append(Message("assistant", "", (ToolCall(name, given),)))
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


IMPORTERS = (Importer("star", has("Events", "Scenario"), convert, below("dialog"), apis),)
