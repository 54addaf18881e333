"""Recorded dialogs with a service behind them, and logs of tool use as text (ReAct). The tools of
API-Bank, SGD and STAR stand in files of their own; tau-bench's belong to the environment and are in
no file, and its instructions are what the simulated user is told, not what it says
(`metadata.simulated_user`)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

from sharpen.data.importers import common
from sharpen.data.importers.chat import message, said
from sharpen.data.importers.common import Importer, Tools, has, require
from sharpen.data.reading import Record, read_file, within
from sharpen.records import read_json
from sharpen.types import Dialog, Json, Message, Role, Task, ToolCall, ToolSpec

APIBANK: dict[str, Role] = {"User": "user", "AI": "assistant"}
OPERATOR = {"type": "object", "properties": {"op": {"type": "string"}, "value": {}}}
OPERATOR |= {"required": ["op", "value"]}
TOLD = ("reason_for_call", "known_info", "unknown_info", "task_instructions")
POLICIES = ("policy.md", "policy.txt", "main_policy.md", "main_policy.txt")
LABELS = "Question|ActionPath|Thought|Action Input|Action|Observation|Final Answer"
STEP = re.compile(rf"^[ \t]*({LABELS})[ \t]*\d*[ \t]*:", re.M)


def apibank_tools(path: Path) -> Tools:
    tools = {}
    for record in read_file(common.beside(path, "all_apis.csv", "data/all_apis.csv")):
        name, text, signature = itemgetter("类名", "api_info", "input_parameters")(record.value)
        # without a description, the signature `(image: str)` is all there is
        info: Json = {"input_parameters": dict(re.findall(r"(\w+): (\w+)", signature))}
        if "=" in text:
            lines: Any = ast.parse(text).body
            info = {line.targets[0].id: ast.literal_eval(line.value) for line in lines}
        fields = common.parameters(info["input_parameters"])
        tools[name] = ToolSpec(name, info.get("description", ""), fields)
    return tools


def whole(records: Iterator[Record], file: Path) -> Iterator[Record]:
    """One record a file: the list of its turns."""
    first = next(records, Record("", problem="empty file"))
    if not first.problem and not has("role")(first.value):
        yield Record(first.where, problem="not a turn of an API-Bank dialog")
        return
    turns = [first, *records]
    problem = next((f"{r.where} {r.problem}".strip() for r in turns if r.problem), "")
    raw = file.read_bytes() if problem else b""
    yield Record(f"{file}:1", [r.value for r in turns], raw, problem)


@Importer(lambda turns: turns[0]["role"] in APIBANK, r"\.jsonl$", apibank_tools, whole, placed=True)
def apibank(turns: list[Json], where: str, tools: Tools) -> Dialog:
    messages, used = [], []
    for turn in turns:
        if role := APIBANK.get(turn["role"]):
            messages.append(Message(role, turn["text"]))
            continue
        used.append(turn["api_name"])
        failed = turn["result"].get("exception")
        answer = {"error": failed} if failed else turn["result"]["output"]
        messages += common.step(ToolCall(turn["api_name"], turn["param_dict"]), answer)
    stem = Path(where.rsplit(":", 1)[0]).stem
    used += [name for name in stem.split("-") if name in tools]  # whose descriptions were given
    return Dialog(common.joined(messages), common.listed(used, tools, "all_apis.csv"), id=stem)


def sgd_tools(path: Path) -> dict[str, list[ToolSpec]]:
    services = read_json(common.beside(path, "schema.json"))
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


@Importer(has("dialogue_id turns services"), "dialogues", sgd_tools)
def sgd(row: Json, known: dict[str, list[ToolSpec]]) -> Dialog:
    """`service_call` and `service_results` are call and answer; a REQUEST act is a question."""
    messages, asks = [], 0
    for turn in row["turns"]:
        user = turn["speaker"] == "USER"
        for frame in () if user else turn["frames"]:
            asks += any(a["act"] == "REQUEST" for a in frame["actions"])
            if call := frame.get("service_call"):
                made = ToolCall(f"{frame['service']}_{call['method']}", call["parameters"])
                messages += common.step(made, frame["service_results"])
        messages.append(Message("user" if user else "assistant", turn["utterance"]))
    tools = chain.from_iterable(common.listed(row["services"], known, "schema.json"))
    metadata = {"services": row["services"], "requests": asks}
    return Dialog(common.joined(messages), tuple(tools), id=row["dialogue_id"], metadata=metadata)


def star_tools(path: Path) -> Tools:
    folder = common.beside(path, "apis/apis", "apis")
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
    if match := re.match(r"(?s)api\.(\w+)\((.*)\)$", text):
        if not match[2]:
            return None
        value = common.literal(f"[{match[2]}]" if match[1] == "is_one_of" else match[2])
        return value if match[1] == "is_equal_to" else {"op": match[1], "value": value}
    field = spec.parameters["properties"].get(name, {"anyOf": [{}]})
    bare = field["anyOf"][0].get("type") == "string" and text[0] not in "\"'"
    return text if bare else common.literal(text)  # codes such as 0314 are written without quotes


@Importer(has("Events Scenario"), "dialog", star_tools)
def star(row: Json, known: Tools) -> Dialog:
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
            messages.append(Message("tool", common.as_text(answer), name=event["APIName"]))
    require(any(m.role == "assistant" for m in messages), "the wizard never speaks")
    scenario = {k: row["Scenario"].get(k) for k in ("Happy", "MultiTask", "UserTask", "WizardTask")}
    metadata = {"completion": row["CompletionLevel"], **scenario}
    tools = common.listed(names, known, "apis/")
    return Dialog(common.joined(messages), tools, id=str(row["DialogueID"]), metadata=metadata)


@Importer(has("user_id actions outputs"))
def tau_tasks(row: Json) -> Task:
    gold = {"actions": common.gold_calls(row["actions"]), "outputs": row["outputs"]}
    metadata = {"user_id": row["user_id"], "simulated_user": True}
    return Task("", row["instruction"], (), gold, "tau", metadata=metadata)


@Importer(has("traj reward|messages_display"))
def tau_runs(row: Json) -> Dialog:
    """The few-shot text (`messages_display`) holds no calls, so all of it is kept apart."""
    display = "the text prints calls as None: import the JSON runs instead"
    require("messages_display" not in row, display)
    run_id, metadata = f"{row['task_id']}-{row.get('trial', 0)}", ("task_id", "trial", "reward")
    tools = common.tools_from(row.get("tools"))
    return Dialog(said(row["traj"]), tools, id=run_id, metadata=common.picked(row, *metadata))


def policy(path: Path) -> tuple[Message, ...]:
    """The domain's rules, which the agent gets as its system message."""
    folder = path if path.is_dir() else path.parent
    found = [folder / name for name in POLICIES if (folder / name).is_file()]
    return tuple(Message("system", file.read_text(encoding="utf-8")) for file in found[:1])


@Importer(has("user_scenario evaluation_criteria"), "^tasks", policy)
def tau2_tasks(row: Json, context: tuple[Message, ...]) -> Task:
    told = row["user_scenario"]["instructions"]
    if isinstance(told, dict):
        told = "\n\n".join(told[key] for key in TOLD if told.get(key))
    metadata = {k: row[k] for k in ("description", "initial_state", "ticket") if row.get(k)}
    metadata |= {"persona": row["user_scenario"].get("persona"), "simulated_user": True}
    return Task(row["id"], told, (), row["evaluation_criteria"], "tau2", "", context, metadata)


@Importer(has("task_id reward_info messages"), split=within(itemgetter("simulations")))
def tau2_runs(row: Json) -> Dialog:
    """The assistant's side: what the simulated user does with its own tools is not shown to it."""
    asked = [m for m in row["messages"] if m["role"] == "user"]
    users = {call["id"] for m in asked for call in m.get("tool_calls") or []}
    turns = []
    for m in row["messages"]:
        if m["role"] == "tool" and m.get("id") not in users:
            turns.append(message(m | {"tool_call_id": m.get("id"), "name": ""}))
        elif m["role"] == "assistant":
            turns.append(message(m))
        elif m["role"] != "tool" and m.get("content"):
            turns.append(message(m | {"tool_calls": None}))
    reward = (row.get("reward_info") or {}).get("reward")
    metadata = {"task_id": row["task_id"], "trial": row.get("trial"), "reward": reward}
    return Dialog(tuple(turns), id=str(row["id"]), metadata=metadata)


def react_logs(records: Iterator[Record], file: Path) -> Iterator[Record]:
    """A text file gives one record a question, with the text before the first as its header."""
    for record in records:
        if record.problem or not isinstance(text := record.value, str):
            yield record
            continue
        starts = [match.start() for match in re.finditer(r"(?m)^[ \t]*Question[ \t]*:", text)]
        for at, end in zip(starts, [*starts[1:], len(text)], strict=False):
            line = 1 + text.count("\n", 0, at)
            yield Record(f"{file}:{line}", {"header": text[: starts[0]], "text": text[at:end]})
        if not starts:
            yield Record(record.where, raw=text[:2000], problem="no line starts with 'Question:'")


def react_tools(header: str, used: list[tuple[str, Any]]) -> Tools:
    """What the header explains; else the names it lists or the log uses, with the log's inputs."""
    found = {}
    for name, parameter, text in re.findall(r"(?m)^\(\d+\) (\w+)\[(\w+)\]: *(.*)$", header):
        fields = {"properties": {parameter: {"type": "string"}}, "required": [parameter]}
        found[name] = ToolSpec(name, text.strip(), {"type": "object"} | fields)
    lists = re.findall(r"one of \[([^\]]+)\]", header)
    names = [name.strip() for names in lists for name in names.split(",")]
    for name in names or ([] if found else [n for n, _ in used if n != "Finish"]):
        line = re.search(rf"^{re.escape(name)}(?:\(.*?\))?: *(.+)$", header, re.M)
        given = [value for n, value in used if n == name]
        keys = dict.fromkeys(k for v in given for k in (v if isinstance(v, dict) else ["input"]))
        fields = {"type": "object", "properties": {key: {} for key in keys or ["input"]}}
        found.setdefault(name, ToolSpec(name, line[1] if line else "", fields))
    return found


def react_actions(steps: list[tuple[str, str]]) -> Iterator[tuple[str, Any]]:
    """The name and the input of every action: `Name[input]`, or the input on the next line."""
    for (label, text), (follows, given) in zip(steps, [*steps[1:], ("", "")], strict=False):
        if label != "Action":
            continue
        if follows != "Action Input" and (match := re.match(r"(?s)([\w.-]+)\[(.*)\]\.?$", text)):
            yield match[1], match[2]
            continue
        plain = follows == "Action Input" and re.fullmatch(r"[\w .-]+", text)
        require(plain, f"an action that cannot be read: {text[:60]!r}")
        try:
            value = common.literal(given)
        except ValueError:
            value = given
        yield text, value if isinstance(value, dict) else given


def is_react(row: Json) -> bool:
    text = row.get("text") or row["prompt"]
    return "Question:" in text and re.search(r"^Action *\d*:", text, re.M) is not None


@Importer(is_react, split=react_logs)
def react(row: Json) -> Dialog:
    """`Finish[…]` is the answer. A log with an action that cannot be read is kept apart whole."""
    header, mark, log = (row.get("text") or row["prompt"]).rpartition("(END OF EXAMPLES)")
    header = header if mark else row.get("header", "")
    log = log[log.rindex("Question:") :] if "Question:" in log else log
    _, *parts = STEP.split(log)
    steps = [(k, text.strip()) for k, text in zip(parts[::2], parts[1::2], strict=True)]
    taken = list(react_actions(steps))
    tools, messages, name = react_tools(header, taken), [], ""
    for label, body in steps:
        if label == "Question":
            messages.append(Message("user", body))
        elif label in ("Thought", "Final Answer"):
            messages.append(Message("assistant", body))
        elif label == "Observation" and name != "Finish":
            messages.append(Message("tool", body, name=name))
        elif label == "Action":
            name, value = taken.pop(0)
            if name == "Finish":
                answer = next(map(str, value.values()), "") if isinstance(value, dict) else value
                messages.append(Message("assistant", answer))
                continue
            known = [*tools[name].parameters["properties"]] if name in tools else ["input"]
            arguments = value if isinstance(value, dict) else {known[0]: value}
            messages.append(Message("assistant", "", (ToolCall(name, arguments),)))
    tools.pop("Finish", None)
    metadata = common.rest(row, "text", "prompt", "header")
    return Dialog(common.joined(messages), tuple(tools.values()), metadata=metadata)
