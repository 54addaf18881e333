"""Imports recorded dialogs with a service: API-Bank, SGD, STAR, tau-bench and tau2-bench.

The tools of API-Bank, SGD and STAR are in files of their own. Those of tau-bench belong to the
environment and are in no file; its instructions are what the simulated user is told, not what it
says (`metadata.simulated_user`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

from sharpen.data.importers.calls import call_and_result, gold_calls
from sharpen.data.importers.chat import message_from, messages_from
from sharpen.data.importers.common import (
    Importer,
    find_side_file,
    has,
    merge_turns,
    parse_literal,
    pick_fields,
    require,
    to_text,
)
from sharpen.data.importers.tools import ToolCatalogue, look_up, to_parameters, tools_from
from sharpen.data.reading import Record, read_file, within
from sharpen.records import read_json
from sharpen.types import Dialog, Json, Message, Role, Task, ToolCall, ToolSpec

_APIBANK_ROLES: dict[str, Role] = {"User": "user", "AI": "assistant"}
_STAR_TYPES = {"Integer": "integer", "Boolean": "boolean"}
_STAR_COMPARISON = {
    "type": "object",
    "properties": {"op": {"type": "string"}, "value": {}},
    "required": ["op", "value"],
}
_STAR_SCENARIO = ("Happy", "MultiTask", "UserTask", "WizardTask")
_TAU2_INSTRUCTIONS = ("reason_for_call", "known_info", "unknown_info", "task_instructions")
_TAU2_POLICIES = ("policy.md", "policy.txt", "main_policy.md", "main_policy.txt")


# API-Bank ----------------------------------------------------------------------------------------


def _apibank_tools(path: Path) -> ToolCatalogue:
    tools = {}
    for record in read_file(find_side_file(path, "all_apis.csv", "data/all_apis.csv")):
        name = record.value["类名"]
        class_text = record.value["api_info"]
        signature = record.value["input_parameters"]
        # without a description, the signature `(image: str)` is all there is
        info: Json = {"input_parameters": dict(re.findall(r"(\w+): (\w+)", signature))}
        if "=" in class_text:
            assignments: Any = ast.parse(class_text).body
            info = {}
            for assignment in assignments:
                info[assignment.targets[0].id] = ast.literal_eval(assignment.value)
        parameters = to_parameters(info["input_parameters"])
        tools[name] = ToolSpec(name, info.get("description", ""), parameters)
    return tools


def _one_record_per_file(records: Iterator[Record], file: Path) -> Iterator[Record]:
    """A dialog is a file with one turn per line: yield the list of its turns."""
    first = next(records, Record("", problem="empty file"))
    if not first.problem and not has("role")(first.value):
        yield Record(first.where, problem="not a turn of an API-Bank dialog")
        return
    turns = [first, *records]
    problem = ""
    for turn in turns:
        if turn.problem:
            problem = f"{turn.where} {turn.problem}".strip()
            break
    raw = file.read_bytes() if problem else b""
    yield Record(f"{file}:1", [turn.value for turn in turns], raw, problem)


@Importer(
    lambda turns: turns[0]["role"] in _APIBANK_ROLES,
    names=r"\.jsonl$",
    side=_apibank_tools,
    split=_one_record_per_file,
    placed=True,
)
def apibank(turns: list[Json], where: str, tools: ToolCatalogue) -> Dialog:
    """API-Bank level 1 and 2 dialogs: one file each, whose name lists the tools on offer."""
    messages = []
    tool_names = []
    for turn in turns:
        role = _APIBANK_ROLES.get(turn["role"])
        if role:
            messages.append(Message(role, turn["text"]))
            continue
        tool_names.append(turn["api_name"])
        exception = turn["result"].get("exception")
        result = {"error": exception} if exception else turn["result"]["output"]
        messages += call_and_result(ToolCall(turn["api_name"], turn["param_dict"]), result)
    stem = Path(where.rsplit(":", 1)[0]).stem
    tool_names += [name for name in stem.split("-") if name in tools]
    offered_tools = look_up(tool_names, tools, "all_apis.csv")
    return Dialog(merge_turns(messages), offered_tools, id=stem)


# Schema-Guided Dialogue --------------------------------------------------------------------------


def _sgd_tools(path: Path) -> dict[str, list[ToolSpec]]:
    services = read_json(find_side_file(path, "schema.json"))
    tools = {}
    for service in services:
        intents = service["intents"]
        tools[service["service_name"]] = [_sgd_tool(service, intent) for intent in intents]
    return tools


def _sgd_tool(service: Json, intent: Json) -> ToolSpec:
    slots = {slot["name"]: slot for slot in service["slots"]}
    required = intent["required_slots"]
    optional = intent["optional_slots"]
    properties: Json = {}
    for name in (*required, *optional):
        slot = slots[name]
        properties[name] = {"type": "string", "description": slot["description"]}
        if slot["is_categorical"]:
            # a user who does not mind is a value of its own in this data
            properties[name]["enum"] = [*slot["possible_values"], "dontcare"]
        if name in optional:
            properties[name]["default"] = optional[name]
    parameters = {"type": "object", "properties": properties, "required": required}
    name = f"{service['service_name']}_{intent['name']}"
    return ToolSpec(name, intent["description"], parameters)


@Importer(has("dialogue_id turns services"), names="dialogues", side=_sgd_tools)
def sgd(row: Json, tools_by_service: dict[str, list[ToolSpec]]) -> Dialog:
    """Schema-Guided Dialogues: `service_call` and `service_results` are call and result.

    `metadata.requests` counts the system turns that ask for something (a REQUEST act).
    """
    messages = []
    request_count = 0
    for turn in row["turns"]:
        if turn["speaker"] == "USER":
            messages.append(Message("user", turn["utterance"]))
            continue
        for frame in turn["frames"]:
            if any(action["act"] == "REQUEST" for action in frame["actions"]):
                request_count += 1
            service_call = frame.get("service_call")
            if service_call:
                name = f"{frame['service']}_{service_call['method']}"
                call = ToolCall(name, service_call["parameters"])
                messages += call_and_result(call, frame["service_results"])
        messages.append(Message("assistant", turn["utterance"]))
    tools = []
    for service_tools in look_up(row["services"], tools_by_service, "schema.json"):
        tools += service_tools
    metadata = {"services": row["services"], "requests": request_count}
    return Dialog(merge_turns(messages), tuple(tools), id=row["dialogue_id"], metadata=metadata)


# STAR --------------------------------------------------------------------------------------------


def _star_tools(path: Path) -> ToolCatalogue:
    folder = find_side_file(path, "apis/apis", "apis")
    return {file.stem: _star_tool(file.stem, read_json(file)) for file in folder.glob("*.json")}


def _star_tool(name: str, api: Json) -> ToolSpec:
    """A constraint is a value or a comparison; a comparison becomes `{"op": …, "value": …}`."""
    properties = {}
    for field in api["input"]:
        value_schema: Json = {"type": _STAR_TYPES.get(field["Type"], "string")}
        if field.get("Categories"):
            value_schema["enum"] = field["Categories"]
        properties[field["Name"]] = {
            "anyOf": [value_schema, _STAR_COMPARISON],
            "description": field["ReadableName"],
        }
    parameters = {"type": "object", "properties": properties}
    required = [name for name in api["required"] if name in properties]
    if required:
        parameters["required"] = required
    return ToolSpec(name, name.replace("_", " ").capitalize() + ".", parameters)


def _star_argument(text: Any, tool: ToolSpec, name: str) -> Any:
    """Return the value of a constraint such as `'cheap'` or `api.is_one_of('a', 'b')`, or None."""
    if not isinstance(text, str) or text in ("", "null"):
        return text or None
    comparison = re.match(r"(?s)api\.(\w+)\((.*)\)$", text)
    if comparison:
        operator = comparison[1]
        operand = comparison[2]
        if not operand:
            return None
        value = parse_literal(f"[{operand}]" if operator == "is_one_of" else operand)
        return value if operator == "is_equal_to" else {"op": operator, "value": value}
    schema = tool.parameters["properties"].get(name, {"anyOf": [{}]})
    is_string = schema["anyOf"][0].get("type") == "string"
    if is_string and text[0] not in "\"'":
        return text  # codes such as 0314 are written without quotes
    return parse_literal(text)


def _star_call(event: Json, tools: ToolCatalogue) -> ToolCall:
    """Return the call of a wizard's query; constraints without a value are left out."""
    name = event["APIName"]
    values = {}
    for constraint in event["Constraints"]:
        for key, text in constraint.items():
            values[key] = _star_argument(text, tools[name], key)
    arguments = {key: value for key, value in values.items() if value is not None}
    return ToolCall(name, arguments)


@Importer(has("Events Scenario"), names="dialog", side=_star_tools)
def star(row: Json, tools: ToolCatalogue) -> Dialog:
    """STAR dialogs: the wizard's queries are the calls, the knowledge base's items the results.

    Drafts and stage directions are left out. Dialogs whose user left before any answer (59 of 512)
    are rejected.
    """
    messages = []
    tool_names = [capability["Task"] for capability in row["Scenario"]["WizardCapabilities"]]
    for event in row["Events"]:
        agent = event["Agent"]
        action = event["Action"]
        if agent == "User" and action == "utter":
            messages.append(Message("user", event["Text"]))
        elif agent == "Wizard" and action in ("utter", "pick_suggestion"):
            messages.append(Message("assistant", event["Text"]))
        elif agent == "Wizard" and action == "query":
            tool_names.append(event["APIName"])
            messages.append(Message("assistant", "", (_star_call(event, tools),)))
        elif agent == "KnowledgeBase":
            result = {"item": event.get("Item"), "total": event["TotalItems"]}
            messages.append(Message("tool", to_text(result), name=event["APIName"]))
    require(any(m.role == "assistant" for m in messages), "the wizard never speaks")
    metadata = {"completion": row["CompletionLevel"]}
    for key in _STAR_SCENARIO:
        metadata[key] = row["Scenario"].get(key)
    offered_tools = look_up(tool_names, tools, "apis/")
    dialog_id = str(row["DialogueID"])
    return Dialog(merge_turns(messages), offered_tools, id=dialog_id, metadata=metadata)


# tau-bench and tau2-bench ------------------------------------------------------------------------


@Importer(has("user_id actions outputs"))
def tau_tasks(row: Json) -> Task:
    """tau-bench tasks: the actions that must be taken, and what must be said."""
    gold = {"actions": gold_calls(row["actions"]), "outputs": row["outputs"]}
    metadata = {"user_id": row["user_id"], "simulated_user": True}
    return Task("", row["instruction"], (), gold, "tau", metadata=metadata)


@Importer(has("traj reward|messages_display"))
def tau_runs(row: Json) -> Dialog:
    """tau-bench runs. The few-shot text (`messages_display`) holds no calls and is rejected."""
    display_reason = "the text prints calls as None: import the JSON runs instead"
    require("messages_display" not in row, display_reason)
    run_id = f"{row['task_id']}-{row.get('trial', 0)}"
    tools = tools_from(row.get("tools"))
    metadata = pick_fields(row, "task_id", "trial", "reward")
    return Dialog(messages_from(row["traj"]), tools, id=run_id, metadata=metadata)


def _tau2_policy(path: Path) -> tuple[Message, ...]:
    """Return the rules of the domain as the agent's system message, if there is such a file."""
    folder = path if path.is_dir() else path.parent
    for name in _TAU2_POLICIES:
        file = folder / name
        if file.is_file():
            return (Message("system", file.read_text(encoding="utf-8")),)
    return ()


@Importer(has("user_scenario evaluation_criteria"), names="^tasks", side=_tau2_policy)
def tau2_tasks(row: Json, policy: tuple[Message, ...]) -> Task:
    """tau2-bench tasks, with the instructions of the simulated user and the domain's policy."""
    instruction = row["user_scenario"]["instructions"]
    if isinstance(instruction, dict):
        parts = [instruction[key] for key in _TAU2_INSTRUCTIONS if instruction.get(key)]
        instruction = "\n\n".join(parts)
    metadata: Json = {}
    for key in ("description", "initial_state", "ticket"):
        if row.get(key):
            metadata[key] = row[key]
    metadata["persona"] = row["user_scenario"].get("persona")
    metadata["simulated_user"] = True
    gold = row["evaluation_criteria"]
    return Task(row["id"], instruction, (), gold, "tau2", "", policy, metadata)


@Importer(has("task_id reward_info messages"), split=within(itemgetter("simulations")))
def tau2_runs(row: Json) -> Dialog:
    """tau2-bench runs, as the assistant sees them: without the simulated user's own tools."""
    user_call_ids = set()
    for turn in row["messages"]:
        if turn["role"] == "user":
            user_call_ids |= {call["id"] for call in turn.get("tool_calls") or []}
    messages = []
    for turn in row["messages"]:
        role = turn["role"]
        if role == "assistant":
            messages.append(message_from(turn))
        elif role == "tool":
            if turn.get("id") not in user_call_ids:
                result = turn | {"tool_call_id": turn.get("id"), "name": ""}
                messages.append(message_from(result))
        elif turn.get("content"):
            messages.append(message_from(turn | {"tool_calls": None}))
    reward = (row.get("reward_info") or {}).get("reward")
    metadata = {"task_id": row["task_id"], "trial": row.get("trial"), "reward": reward}
    return Dialog(tuple(messages), id=str(row["id"]), metadata=metadata)
