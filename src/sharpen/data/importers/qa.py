"""Questions with a short answer: HotpotQA (with its paragraphs) and LLMCompiler's sets."""

from __future__ import annotations

from sharpen.data.importers import Importer, Rows, has
from sharpen.types import Json, Task


def convert_hotpot(row: Json, where: str, side: None) -> Rows:
    documents = [{"title": t, "text": "".join(lines)} for t, lines in row.get("context") or []]
    gold = {"answers": [row["answer"]], "support": row.get("supporting_facts", [])}
    metadata = {"documents": documents, "type": row.get("type", "")}
    level = row.get("level", "")
    yield Task(str(row["_id"]), row["question"], (), gold, "qa", level, metadata=metadata)


def convert_llmcompiler(row: Json, where: str, side: None) -> Rows:
    metadata = {"branch": row["branch"]} if "branch" in row else {}
    gold = {"answers": [str(row["answer"])]}
    yield Task(str(row["id"]), row["question"].strip(), (), gold, "qa", metadata=metadata)


def detect_llmcompiler(row: Json) -> bool:
    return set(row) in ({"id", "question", "answer"}, {"id", "question", "answer", "branch"})


IMPORTERS = (
    Importer("hotpotqa", has("_id", "question", "supporting_facts"), convert_hotpot),
    Importer("llmcompiler", detect_llmcompiler, convert_llmcompiler),
)
