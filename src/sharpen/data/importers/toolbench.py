"""ToolBench: search trees of answers (dialogs), and the query files (which APIs a query needs).

A tree without `train_messages` (two of the fifteen visible ones) found no path that counts, so
there is no dialog in it; the loss is theirs, 13% of the visible trees.
"""

from __future__ import annotations

import re
from pathlib import Path

from sharpen.data.importers import Importer, Rows, has
from sharpen.data.importers.openai import message
from sharpen.data.importers.reading import below
from sharpen.data.importers.shapes import properties, tools_from, unique
from sharpen.types import Dialog, Json, RowError, Task, ToolSpec


def convert(tree: Json, where: str, side: None) -> Rows:
    found = tree["answer_generation"]
    if not found.get("train_messages"):
        raise RowError(where, "the search found no valid path")
    turns = [message(m, where) for m in found["train_messages"][-1]]
    stem = Path(where.rsplit(":", 1)[0]).stem
    metadata = {"win": tree["win"], "finish_type": found["finish_type"], "query": found["query"]}
    yield Dialog(tuple(turns), tools_from(found["function"], where), id=stem, metadata=metadata)


def api_name(tool: str, api: str) -> str:
    """A function's name for a tool's endpoint, as the trees write it."""
    words = (re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_") for text in (api, tool))
    return "_for_".join(words)[-64:]


def convert_query(row: Json, where: str, side: None) -> Rows:
    tools = []
    for api in row.get("api_list") or []:
        required, optional = (api.get(f"{k}_parameters") or [] for k in ("required", "optional"))
        fields = {p["name"]: p for p in (*required, *optional)}
        shape = properties(fields, [p["name"] for p in required])
        name = api_name(api["tool_name"], api["api_name"])
        text = (api.get("api_description") or "").strip()
        tools.append(ToolSpec(name, text, {"type": "object"} | shape))
    gold = {"tools": [api_name(*pair) for pair in row.get("relevant APIs") or []]}
    kind = "selection" if gold["tools"] else "open"  # a demo query names no right APIs
    gold = gold if gold["tools"] else {}
    yield Task(str(row["query_id"]), row["query"], unique(tools, where), gold, kind)


IMPORTERS = (
    Importer("toolbench", has("answer_generation", "tree"), convert, below(r"^\d+_.*\.json")),
    Importer("toolbench_queries", has("query", "query_id"), convert_query),
)
