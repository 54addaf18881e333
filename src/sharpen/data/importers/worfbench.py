"""WorFBench: a task and its workflow graph as `Node:`/`Edge:` text → planning gold.

START and END are left out of the edges: they are the nodes that nothing precedes or follows. Graphs
whose text names no edge, or an unknown node, are kept apart.
"""

from __future__ import annotations

import re

from sharpen.data.importers import Importer, Rows
from sharpen.data.importers.openai import messages
from sharpen.data.importers.shapes import literal, parameters
from sharpen.types import Json, RowError, Task, ToolSpec

NODE = re.compile(r"^(\d+)[:.] ?(.*)$", re.M)
EDGE = re.compile(r"\((START|\d+), ?(END|\d+)\)", re.I)
LISTED = re.compile(r"The api list you can use: (\[.*\])", re.S)


def graph(text: str, where: str) -> Json:
    head, _, rest = text.partition("\nEdge")
    nodes = {number: task.strip() for number, task in NODE.findall(head)}
    edges = [(a, b) for a, b in EDGE.findall(rest or text) if a.isdigit() and b.isdigit()]
    if not nodes or not EDGE.search(rest or text):
        raise RowError(where, "no graph in the answer")
    if unknown := [n for edge in edges for n in edge if n not in nodes]:
        raise RowError(where, f"an edge names node {unknown[0]}, which is not there")
    return {
        "nodes": [{"id": number, "task": task} for number, task in nodes.items()],
        "edges": [list(edge) for edge in dict.fromkeys(edges)],
    }


def convert(row: Json, where: str, side: None) -> Rows:
    *context, request, answer = messages(row["conversations"], where)
    match = LISTED.search(request.content)
    apis = literal(match[1]) if match else []
    tools = tuple(
        ToolSpec(a["name"], a.get("description", ""), parameters(a.get("parameters"))) for a in apis
    )
    gold, metadata = graph(answer.content, where), {"source": row["source"]}
    yield Task(
        row["id"],
        request.content,
        tools,
        gold,
        "planning",
        context=tuple(context),
        metadata=metadata,
    )


def detect(row: Json) -> bool:
    return "content" in row["conversations"][0] and row["target"] == "graph"


IMPORTERS = (Importer("worfbench", detect, convert),)
