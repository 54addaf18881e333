"""Imports tasks about tools: which ones a request needs, with which arguments, in which order.

Gold calls may refer to earlier results (`API_call_0`, `$var1.field$`); such arguments stay as they
are. Catalogues of tools and gold answers are in files beside the rows. Gorilla's `api/` files and
ToolAlpaca's `public_apis.json` are catalogues without a request and are not recognised.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from sharpen.data.check import ParsedRow
from sharpen.data.importers.calls import call_and_result, call_from, gold_calls
from sharpen.data.importers.chat import messages_from
from sharpen.data.importers.common import (
    Importer,
    has,
    other_fields,
    parse_literal,
    require,
    task,
)
from sharpen.data.importers.tools import (
    ToolCatalogue,
    catalogue,
    look_up,
    offer_tools,
    read_tools,
    to_parameters,
    to_properties,
    tools_from,
)
from sharpen.data.reading import read_file, within
from sharpen.rewards.graphs import read_plan
from sharpen.types import Dialog, Json, Message, SharpenError, Task, ToolSpec

_ALPACA_FIELDS = re.compile(r"\s*Parameters: (\{.*?\})\s*(?:\nOutput:|$)", re.S)
_GORILLA_REQUEST = re.compile(
    r"""(?s)(?:\#*\s*|\{['"]?)Instruction['"]?:\s*(.+?)(?:,\s*['"]?Output['"]?:|\n\#*\s*Output:|$)"""
)
_WORFBENCH_TOOLS = re.compile(r"(?s)The api list you can use: (\[.*\])")
_LIVEMCP_TOOL = re.compile(r"(?m)^\s*\d+\.\s*(\S+)")
_SEALTOOLS_LEVELS = {"easy": "easy", "difficult": "hard"}
_MAX_TOOL_NAME = 64  # characters, as ToolBench cuts names


# BFCL --------------------------------------------------------------------------------------------


def _bfcl_answers(path: Path) -> Json:
    """Return every answer in the `possible_answer` folder near the questions, by id."""
    folder = (path if path.is_dir() else path.parent).resolve()
    file_names = "*.json" if path.is_dir() else path.name
    answers = {}
    for answer_folder in (folder / "possible_answer", folder.parent / "possible_answer"):
        for file in sorted(answer_folder.glob(file_names)):
            for record in read_file(file):
                if record.problem:
                    raise SharpenError(f"{record.where}: {record.problem}")
                answers[record.value["id"]] = record.value["ground_truth"]
    return answers


def _bfcl_gold(row: Json, answers: Json) -> tuple[str, Json]:
    """Return the kind of a task and its gold.

    REST rows have an example response instead of a call, multi-turn rows one list of calls per
    turn. Relevance and irrelevance rows have no answer: gold is any call, or none.
    """
    row_id = row["id"]
    if row_id not in answers:
        require("relevance" in row_id, f"no answer for {row_id} in possible_answer/")
        if "irrelevance" in row_id:
            return "no_call", {"calls": []}
        return "any_call", {"decision": "call"}
    answer = answers[row_id]
    if isinstance(answer, str):
        return "rest", {"response": parse_literal(answer)}
    if "involved_classes" in row:
        return "multi_turn", {"turns": [gold_calls(turn) for turn in answer]}
    if all(isinstance(call, str) for call in answer):
        return "calls", {"calls": gold_calls(answer)}
    calls = []
    for allowed_call in answer:
        for name, arguments in allowed_call.items():
            calls.append({"name": name, "arguments": arguments})
    return "calls", {"calls": calls, "match": "allowed"}


@Importer(
    lambda row: row["id"] and isinstance(row["question"], list),
    names="^BFCL",
    side=_bfcl_answers,
)
def bfcl(row: Json, answers: Json) -> Task:
    """Berkeley Function Calling Leaderboard questions, with answers in `possible_answer/`."""
    turns = row["question"]
    if not isinstance(turns[0], list):
        turns = [turns]
    kind, gold = _bfcl_gold(row, answers)
    *context, request = messages_from(turns[0])
    require(request.role == "user", "the question does not end with the user")
    metadata = other_fields(row, "id", "question", "function")
    if len(turns) > 1:
        metadata["turns"] = turns[1:]
    metadata["category"] = row["id"].rsplit("_", 1)[0]
    tools = tools_from(row.get("function"))
    return Task(row["id"], request.content, tools, gold, kind, "", tuple(context), metadata)


# Calls of one or several tools -------------------------------------------------------------------


@Importer(has("query calling"), names="dev|test|train", side=catalogue("tool.jsonl"))
def sealtools(row: Json, tools: ToolCatalogue) -> Task:
    """Seal-Tools rows: `query` and `calling`, with the tools in `tool.jsonl`."""
    calls = []
    for call in row["calling"]:
        gold_call = {"name": call["api"], "arguments": call["parameters"]}
        calls.append(gold_call | {"responses": call.get("responses", [])})
    gold_tools = look_up((call["name"] for call in calls), tools, "tool.jsonl")
    difficulty = ""
    for word, level in _SEALTOOLS_LEVELS.items():
        if word in row["id"]:
            difficulty = level
            break
    offered_tools = offer_tools(gold_tools, tools, row["id"])
    return Task(row["id"], row["query"], offered_tools, {"calls": calls}, "calls", difficulty)


def _nestful_tools(path: Path) -> dict[str, list[ToolSpec]]:
    """Return the definitions by name; the specification file lists some names more than once."""
    definitions = defaultdict(list)
    own_file = path.name.replace("-data", "-spec")
    for tool in read_tools(path, own_file, "non-executable-glaive-spec.json"):
        definitions[tool.name].append(tool)
    return dict(definitions)


def _best_definition(definitions: Sequence[ToolSpec], arguments: Json) -> ToolSpec:
    """Return the definition that lacks the fewest of these arguments."""

    def count_unknown(tool: ToolSpec) -> int:
        return len(set(arguments) - set(tool.parameters["properties"]))

    return min(definitions, key=count_unknown)


@Importer(
    lambda row: row["input"] and row["output"][0]["name"],
    names="data",
    side=_nestful_tools,
)
def nestful(row: Json, definitions: dict[str, list[ToolSpec]]) -> Task:
    """NESTFUL rows: `input` and `output`, whose `var_result` entry is the final result.

    About six in a hundred public rows call a function that is not listed.
    """
    calls = []
    results = []
    for call in row["output"]:
        if call["name"] == "var_result":
            results.append(call["arguments"])
        else:
            calls.append(call)
    gold_tools = {}
    for call in calls:
        name = call["name"]
        if name in definitions:
            gold_tools[name] = _best_definition(definitions[name], call["arguments"])
    tools = {name: same_name[0] for name, same_name in definitions.items()}
    tools |= gold_tools
    offered_tools = offer_tools(gold_tools.values(), tools, row["input"])
    gold = {"calls": calls, "result": results[0] if results else None}
    return Task("", row["input"], offered_tools, gold, "calls")


@Importer(has("Query Tool"), names="query|clean", side=catalogue("plugin_des.json"))
def metatool(row: Json, tools: ToolCatalogue) -> Task:
    """MetaTool rows: `Query` and the one right `Tool`, with the tools in `plugin_des.json`."""
    gold_tools = look_up([row["Tool"]], tools, "plugin_des.json")
    offered_tools = offer_tools(gold_tools, tools, row["Query"])
    return Task("", row["Query"], offered_tools, {"tools": [row["Tool"]]}, "tool_choice")


# ToolBench and ToolAlpaca ------------------------------------------------------------------------


@Importer(has("answer_generation tree"), names=r"^\d+_.*\.json", placed=True)
def toolbench(tree: Json, where: str) -> Dialog:
    """ToolBench answer trees: the last path that was found.

    A tree without `train_messages` (13% of the public ones) found no valid path and is rejected.
    """
    answer = tree["answer_generation"]
    require(answer.get("train_messages"), "the search found no valid path")
    messages = messages_from(answer["train_messages"][-1])
    tools = tools_from(answer["function"])
    metadata = {
        "win": tree["win"],
        "finish_type": answer["finish_type"],
        "query": answer["query"],
    }
    file = Path(where.rsplit(":", 1)[0])
    return Dialog(messages, tools, id=file.stem, metadata=metadata)


def _toolbench_name(tool: str, api: str) -> str:
    """Return the name of a tool's endpoint as a function, as the answer trees write it."""
    words = [re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_") for text in (api, tool)]
    return "_for_".join(words)[-_MAX_TOOL_NAME:]


def _toolbench_tool(api: Json) -> ToolSpec:
    required = api.get("required_parameters") or []
    optional = api.get("optional_parameters") or []
    fields = {parameter["name"]: parameter for parameter in (*required, *optional)}
    required_names = [parameter["name"] for parameter in required]
    parameters = {"type": "object"} | to_properties(fields, required_names)
    description = (api.get("api_description") or "").strip()
    name = _toolbench_name(api["tool_name"], api["api_name"])
    return ToolSpec(name, description, parameters)


@Importer(has("query query_id"))
def toolbench_queries(row: Json) -> Task:
    """ToolBench instructions: `query`, the tools on offer and, but for demos, the right ones."""
    tools = tuple(_toolbench_tool(api) for api in row.get("api_list") or [])
    gold_names = [_toolbench_name(*pair) for pair in row.get("relevant APIs") or []]
    if gold_names:
        kind = "tool_choice"
        gold = {"tools": gold_names}
    else:
        kind = "open"
        gold = {}
    return task(kind, row["query"], gold, tools=tools, id=row["query_id"])


def _toolalpaca_cases(api: Json) -> Iterator[Json]:
    """Yield the runs with intermediate steps, and the instructions with golden answers."""
    descriptions = api["Function_Description"]
    instructions = api.get("Instructions") or []
    golden_answers = api.get("Golden_Answers") or []
    for run in api.get("Instances") or []:
        yield {"api": api, "described": descriptions, "case": run}
    for pair in zip(instructions, golden_answers, strict=False):
        yield {"api": api, "described": descriptions, "case": pair}


def _toolalpaca_tool(name: str, text: str) -> ToolSpec:
    match = _ALPACA_FIELDS.search(text)
    fields = parse_literal(match[1]) if match else {}
    description = text.split("\nParameters:")[0].strip()
    return ToolSpec(name, description, to_parameters(fields))


@Importer(has("api case"), split=within(_toolalpaca_cases), placed=True)
def toolalpaca(row: Json, where: str) -> ParsedRow:
    """ToolAlpaca files, an API each: its runs become dialogs, its golden answers tasks."""
    api = row["api"]
    case = row["case"]
    tools = []
    for name, text in row["described"].items():
        if name != "components":
            tools.append(_toolalpaca_tool(name, text))
    metadata = {"api": api["Name"], "category": api.get("Category", "")}
    row_id = f"{api['Name']}-{where.rsplit('#', 1)[1]}"
    if not isinstance(case, dict):
        request, answers = case
        calls = [{"name": a["Action"], "arguments": a["Action_Input"]} for a in answers]
        gold = {"calls": gold_calls(calls)}
        return Task(row_id, request, tuple(tools), gold, "calls", metadata=metadata)
    messages = [Message("user", case["input"])]
    for (name, arguments, log), observation in case["intermediate_steps"]:
        thought = log.split("\nASSISTANT Action:")[0].split("\nAction:")[0].strip()
        call = call_from({"name": name, "arguments": arguments})
        messages += call_and_result(call, observation, thought)
    messages.append(Message("assistant", case["output"]))
    return Dialog(tuple(messages), tuple(tools), id=row_id, metadata=metadata)


# Gorilla and LiveMCPBench ------------------------------------------------------------------------


@Importer(has("code api_call api_data"))
def gorilla(row: Json) -> Task:
    """Gorilla APIBench rows: the request is inside `code`, gold is the line that calls the API."""
    requests = _GORILLA_REQUEST.findall(row["code"])
    require(requests, "code: no instruction in it")
    request = requests[0].strip().strip("'\"")
    api = row["api_data"]
    gold = {"call": row["api_call"], "api": api["api_name"]}
    return task("api_call", request, gold, provider=row["provider"], api=api)


@Importer(lambda row: {"Question", "Annotator Metadata"} <= set(row))
def livemcp(row: Json) -> ParsedRow:
    """LiveMCPBench annotations. Rows with a run (`messages`) become dialogs, others tasks."""
    notes = row["Annotator Metadata"]
    metadata = {"category": row["category"], "steps": notes["Steps"]}
    if "messages" in row:
        metadata["task_success"] = row.get("task_success")
        return Dialog(messages_from(row["messages"]), id=row["task_id"], metadata=metadata)
    gold = {"answers": [row["answers"]], "tools": _LIVEMCP_TOOL.findall(notes["Tools"])}
    return Task(row["task_id"], row["Question"], (), gold, "mcp", metadata=metadata)


# Plans -------------------------------------------------------------------------------------------


@Importer(lambda row: "content" in row["conversations"][0] and row["target"] == "graph")
def worfbench(row: Json) -> Task:
    """WorFBench rows whose answer is a graph of steps, in text."""
    *context, request, answer = messages_from(row["conversations"])
    tool_list = _WORFBENCH_TOOLS.search(request.content)
    tools = tools_from(tool_list[1] if tool_list else None)
    gold = read_plan(answer.content)
    metadata = {"source": row["source"]}
    return Task(row["id"], request.content, tools, gold, "plan_graph", "", tuple(context), metadata)


def _taskbench_field(row: Json, name: str) -> Any:
    """Return `task_NAME` or `tool_NAME` of a row, which may be JSON text."""
    value = row.get(f"task_{name}", row.get(f"tool_{name}", []))
    return parse_literal(value) if isinstance(value, str) else value


def _taskbench_edges(names: list[str], links: list[tuple[str, str]]) -> list[list[str]]:
    """Return links between names as links between the numbers of the steps."""
    if links == list(pairwise(names)):  # a chain, which may use a tool twice
        return [[str(number), str(number + 1)] for number in range(1, len(names))]
    edges = []
    for source, target in links:
        edges.append([str(names.index(source) + 1), str(names.index(target) + 1)])
    return edges


@Importer(
    has("task_nodes|tool_nodes"),
    names=r"jsonl?$",
    side=catalogue("tool_desc.json", "data/ultratool/tool_desc.json"),
)
def taskbench(row: Json, tools: ToolCatalogue) -> Task:
    """TaskBench and UltraTool rows: a graph of tools, with the tools in `tool_desc.json`."""
    nodes = _taskbench_field(row, "nodes")
    names = [node["task"] for node in nodes]
    gold_tools = look_up(names, tools, "tool_desc.json")
    links = [(link["source"], link["target"]) for link in _taskbench_field(row, "links")]
    edges = _taskbench_edges(names, links)
    steps = []
    for number, node in enumerate(nodes, 1):
        step = {"id": str(number), "tool": node["task"]}
        if node.get("arguments"):
            step["arguments"] = node["arguments"]
        steps.append(step)
    request = (row.get("user_request") or row["instruction"]).strip()
    return task(
        "plan_graph",
        request,
        {"nodes": steps, "edges": edges},
        id=row["id"],
        tools=offer_tools(gold_tools, tools, str(row["id"])),
        steps=_taskbench_field(row, "steps"),
        type=row.get("type", ""),
    )
