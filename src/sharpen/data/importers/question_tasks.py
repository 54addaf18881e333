"""Imports questions whose answer can be checked: mathematics, code, SQL, facts, retrieval, timing.

Timing tasks ask when to act, to ask back, or to decline.
"""

from __future__ import annotations

import json

from sharpen.data.check import ParsedRow
from sharpen.data.importers.chat import messages_from
from sharpen.data.importers.common import Importer, has, other_fields, pick_fields, require, task
from sharpen.data.importers.tools import tools_from
from sharpen.types import Json, Preference, Task

_WHEN2CALL_DECISIONS = {
    "direct": "answer",
    "tool_call": "call",
    "request_for_info": "ask",
    "cannot_answer": "decline",
}


# Mathematics -------------------------------------------------------------------------------------


@Importer(lambda row: set(row) == {"question", "answer"} and "####" in row["answer"])
def gsm8k(row: Json) -> Task:
    """GSM8K rows: the number after `####` is the answer."""
    solution, mark, answer = row["answer"].rpartition("####")
    require(mark and answer.strip(), "answer: no '#### result'")
    gold = {"answer": answer.strip().replace(",", "")}
    return task("math", row["question"], gold, solution=solution.strip())


@Importer(has("question options rationale"))
def aqua(row: Json) -> Task:
    """AQuA-RAT rows: multiple choice, the answer is a letter."""
    letters = [option[:1] for option in row["options"]]
    correct = row["correct"]
    require(correct in letters, f"correct: {correct!r} is none of the options")
    request = "\n".join((row["question"], *row["options"]))
    return task("choice", request, {"answer": correct}, solution=row["rationale"])


@Importer(has("Body Question Equation"))
def svamp(row: Json) -> Task:
    """SVAMP rows: a story and a question, the answer is a number."""
    value = float(row["Answer"])
    answer = str(int(value)) if value.is_integer() else str(value)
    request = f"{row['Body'].rstrip()} {row['Question']}"
    return task(
        "math",
        request,
        {"answer": answer},
        id=row["ID"],
        equation=row["Equation"],
        type=row.get("Type", ""),
    )


# Code and SQL ------------------------------------------------------------------------------------


@Importer(has("task_id code test_list"))
def mbpp(row: Json) -> Task:
    """MBPP rows, full or sanitized: a text and a list of assertions."""
    require(row["test_list"], "test_list: empty")
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or [])
    return task(
        "code",
        row.get("text") or row["prompt"],
        {"tests": row["test_list"], "setup": setup},
        id=f"mbpp-{row['task_id']}",
        code=row["code"],
        challenge_tests=row.get("challenge_test_list", []),
    )


@Importer(has("task_id entry_point test"))
def humaneval(row: Json) -> Task:
    """HumanEval rows: a function to complete and a `check` that tests it."""
    test = f"{row['test']}\ncheck({row['entry_point']})"
    gold = {"tests": [test], "setup": row["prompt"], "entry_point": row["entry_point"]}
    return task("code", row["prompt"], gold, id=row["task_id"], code=row["canonical_solution"])


@Importer(has("db query gold"))
def intercode_sql(row: Json) -> Task:
    """InterCode-SQL rows (Spider): a question, its database and the gold query."""
    gold = {"sql": row["gold"], "database": row["db"]}
    tables = row.get("db_tables")
    return task("sql", row["query"], gold, difficulty=row["hardness"], tables=tables)


@Importer(has("description label table"))
def dbbench(row: Json) -> Task:
    """AgentBench DBBench rows. Gold is the answer: the reference queries are unreliable."""
    parts = (row["description"], row.get("add_description"))
    request = "\n".join(part for part in parts if part)
    gold = {"answers": row["label"]}
    if row.get("answer_md5"):
        gold["table_md5"] = row["answer_md5"]
    return task("set", request, gold, type=row["type"], table=row["table"], sql=row.get("sql"))


# Facts and retrieval from long texts -------------------------------------------------------------


@Importer(has("_id question supporting_facts"))
def hotpotqa(row: Json) -> Task:
    """HotpotQA rows, with their documents as metadata where the file has them."""
    documents = []
    for title, lines in row.get("context") or []:
        documents.append({"title": title, "text": "".join(lines)})
    return task(
        "qa",
        row["question"],
        {"answers": [row["answer"]], "support": row["supporting_facts"]},
        difficulty=row.get("level", ""),
        documents=documents,
        type=row.get("type", ""),
        id=row["_id"],
    )


@Importer(lambda row: set(row) - {"branch"} == {"id", "question", "answer"})
def llmcompiler(row: Json) -> Task:
    """LLMCompiler rows (ParallelQA, movie recommendation): a question and its answer."""
    gold = {"answers": [str(row["answer"])]}
    metadata = pick_fields(row, "branch")
    return task("qa", row["question"].strip(), gold, id=row["id"], **metadata)


@Importer(has("prompt expected_number"))
def longeval(row: Json) -> Task:
    """LongEval line retrieval: one number among many lines."""
    gold = {"answer": str(row["expected_number"])}
    metadata = pick_fields(row, "num_lines", "token_size", "random_idx")
    return task("math", row["prompt"], gold, **metadata)


@Importer(has("ordered_kv_records key"))
def kv_retrieval(row: Json) -> Task:
    """Key-value retrieval of Lost in the Middle: one value of a long JSON object."""
    records = row["ordered_kv_records"]
    gold_record = [row["key"], row["value"]]
    require(gold_record in records, "the key is not among the records")
    data = json.dumps(dict(records), ensure_ascii=False, indent=0)
    request = f"{data}\n\nWhich value does this JSON object hold for the key {row['key']!r}?"
    return task(
        "retrieval",
        request,
        {"answers": [row["value"]]},
        keys=len(records),
        position=records.index(gold_record),
    )


# When to act -------------------------------------------------------------------------------------


@Importer(has("task vague missing_details"))
def in3(row: Json) -> Task:
    """IN3 rows: a vague task calls for a question, a clear one for action."""
    vague = row["vague"]
    require(isinstance(vague, bool), f"vague: expected true or false, found {vague!r}")
    gold = {"decision": "ask" if vague else "act", "missing": row["missing_details"]}
    return task("decision", row["task"], gold, category=row["category"], thought=row["thought"])


@Importer(has("correct_answer answers tools|chosen_response"))
def when2call(row: Json) -> ParsedRow:
    """When2Call rows: test rows become timing tasks, preference rows pairs."""
    tools = tools_from(row["tools"])
    if "chosen_response" in row:
        prompt = messages_from(row["messages"])
        chosen = messages_from(row["chosen_response"])
        rejected = messages_from(row["rejected_response"])
        return Preference(prompt, chosen, rejected, tools=tools)
    answer_kind = row["correct_answer"]
    decision = _WHEN2CALL_DECISIONS[answer_kind]
    gold = {"decision": decision, "answer": row["answers"][answer_kind]}
    metadata = other_fields(row, "question", "tools", "uuid")
    task_id = str(row.get("uuid", ""))
    return Task(task_id, row["question"], tools, gold, "decision", metadata=metadata)
