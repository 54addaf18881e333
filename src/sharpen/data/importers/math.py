"""Mathematics: GSM8K, AQuA-RAT and SVAMP. Gold is `{"answer": …}`, as text."""

from __future__ import annotations

from sharpen.data.importers import Importer, Rows, has
from sharpen.types import Json, RowError, Task


def convert_gsm8k(row: Json, where: str, side: None) -> Rows:
    solution, mark, answer = row["answer"].rpartition("####")
    if not mark or not answer.strip():
        raise RowError(where, "answer: no '#### result'")
    gold, metadata = {"answer": answer.strip().replace(",", "")}, {"solution": solution.strip()}
    yield Task("", row["question"], (), gold, "math", metadata=metadata)


def convert_aqua(row: Json, where: str, side: None) -> Rows:
    if row["correct"] not in [option[:1] for option in row["options"]]:
        raise RowError(where, f"correct: {row['correct']!r} is none of the options")
    request = "\n".join((row["question"], *row["options"]))
    metadata = {"solution": row["rationale"]}
    yield Task("", request, (), {"answer": row["correct"]}, "choice", metadata=metadata)


def convert_svamp(row: Json, where: str, side: None) -> Rows:
    value = float(row["Answer"])
    answer = str(int(value)) if value.is_integer() else str(value)
    request = f"{row['Body'].rstrip()} {row['Question']}"
    metadata = {"equation": row["Equation"], "type": row.get("Type", "")}
    yield Task(str(row["ID"]), request, (), {"answer": answer}, "math", metadata=metadata)


def detect_gsm8k(row: Json) -> bool:
    return set(row) == {"question", "answer"} and "####" in row["answer"]


IMPORTERS = (
    Importer("gsm8k", detect_gsm8k, convert_gsm8k),
    Importer("aqua", has("question", "options", "rationale"), convert_aqua),
    Importer("svamp", has("Body", "Question", "Equation"), convert_svamp),
)
