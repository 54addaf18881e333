"""Which call a request needs: BFCL, Seal-Tools, NESTFUL, MetaTool, ToolBench, ToolAlpaca, Gorilla
and LiveMCPBench.

Gold calls may refer to earlier results (`API_call_0`, `$var1.field$`); such arguments stay as they
are. Catalogues and answers stand in files beside the rows. Gorilla's `api/` files and ToolAlpaca's
`public_apis.json` are catalogues without a request and are not recognised.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from sharpen.data.importers import Noun, has, importer, shapes
from sharpen.data.importers.chat import message, messages
from sharpen.data.reading import below, read_file, within
from sharpen.records import read_json
from sharpen.types import Dialog, Json, Message, RowError, SharpenError, Task, ToolSpec

ALPACA_FIELDS = re.compile(r"\s*Parameters: (\{.*?\})\s*(?:\nOutput:|$)", re.S)
GORILLA_REQUEST = re.compile(
    r"""(?:\#*\s*|\{['"]?)Instruction['"]?:\s*(.+?)(?:,\s*['"]?Output['"]?:|\n\#*\s*Output:|$)""",
    re.S,
)
MCP_TOOL = re.compile(r"^\s*\d+\.\s*(\S+)", re.M)


def bfcl_answers(path: Path) -> Json:
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


def bfcl_gold(row: Json, where: str, truth: Any) -> tuple[str, Json]:
    """An irrelevance row has no answer file: its gold is no call at all. REST rows have an example
    response instead of a call, multi-turn rows one list of calls for each turn."""
    if truth is None:
        if "irrelevance" in row["id"]:
            return "calls", {"calls": []}
        if "relevance" in row["id"]:
            return "timing", {"decision": "call"}
        raise RowError(where, f"no answer for {row['id']} in possible_answer/")
    if isinstance(truth, str):
        return "rest", {"response": shapes.literal(truth)}
    if "involved_classes" in row:
        turns = [shapes.calls_to_gold(shapes.python_call(c, where) for c in turn) for turn in truth]
        return "multi_turn", {"turns": turns}
    if all(isinstance(c, str) for c in truth):
        return "calls", {"calls": shapes.calls_to_gold(shapes.python_call(c, where) for c in truth)}
    calls = [{"name": n, "arguments": a} for call in truth for n, a in call.items()]
    return "calls", {"calls": calls, "match": "allowed"}


@importer(lambda row: row["id"] and isinstance(row["question"], list), below("^BFCL"), bfcl_answers)
def bfcl(row: Json, where: str, answers: Json) -> Task:
    turns = row["question"] if isinstance(row["question"][0], list) else [row["question"]]
    kind, gold = bfcl_gold(row, where, answers.get(row["id"]))
    *context, request = messages(turns[0])
    if request.role != "user":
        raise RowError(where, "the question does not end with the user")
    metadata = shapes.rest(row, "id", "question", "function")
    metadata |= {"turns": turns[1:]} if len(turns) > 1 else {}
    metadata |= {"category": row["id"].rsplit("_", 1)[0]}
    tools = shapes.tools_from(row.get("function"))
    return Task(row["id"], request.content, tools, gold, kind, "", tuple(context), metadata)


def seal_tools(path: Path) -> shapes.Tools:
    rows = [record.value for record in read_file(shapes.beside(path, "tool.jsonl"))]
    named = [r | {"name": r["api_name"], "description": r["api_description"]} for r in rows]
    return {tool["name"]: shapes.tool_from(tool) for tool in named}


@importer(has("query", "calling"), below("dev|test|train"), seal_tools)
def sealtools(row: Json, where: str, tools: shapes.Tools) -> Task:
    calls = [
        {"name": c["api"], "arguments": c["parameters"], "responses": c.get("responses", [])}
        for c in row["calling"]
    ]
    names = [call["name"] for call in calls]
    shapes.require(names, tools, "tool.jsonl")
    levels = {"easy": "easy", "difficult": "hard"}
    level = next((levels[word] for word in levels if word in row["id"]), "")
    listed = shapes.candidates(names, tools, row["id"])
    return Task(row["id"], row["query"], listed, {"calls": calls}, "calls", level)


def nestful_tools(path: Path) -> dict[str, list[ToolSpec]]:
    """By name; the specification file lists some names more than once."""
    found = defaultdict(list)
    name = path.name.replace("-data", "-spec")
    for record in read_file(shapes.beside(path, name, "non-executable-glaive-spec.json")):
        row = record.value
        fields = row.get("query_parameters") or row.get("parameters")
        tool = ToolSpec(row["name"], row["description"], shapes.parameters(fields))
        found[tool.name].append(tool)
    return dict(found)


def best(options: list[ToolSpec], arguments: Json) -> ToolSpec:
    """The definition with the fewest arguments it does not know."""
    return min(options, key=lambda tool: len(set(arguments) - set(tool.parameters["properties"])))


@importer(lambda row: row["input"] and row["output"][0]["name"], below("data"), nestful_tools)
def nestful(row: Json, where: str, known: dict[str, list[ToolSpec]]) -> Task:
    """The final `var_result` is the gold's `result`. About six in a hundred visible rows call a
    function that is not listed; `data check` names them."""
    calls = [call for call in row["output"] if call["name"] != "var_result"]
    result = next((c["arguments"] for c in row["output"] if c["name"] == "var_result"), None)
    tools = {name: options[0] for name, options in known.items()}
    for call in calls:
        if call["name"] in known:
            tools[call["name"]] = best(known[call["name"]], call["arguments"])
    chosen = shapes.candidates([call["name"] for call in calls], tools, row["input"])
    return Task("", row["input"], chosen, {"calls": calls, "result": result}, "calls")


def metatool_tools(path: Path) -> shapes.Tools:
    described = read_json(shapes.beside(path, "plugin_des.json"))
    return {name: ToolSpec(name, text) for name, text in described.items()}


@importer(has("Query", "Tool"), below("query|clean"), metatool_tools)
def metatool(row: Json, where: str, tools: shapes.Tools) -> Task:
    shapes.require([row["Tool"]], tools, "plugin_des.json")
    listed = shapes.candidates([row["Tool"]], tools, row["Query"])
    return Task("", row["Query"], listed, {"tools": [row["Tool"]]}, "selection")


@importer(has("answer_generation", "tree"), below(r"^\d+_.*\.json"))
def toolbench(tree: Json, where: str, side: None) -> Dialog:
    """A tree without `train_messages` (13% of the visible ones) found no path that counts."""
    found = tree["answer_generation"]
    if not found.get("train_messages"):
        raise RowError(where, "the search found no valid path")
    turns = tuple(message(m) for m in found["train_messages"][-1])
    stem = Path(where.rsplit(":", 1)[0]).stem
    metadata = {"win": tree["win"], "finish_type": found["finish_type"], "query": found["query"]}
    return Dialog(turns, shapes.tools_from(found["function"]), id=stem, metadata=metadata)


def api_name(tool: str, api: str) -> str:
    """A function's name for a tool's endpoint, as the trees write it."""
    words = (re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_") for text in (api, tool))
    return "_for_".join(words)[-64:]


def toolbench_tool(api: Json) -> ToolSpec:
    required, optional = (api.get(f"{k}_parameters") or [] for k in ("required", "optional"))
    fields = {p["name"]: p for p in (*required, *optional)}
    shape = {"type": "object"} | shapes.properties(fields, [p["name"] for p in required])
    text = (api.get("api_description") or "").strip()
    return ToolSpec(api_name(api["tool_name"], api["api_name"]), text, shape)


@importer(has("query", "query_id"))
def toolbench_queries(row: Json, where: str, side: None) -> Task:
    tools = tuple(toolbench_tool(api) for api in row.get("api_list") or [])
    right = [api_name(*pair) for pair in row.get("relevant APIs") or []]
    kind, gold = ("selection", {"tools": right}) if right else ("open", {})  # a demo query has none
    return Task(str(row["query_id"]), row["query"], tools, gold, kind)


def alpaca_cases(api: Json) -> list[Json]:
    """Runs with intermediate steps, and instructions with golden answers."""
    if "Function_Description" not in api:
        raise KeyError("Function_Description")
    golden = zip(api.get("Instructions") or [], api.get("Golden_Answers") or [], strict=False)
    return [{"api": api, "case": case} for case in (*(api.get("Instances") or []), *golden)]


def alpaca_tool(name: str, text: str) -> ToolSpec:
    match = ALPACA_FIELDS.search(text)
    fields = shapes.literal(match[1]) if match else {}
    return ToolSpec(name, text.split("\nParameters:")[0].strip(), shapes.parameters(fields))


@importer(has("api", "case"), within(alpaca_cases))
def toolalpaca(value: Json, where: str, side: None) -> Noun:
    api, case = value["api"], value["case"]
    described = api["Function_Description"].items()
    tools = tuple(alpaca_tool(name, text) for name, text in described if name != "components")
    metadata = {"api": api["Name"], "category": api.get("Category", "")}
    row_id = f"{api['Name']}-{where.rsplit('#', 1)[1]}"
    if not isinstance(case, dict):
        request, answers = case
        steps = [{"name": a["Action"], "arguments": a["Action_Input"]} for a in answers]
        gold = {"calls": shapes.calls_to_gold(map(shapes.call_from, steps))}
        return Task(row_id, request, tools, gold, "calls", metadata=metadata)
    turns = [Message("user", case["input"])]
    for (name, given, log), observation in case["intermediate_steps"]:
        thought = log.split("\nASSISTANT Action:")[0].split("\nAction:")[0].strip()
        call = shapes.call_from({"name": name, "arguments": given})
        turns += shapes.step(call, observation, thought)
    turns.append(Message("assistant", case["output"]))
    return Dialog(tuple(turns), tools, id=row_id, metadata=metadata)


@importer(has("code", "api_call", "api_data"))
def gorilla(row: Json, where: str, side: None) -> Task:
    match = GORILLA_REQUEST.search(row["code"])
    if match is None:
        raise RowError(where, "code: no instruction in it")
    gold = {"call": row["api_call"], "api": row["api_data"]["api_name"]}
    metadata = {"provider": row["provider"], "api": row["api_data"]}
    return Task("", match[1].strip().strip("'\""), (), gold, "api_call", metadata=metadata)


@importer(has("Question", "Annotator Metadata"))
def livemcp(row: Json, where: str, side: None) -> Noun:
    """Rows that also hold a run (`messages`) become dialogs with `metadata.task_success`."""
    notes = row["Annotator Metadata"]
    metadata = {"category": row["category"], "steps": notes["Steps"]}
    if "messages" in row:
        metadata |= {"task_success": row.get("task_success")}
        return Dialog(messages(row["messages"]), id=row["task_id"], metadata=metadata)
    gold = {"answers": [row["answers"]], "tools": MCP_TOOL.findall(notes["Tools"])}
    return Task(row["task_id"], row["Question"], (), gold, "mcp", metadata=metadata)
