"""Programming: MBPP and HumanEval. Gold holds the tests; the reference solution is metadata."""

from __future__ import annotations

from sharpen.data.importers import Importer, Rows, has
from sharpen.types import Json, RowError, Task


def convert_mbpp(row: Json, where: str, side: None) -> Rows:
    tests = row["test_list"]
    if not tests:
        raise RowError(where, "test_list: empty")
    request = row.get("text") or row["prompt"]
    imports = row.get("test_setup_code") or "\n".join(row.get("test_imports") or [])
    gold = {"tests": tests, "setup": imports}
    metadata = {"code": row["code"], "challenge_tests": row.get("challenge_test_list", [])}
    yield Task(f"mbpp-{row['task_id']}", request, (), gold, "code", metadata=metadata)


def convert_humaneval(row: Json, where: str, side: None) -> Rows:
    check = f"{row['test']}\ncheck({row['entry_point']})"
    gold = {"tests": [check], "setup": row["prompt"], "entry_point": row["entry_point"]}
    metadata = {"code": row["canonical_solution"]}
    yield Task(row["task_id"], row["prompt"], (), gold, "code", metadata=metadata)


IMPORTERS = (
    Importer("mbpp", has("task_id", "code", "test_list"), convert_mbpp),
    Importer("humaneval", has("task_id", "entry_point", "test"), convert_humaneval),
)
