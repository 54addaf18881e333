"""Tasks: which tools a request needs and in which order, and questions whose answer can be told
right from wrong: mathematics, code, databases, facts, one thing in a long text, when to act.

Gold calls may refer to earlier results (`API_call_0`, `$var1.field$`); such arguments stay as they
are. Catalogues and answers stand in files beside the rows. Gorilla's `api/` files and ToolAlpaca's
`public_apis.json` are catalogues without a request and are not recognised."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from sharpen.data.check import Noun
from sharpen.data.importers import common
from sharpen.data.importers.chat import said
from sharpen.data.importers.common import Importer, Tools, has, require, task, tools_from
from sharpen.data.reading import read_file, within
from sharpen.rewards.graphs import read_plan
from sharpen.types import Dialog, Json, Message, Preference, SharpenError, Task, ToolSpec

ALPACA_FIELDS = re.compile(r"\s*Parameters: (\{.*?\})\s*(?:\nOutput:|$)", re.S)
GORILLA_REQUEST = re.compile(
    r"""(?s)(?:\#*\s*|\{['"]?)Instruction['"]?:\s*(.+?)(?:,\s*['"]?Output['"]?:|\n\#*\s*Output:|$)"""
)
DECISIONS = {"direct": "answer", "tool_call": "call"}
DECISIONS |= {"request_for_info": "ask", "cannot_answer": "decline"}
TASKBENCH_TOOLS = common.catalogue("tool_desc.json", "data/ultratool/tool_desc.json")


def bfcl_answers(path: Path) -> Json:
    """Every answer of the `possible_answer` folder near the questions, by id."""
    home, found = (path if path.is_dir() else path.parent).resolve(), {}
    for folder in (home / "possible_answer", home.parent / "possible_answer"):
        for file in sorted(folder.glob("*.json" if path.is_dir() else path.name)):
            for record in read_file(file):
                if record.problem:
                    raise SharpenError(f"{record.where}: {record.problem}")
                found[record.value["id"]] = record.value["ground_truth"]
    return found


def bfcl_gold(row: Json, answers: Json) -> tuple[str, Json]:
    """An irrelevance row has no answer file: its gold is no call at all. REST rows have an example
    response instead of a call, multi-turn rows one list of calls for each turn."""
    if row["id"] not in answers:
        require("relevance" in row["id"], f"no answer for {row['id']} in possible_answer/")
        none, some = ("calls", {"calls": []}), ("timing", {"decision": "call"})
        return none if "irrelevance" in row["id"] else some
    truth = answers[row["id"]]
    if isinstance(truth, str):
        return "rest", {"response": common.literal(truth)}
    if "involved_classes" in row:
        return "multi_turn", {"turns": [common.gold_calls(turn) for turn in truth]}
    if all(isinstance(call, str) for call in truth):
        return "calls", {"calls": common.gold_calls(truth)}
    calls = [{"name": n, "arguments": a} for call in truth for n, a in call.items()]
    return "calls", {"calls": calls, "match": "allowed"}


@Importer(lambda row: row["id"] and isinstance(row["question"], list), "^BFCL", bfcl_answers)
def bfcl(row: Json, answers: Json) -> Task:
    turns = row["question"] if isinstance(row["question"][0], list) else [row["question"]]
    kind, gold = bfcl_gold(row, answers)
    *context, request = said(turns[0])
    require(request.role == "user", "the question does not end with the user")
    metadata = common.rest(row, "id", "question", "function")
    metadata |= {"turns": turns[1:]} if len(turns) > 1 else {}
    metadata |= {"category": row["id"].rsplit("_", 1)[0]}
    tools = tools_from(row.get("function"))
    return Task(row["id"], request.content, tools, gold, kind, "", tuple(context), metadata)


@Importer(has("query calling"), "dev|test|train", common.catalogue("tool.jsonl"))
def sealtools(row: Json, tools: Tools) -> Task:
    made = [(c["api"], c["parameters"], c.get("responses", [])) for c in row["calling"]]
    calls = [{"name": name, "arguments": given, "responses": out} for name, given, out in made]
    right = common.listed((call["name"] for call in calls), tools, "tool.jsonl")
    levels = {"easy": "easy", "difficult": "hard"}
    level = next((levels[word] for word in levels if word in row["id"]), "")
    offered = common.candidates(right, tools, row["id"])
    return Task(row["id"], row["query"], offered, {"calls": calls}, "calls", level)


def nestful_tools(path: Path) -> dict[str, list[ToolSpec]]:
    """By name; the specification file lists some names more than once."""
    found = defaultdict(list)
    places = (path.name.replace("-data", "-spec"), "non-executable-glaive-spec.json")
    for tool in common.read_tools(path, *places):
        found[tool.name].append(tool)
    return dict(found)


def best(options: list[ToolSpec], arguments: Json) -> ToolSpec:
    """The definition with the fewest arguments it does not know."""
    return min(options, key=lambda tool: len(set(arguments) - set(tool.parameters["properties"])))


@Importer(lambda row: row["input"] and row["output"][0]["name"], "data", nestful_tools)
def nestful(row: Json, known: dict[str, list[ToolSpec]]) -> Task:
    """About six in a hundred visible rows call a function that is not listed."""
    calls = [call for call in row["output"] if call["name"] != "var_result"]
    result = next((c["arguments"] for c in row["output"] if c["name"] == "var_result"), None)
    listed = [call for call in calls if call["name"] in known]
    right = {call["name"]: best(known[call["name"]], call["arguments"]) for call in listed}
    tools = {name: options[0] for name, options in known.items()} | right
    offered = common.candidates(right.values(), tools, row["input"])
    return Task("", row["input"], offered, {"calls": calls, "result": result}, "calls")


@Importer(has("Query Tool"), "query|clean", common.catalogue("plugin_des.json"))
def metatool(row: Json, tools: Tools) -> Task:
    right = common.listed([row["Tool"]], tools, "plugin_des.json")
    offered = common.candidates(right, tools, row["Query"])
    return Task("", row["Query"], offered, {"tools": [row["Tool"]]}, "selection")


@Importer(has("answer_generation tree"), r"^\d+_.*\.json", placed=True)
def toolbench(tree: Json, where: str) -> Dialog:
    """A tree without `train_messages` (13% of the visible ones) found no path that counts."""
    found = tree["answer_generation"]
    require(found.get("train_messages"), "the search found no valid path")
    turns, tools = said(found["train_messages"][-1]), tools_from(found["function"])
    metadata = {"win": tree["win"], "finish_type": found["finish_type"], "query": found["query"]}
    return Dialog(turns, tools, id=Path(where.rsplit(":", 1)[0]).stem, metadata=metadata)


def api_name(tool: str, api: str) -> str:
    """A function's name for a tool's endpoint, as the trees write it."""
    words = (re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_") for text in (api, tool))
    return "_for_".join(words)[-64:]


def toolbench_tool(api: Json) -> ToolSpec:
    required, optional = (api.get(f"{k}_parameters") or [] for k in ("required", "optional"))
    fields = {p["name"]: p for p in (*required, *optional)}
    shape = {"type": "object"} | common.properties(fields, [p["name"] for p in required])
    text = (api.get("api_description") or "").strip()
    return ToolSpec(api_name(api["tool_name"], api["api_name"]), text, shape)


@Importer(has("query query_id"))
def toolbench_queries(row: Json) -> Task:
    tools = tuple(toolbench_tool(api) for api in row.get("api_list") or [])
    right = [api_name(*pair) for pair in row.get("relevant APIs") or []]
    kind, gold = ("selection", {"tools": right}) if right else ("open", {})  # a demo query has none
    return task(kind, row["query"], gold, tools=tools, id=row["query_id"])


def alpaca_cases(api: Json) -> list[Json]:
    """Runs with intermediate steps, and instructions with golden answers."""
    described = api["Function_Description"]
    golden = zip(api.get("Instructions") or [], api.get("Golden_Answers") or [], strict=False)
    cases = (*(api.get("Instances") or []), *golden)
    return [{"api": api, "described": described, "case": case} for case in cases]


def alpaca_tool(name: str, text: str) -> ToolSpec:
    match = ALPACA_FIELDS.search(text)
    fields = common.literal(match[1]) if match else {}
    return ToolSpec(name, text.split("\nParameters:")[0].strip(), common.parameters(fields))


@Importer(has("api case"), split=within(alpaca_cases), placed=True)
def toolalpaca(row: Json, where: str) -> Noun:
    api, case, described = row["api"], row["case"], row["described"].items()
    tools = tuple(alpaca_tool(name, text) for name, text in described if name != "components")
    metadata = {"api": api["Name"], "category": api.get("Category", "")}
    row_id = f"{api['Name']}-{where.rsplit('#', 1)[1]}"
    if not isinstance(case, dict):
        request, answers = case
        steps = [{"name": a["Action"], "arguments": a["Action_Input"]} for a in answers]
        gold = {"calls": common.gold_calls(steps)}
        return Task(row_id, request, tools, gold, "calls", metadata=metadata)
    turns = [Message("user", case["input"])]
    for (name, given, log), observation in case["intermediate_steps"]:
        thought = log.split("\nASSISTANT Action:")[0].split("\nAction:")[0].strip()
        call = common.call_from({"name": name, "arguments": given})
        turns += common.step(call, observation, thought)
    turns.append(Message("assistant", case["output"]))
    return Dialog(tuple(turns), tools, id=row_id, metadata=metadata)


@Importer(has("code api_call api_data"))
def gorilla(row: Json) -> Task:
    requests = GORILLA_REQUEST.findall(row["code"])
    require(requests, "code: no instruction in it")
    request, api = requests[0].strip().strip("'\""), row["api_data"]
    gold = {"call": row["api_call"], "api": api["api_name"]}
    return task("api_call", request, gold, provider=row["provider"], api=api)


@Importer(lambda row: {"Question", "Annotator Metadata"} <= set(row))
def livemcp(row: Json) -> Noun:
    """Rows that also hold a run (`messages`) become dialogs with `metadata.task_success`."""
    notes = row["Annotator Metadata"]
    metadata = {"category": row["category"], "steps": notes["Steps"]}
    if "messages" in row:
        metadata |= {"task_success": row.get("task_success")}
        return Dialog(said(row["messages"]), id=row["task_id"], metadata=metadata)
    tools = re.findall(r"(?m)^\s*\d+\.\s*(\S+)", notes["Tools"])
    gold = {"answers": [row["answers"]], "tools": tools}
    return Task(row["task_id"], row["Question"], (), gold, "mcp", metadata=metadata)


@Importer(lambda row: "content" in row["conversations"][0] and row["target"] == "graph")
def worfbench(row: Json) -> Task:
    *context, request, answer = said(row["conversations"])
    match = re.search(r"(?s)The api list you can use: (\[.*\])", request.content)
    tools, gold = tools_from(match and match[1]), read_plan(answer.content)
    source = {"source": row["source"]}
    return Task(row["id"], request.content, tools, gold, "planning", "", tuple(context), source)


def part(row: Json, name: str) -> Any:
    value = row.get(f"task_{name}", row.get(f"tool_{name}", []))
    return common.literal(value) if isinstance(value, str) else value


@Importer(has("task_nodes|tool_nodes"), r"jsonl?$", TASKBENCH_TOOLS)
def taskbench(row: Json, tools: Tools) -> Task:
    nodes, names = part(row, "nodes"), [node["task"] for node in part(row, "nodes")]
    right = common.listed(names, tools, "tool_desc.json")
    links = [(link["source"], link["target"]) for link in part(row, "links")]
    edges = [[str(names.index(name) + 1) for name in link] for link in links]
    if links == list(pairwise(names)):  # a chain, which may use a tool twice
        edges = [[str(i), str(i + 1)] for i in range(1, len(names))]
    steps = []
    for number, node in enumerate(nodes, 1):
        given = {"arguments": node["arguments"]} if node.get("arguments") else {}
        steps.append({"id": str(number), "tool": node["task"], **given})
    request = (row.get("user_request") or row["instruction"]).strip()
    offered = common.candidates(right, tools, str(row["id"]))
    gold = {"nodes": steps, "edges": edges}
    extra = {"steps": part(row, "steps"), "type": row.get("type", "")}
    return task("planning", request, gold, id=row["id"], tools=offered, **extra)


@Importer(lambda row: set(row) == {"question", "answer"} and "####" in row["answer"])
def gsm8k(row: Json) -> Task:
    solution, mark, answer = row["answer"].rpartition("####")
    require(mark and answer.strip(), "answer: no '#### result'")
    gold = {"answer": answer.strip().replace(",", "")}
    return task("math", row["question"], gold, solution=solution.strip())


@Importer(has("question options rationale"))
def aqua(row: Json) -> Task:
    letters, correct = [option[:1] for option in row["options"]], row["correct"]
    require(correct in letters, f"correct: {correct!r} is none of the options")
    request = "\n".join((row["question"], *row["options"]))
    return task("choice", request, {"answer": correct}, solution=row["rationale"])


@Importer(has("Body Question Equation"))
def svamp(row: Json) -> Task:
    value, extra = float(row["Answer"]), {"equation": row["Equation"], "type": row.get("Type", "")}
    gold = {"answer": str(int(value)) if value.is_integer() else str(value)}
    request = f"{row['Body'].rstrip()} {row['Question']}"
    return task("math", request, gold, id=row["ID"], **extra)


@Importer(has("task_id code test_list"))
def mbpp(row: Json) -> Task:
    require(row["test_list"], "test_list: empty")
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or [])
    gold, request = {"tests": row["test_list"], "setup": setup}, row.get("text") or row["prompt"]
    extra = {"code": row["code"], "challenge_tests": row.get("challenge_test_list", [])}
    return task("code", request, gold, id=f"mbpp-{row['task_id']}", **extra)


@Importer(has("task_id entry_point test"))
def humaneval(row: Json) -> Task:
    check = f"{row['test']}\ncheck({row['entry_point']})"
    gold = {"tests": [check], "setup": row["prompt"], "entry_point": row["entry_point"]}
    return task("code", row["prompt"], gold, id=row["task_id"], code=row["canonical_solution"])


@Importer(has("db query gold"))
def intercode_sql(row: Json) -> Task:
    gold, level = {"sql": row["gold"], "database": row["db"]}, row["hardness"]
    return task("sql", row["query"], gold, difficulty=level, tables=row.get("db_tables"))


@Importer(has("description label table"))
def dbbench(row: Json) -> Task:
    """Gold is the answer: the reference queries are unreliable."""
    request = "\n".join(t for t in (row["description"], row.get("add_description")) if t)
    gold = {"answers": row["label"]}
    gold |= {"table_md5": row["answer_md5"]} if row.get("answer_md5") else {}
    return task("sql", request, gold, type=row["type"], table=row["table"], sql=row.get("sql"))


@Importer(has("_id question supporting_facts"))
def hotpotqa(row: Json) -> Task:
    documents = [{"title": t, "text": "".join(lines)} for t, lines in row.get("context") or []]
    gold = {"answers": [row["answer"]], "support": row["supporting_facts"]}
    extra = {"documents": documents, "type": row.get("type", ""), "id": row["_id"]}
    return task("qa", row["question"], gold, difficulty=row.get("level", ""), **extra)


@Importer(lambda row: set(row) - {"branch"} == {"id", "question", "answer"})
def llmcompiler(row: Json) -> Task:
    gold, extra = {"answers": [str(row["answer"])]}, common.picked(row, "branch")
    return task("qa", row["question"].strip(), gold, id=row["id"], **extra)


@Importer(has("prompt expected_number"))
def longeval(row: Json) -> Task:
    extra = common.picked(row, "num_lines", "token_size", "random_idx")
    return task("retrieval", row["prompt"], {"answers": [str(row["expected_number"])]}, **extra)


@Importer(has("ordered_kv_records key"))
def kv_retrieval(row: Json) -> Task:
    records, sought = row["ordered_kv_records"], [row["key"], row["value"]]
    require(sought in records, "the key is not among the records")
    data = json.dumps(dict(records), ensure_ascii=False, indent=0)
    request = f"{data}\n\nWhich value does this JSON object hold for the key {row['key']!r}?"
    extra = {"keys": len(records), "position": records.index(sought)}
    return task("retrieval", request, {"answers": [row["value"]]}, **extra)


@Importer(has("task vague missing_details"))
def in3(row: Json) -> Task:
    vague = row["vague"]
    require(isinstance(vague, bool), f"vague: expected true or false, found {vague!r}")
    gold = {"decision": "ask" if vague else "act", "missing": row["missing_details"]}
    return task("timing", row["task"], gold, category=row["category"], thought=row["thought"])


@Importer(has("correct_answer answers tools|chosen_response"))
def when2call(row: Json) -> Noun:
    tools = tools_from(row["tools"])
    if "chosen_response" in row:
        pair = (said(row[key]) for key in ("chosen_response", "rejected_response"))
        return Preference(said(row["messages"]), *pair, tools=tools)
    right = row["correct_answer"]
    gold = {"decision": DECISIONS[right], "answer": row["answers"][right]}
    metadata = common.rest(row, "question", "tools", "uuid")
    return Task(str(row.get("uuid", "")), row["question"], tools, gold, "timing", metadata=metadata)
