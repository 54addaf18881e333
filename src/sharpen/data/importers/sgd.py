"""Schema-Guided Dialogue: the services' intents are the tools, a frame's `service_call` and
`service_results` the calls and answers, REQUEST acts the places where the assistant asks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sharpen.data.importers import Importer, Rows, has
from sharpen.data.importers.reading import below
from sharpen.data.importers.shapes import as_text, beside, joined
from sharpen.records import read_json
from sharpen.types import Dialog, Json, Message, RowError, ToolCall, ToolSpec

Services = dict[str, tuple[ToolSpec, ...]]


def services(path: Path) -> Services:
    return {s["service_name"]: tuple(tools(s)) for s in read_json(beside(path, "schema.json"))}


def tools(service: Json) -> Iterator[ToolSpec]:
    slots = {slot["name"]: slot for slot in service["slots"]}
    for intent in service["intents"]:
        optional, fields = intent["optional_slots"], {}
        for name in (*intent["required_slots"], *optional):
            slot = slots[name]
            fields[name] = {"type": "string", "description": slot["description"]}
            if slot["is_categorical"]:
                # a user who does not mind is a value of its own in this data
                fields[name]["enum"] = [*slot["possible_values"], "dontcare"]
            if name in optional:
                fields[name]["default"] = optional[name]
        shape = {"type": "object", "properties": fields, "required": intent["required_slots"]}
        yield ToolSpec(f"{service['service_name']}_{intent['name']}", intent["description"], shape)


def convert(row: Json, where: str, known: Services) -> Rows:
    messages, asks = [], 0
    for turn in row["turns"]:
        if turn["speaker"] == "USER":
            messages.append(Message("user", turn["utterance"]))
            continue
        for frame in turn["frames"]:
            asks += any(a["act"] == "REQUEST" for a in frame["actions"])
            if call := frame.get("service_call"):
                name = f"{frame['service']}_{call['method']}"
                messages.append(Message("assistant", "", (ToolCall(name, call["parameters"]),)))
                messages.append(Message("tool", as_text(frame["service_results"]), name=name))
        messages.append(Message("assistant", turn["utterance"]))
    if missing := [s for s in row["services"] if s not in known]:
        raise RowError(where, f"no service {missing[0]!r} in schema.json")
    listed = tuple(tool for service in row["services"] for tool in known[service])
    metadata = {"services": row["services"], "requests": asks}
    yield Dialog(joined(messages), listed, id=row["dialogue_id"], metadata=metadata)


IMPORTERS = (
    Importer("sgd", has("dialogue_id", "turns", "services"), convert, below("dialogues"), services),
)
