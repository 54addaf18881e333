"""LiveMCPBench annotations: a task, its answer and the MCP tools that a person used. Rows that also
hold a run (`messages`) become dialogs with `metadata.task_success`."""

from __future__ import annotations

import re

from sharpen.data.importers import Importer, Rows, has
from sharpen.data.importers.openai import messages
from sharpen.types import Dialog, Json, Task

TOOL = re.compile(r"^\s*\d+\.\s*(\S+)", re.M)


def convert(row: Json, where: str, side: None) -> Rows:
    notes = row["Annotator Metadata"]
    metadata = {"category": row["category"], "steps": notes["Steps"]}
    if "messages" in row:
        metadata |= {"task_success": row.get("task_success")}
        yield Dialog(messages(row["messages"], where), id=row["task_id"], metadata=metadata)
    else:
        gold = {"answers": [row["answers"]], "tools": TOOL.findall(notes["Tools"])}
        yield Task(row["task_id"], row["Question"], (), gold, "mcp", metadata=metadata)


IMPORTERS = (Importer("livemcp", has("Question", "Annotator Metadata"), convert),)
