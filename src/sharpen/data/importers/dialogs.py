"""Recorded dialogs with a service behind them: API-Bank, Schema-Guided Dialogue and STAR.

The tools stand in files of their own: `all_apis.csv`, `schema.json` and `apis/`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sharpen.data.importers import has, importer, shapes
from sharpen.data.reading import Record, below, data_files, read_file
from sharpen.records import read_json
from sharpen.types import Dialog, Json, Message, RowError, ToolCall, ToolSpec

SIGNATURE = re.compile(r"(\w+): (\w+)")
COMPARISON = re.compile(r"api\.(\w+)\((.*)\)$", re.S)
OPERATOR = {"type": "object", "properties": {"op": {"type": "string"}, "value": {}}}
OPERATOR |= {"required": ["op", "value"]}


def apibank_files(path: Path) -> Iterator[Record]:
    """One record a file: the list of its turns."""
    for file in data_files(path):
        if path.is_dir() and file.suffix != ".jsonl":
            continue
        found = read_file(file)
        first = next(found, Record("", problem="empty file"))
        if not first.problem and not has("role")(first.value):
            yield Record(first.where, problem="not a turn of an API-Bank dialog")
            continue
        turns = [first, *found]
        problem = next((f"{r.where} {r.problem}".strip() for r in turns if r.problem), "")
        raw = file.read_bytes() if problem else b""
        yield Record(f"{file}:1", [r.value for r in turns], raw, problem)


def apibank_tools(path: Path) -> shapes.Tools:
    tools = {}
    for record in read_file(shapes.beside(path, "all_apis.csv", "data/all_apis.csv")):
        name, text = record.value["类名"], record.value["api_info"]
        if "=" in text:
            lines: Any = ast.parse(text).body
            info: Json = {line.targets[0].id: ast.literal_eval(line.value) for line in lines}
        else:  # no description: the signature `(image: str)` is all there is
            info = {"input_parameters": dict(SIGNATURE.findall(record.value["input_parameters"]))}
        fields = shapes.parameters(info["input_parameters"])
        tools[name] = ToolSpec(name, info.get("description", ""), fields)
    return tools


@importer(lambda turns: turns[0]["role"] in ("User", "AI"), apibank_files, apibank_tools)
def apibank(turns: list[Json], where: str, tools: shapes.Tools) -> Dialog:
    messages, used = [], []
    for turn in turns:
        if turn["role"] in ("User", "AI"):
            role = "user" if turn["role"] == "User" else "assistant"
            messages.append(Message(role, turn["text"]))
            continue
        used.append(turn["api_name"])
        failed = turn["result"].get("exception")
        answer = {"error": failed} if failed else turn["result"]["output"]
        messages += shapes.step(ToolCall(turn["api_name"], turn["param_dict"]), answer)
    shapes.require(used, tools, "all_apis.csv")
    stem = Path(where.rsplit(":", 1)[0]).stem
    used += [name for name in stem.split("-") if name in tools]  # whose descriptions were given
    listed = tuple(tools[name] for name in dict.fromkeys(used))
    return Dialog(shapes.joined(messages), listed, id=stem)


def sgd_tools(path: Path) -> dict[str, list[ToolSpec]]:
    """The intents of every service."""
    services = read_json(shapes.beside(path, "schema.json"))
    return {s["service_name"]: [sgd_tool(s, intent) for intent in s["intents"]] for s in services}


def sgd_tool(service: Json, intent: Json) -> ToolSpec:
    slots = {slot["name"]: slot for slot in service["slots"]}
    required, optional, fields = intent["required_slots"], intent["optional_slots"], {}
    for name in (*required, *optional):
        fields[name] = {"type": "string", "description": slots[name]["description"]}
        if slots[name]["is_categorical"]:
            # a user who does not mind is a value of its own in this data
            fields[name]["enum"] = [*slots[name]["possible_values"], "dontcare"]
        if name in optional:
            fields[name]["default"] = optional[name]
    shape = {"type": "object", "properties": fields, "required": required}
    return ToolSpec(f"{service['service_name']}_{intent['name']}", intent["description"], shape)


@importer(has("dialogue_id", "turns", "services"), below("dialogues"), sgd_tools)
def sgd(row: Json, where: str, known: dict[str, list[ToolSpec]]) -> Dialog:
    """A frame's `service_call` and `service_results` are call and answer; a REQUEST act is a place
    where the assistant asks."""
    messages, asks = [], 0
    for turn in row["turns"]:
        user = turn["speaker"] == "USER"
        for frame in () if user else turn["frames"]:
            asks += any(a["act"] == "REQUEST" for a in frame["actions"])
            if call := frame.get("service_call"):
                made = ToolCall(f"{frame['service']}_{call['method']}", call["parameters"])
                messages += shapes.step(made, frame["service_results"])
        messages.append(Message("user" if user else "assistant", turn["utterance"]))
    shapes.require(row["services"], known, "schema.json")
    tools = tuple(tool for service in row["services"] for tool in known[service])
    metadata = {"services": row["services"], "requests": asks}
    return Dialog(shapes.joined(messages), tools, id=row["dialogue_id"], metadata=metadata)


def star_tools(path: Path) -> shapes.Tools:
    folder = shapes.beside(path, "apis/apis", "apis")
    return {file.stem: star_tool(file.stem, read_json(file)) for file in folder.glob("*.json")}


def star_tool(name: str, api: Json) -> ToolSpec:
    """A constraint is a value or a comparison; a comparison becomes `{"op": …, "value": …}`."""
    fields, kinds = {}, {"Integer": "integer", "Boolean": "boolean"}
    for field in api["input"]:
        kind = {"type": kinds.get(field["Type"], "string")}
        kind |= {"enum": field["Categories"]} if field.get("Categories") else {}
        fields[field["Name"]] = {"anyOf": [kind, OPERATOR], "description": field["ReadableName"]}
    needed = [n for n in api["required"] if n in fields]
    schema = {"type": "object", "properties": fields} | ({"required": needed} if needed else {})
    return ToolSpec(name, name.replace("_", " ").capitalize() + ".", schema)


def star_argument(text: Any, spec: ToolSpec, name: str) -> Any:
    if not isinstance(text, str) or text in ("", "null"):
        return text or None
    if match := COMPARISON.match(text):
        if not match[2]:
            return None
        value = shapes.literal(f"[{match[2]}]" if match[1] == "is_one_of" else match[2])
        return value if match[1] == "is_equal_to" else {"op": match[1], "value": value}
    field = spec.parameters["properties"].get(name, {"anyOf": [{}]})
    bare = field["anyOf"][0].get("type") == "string" and text[0] not in "\"'"
    return text if bare else shapes.literal(text)  # codes such as 0314 are written without quotes


@importer(has("Events", "Scenario"), below("dialog"), star_tools)
def star(row: Json, where: str, known: shapes.Tools) -> Dialog:
    """The wizard's queries are the calls, the knowledge base's items the answers. Drafts and stage
    directions are left out, and so are dialogs (59 of 512) whose user left before any answer."""
    messages, names = [], [c["Task"] for c in row["Scenario"]["WizardCapabilities"]]
    for event in row["Events"]:
        did = (event["Agent"], event["Action"])
        if did == ("User", "utter"):
            messages.append(Message("user", event["Text"]))
        elif did in (("Wizard", "utter"), ("Wizard", "pick_suggestion")):
            messages.append(Message("assistant", event["Text"]))
        elif did == ("Wizard", "query"):
            name = event["APIName"]
            names.append(name)
            pairs = [pair for constraint in event["Constraints"] for pair in constraint.items()]
            given = {k: star_argument(v, known[name], k) for k, v in pairs}
            given = {k: v for k, v in given.items() if v is not None}
            messages.append(Message("assistant", "", (ToolCall(name, given),)))
        elif did[0] == "KnowledgeBase":
            answer = {"item": event.get("Item"), "total": event["TotalItems"]}
            messages.append(Message("tool", shapes.as_text(answer), name=event["APIName"]))
    if not any(m.role == "assistant" for m in messages):
        raise RowError(where, "the wizard never speaks")
    shapes.require(names, known, "apis/")
    tools = tuple(known[name] for name in dict.fromkeys(names))
    scenario = {k: row["Scenario"].get(k) for k in ("Happy", "MultiTask", "UserTask", "WizardTask")}
    metadata = {"completion": row["CompletionLevel"], **scenario}
    return Dialog(shapes.joined(messages), tools, id=str(row["DialogueID"]), metadata=metadata)
