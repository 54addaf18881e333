"""Plans as graphs: WorFBench, TaskBench and UltraTool. Gold is `{"nodes": …, "edges": …}`."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from sharpen.data.importers import importer, shapes
from sharpen.data.importers.chat import messages
from sharpen.data.reading import below
from sharpen.records import read_json
from sharpen.types import Json, RowError, Task, ToolSpec

NODE = re.compile(r"^(\d+)[:.] ?(.*)$", re.M)
EDGE = re.compile(r"\((START|\d+), ?(END|\d+)\)", re.I)
LISTED = re.compile(r"The api list you can use: (\[.*\])", re.S)


def graph(text: str, where: str) -> Json:
    """`Node:` and `Edge:` text. START and END are left out: they are the nodes that nothing
    precedes or follows."""
    head, _, tail = text.partition("\nEdge")
    nodes = {number: task.strip() for number, task in NODE.findall(head)}
    found = EDGE.findall(tail or text)
    if not nodes or not found:
        raise RowError(where, "no graph in the answer")
    edges = [(a, b) for a, b in found if a.isdigit() and b.isdigit()]
    if unknown := [n for edge in edges for n in edge if n not in nodes]:
        raise RowError(where, f"an edge names node {unknown[0]}, which is not there")
    return {
        "nodes": [{"id": number, "task": task} for number, task in nodes.items()],
        "edges": [list(edge) for edge in dict.fromkeys(edges)],
    }


@importer(lambda row: "content" in row["conversations"][0] and row["target"] == "graph")
def worfbench(row: Json, where: str, side: None) -> Task:
    *context, request, answer = messages(row["conversations"])
    match = LISTED.search(request.content)
    tools = shapes.tools_from(shapes.literal(match[1])) if match else ()
    gold, said = graph(answer.content, where), request.content
    source = {"source": row["source"]}
    return Task(row["id"], said, tools, gold, "planning", "", tuple(context), source)


def taskbench_tools(path: Path) -> shapes.Tools:
    places = ("tool_desc.json", "data/ultratool/tool_desc.json")
    return {
        node["id"]: taskbench_tool(node)
        for node in read_json(shapes.beside(path, *places))["nodes"]
    }


def taskbench_tool(node: Json) -> ToolSpec:
    given = node.get("parameters") or []
    fields = {p["name"]: {"type": p["type"], "description": p.get("desc", "")} for p in given}
    return ToolSpec(node["id"], node["desc"], {"type": "object"} | shapes.properties(fields))


def part(row: Json, name: str) -> Any:
    """`task_…` or `tool_…`, as a list or as its JSON text."""
    value = row.get(f"task_{name}", row.get(f"tool_{name}", []))
    return shapes.literal(value) if isinstance(value, str) else value


@importer(lambda row: {"task_nodes", "tool_nodes"} & set(row), below(r"jsonl?$"), taskbench_tools)
def taskbench(row: Json, where: str, tools: shapes.Tools) -> Task:
    nodes, links = part(row, "nodes"), part(row, "links")
    names = [node["task"] for node in nodes]
    shapes.require(names, tools, "tool_desc.json")
    named = [(link["source"], link["target"]) for link in links]
    if named == list(pairwise(names)):  # a chain, which may use a tool twice
        edges = [[str(i), str(i + 1)] for i in range(1, len(names))]
    else:
        edges = [[str(names.index(name) + 1) for name in link] for link in named]
    given = [{"arguments": n["arguments"]} if n.get("arguments") else {} for n in nodes]
    steps = [{"id": str(i + 1), "tool": names[i], **given[i]} for i in range(len(nodes))]
    request = (row.get("user_request") or row["instruction"]).strip()
    listed, gold = shapes.candidates(names, tools, str(row["id"])), {"nodes": steps, "edges": edges}
    metadata = {"steps": part(row, "steps"), "type": row.get("type", "")}
    return Task(str(row["id"]), request, listed, gold, "planning", metadata=metadata)
