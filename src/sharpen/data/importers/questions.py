"""Questions whose answer can be told right from wrong: mathematics (GSM8K, AQuA-RAT, SVAMP), code
(MBPP, HumanEval), databases (InterCode-SQL, DBBench), facts (HotpotQA, LLMCompiler), one thing in a
long text (LongEval, key–value retrieval), and when to act (IN3, When2Call)."""

from __future__ import annotations

import json

from sharpen.data.importers import Noun, has, importer
from sharpen.data.importers.chat import said
from sharpen.data.importers.shapes import picked, require, rest, tools_from
from sharpen.types import Json, Preference, Task

DECISIONS = {"direct": "answer", "tool_call": "call"}
DECISIONS |= {"request_for_info": "ask", "cannot_answer": "refuse"}


@importer(lambda row: set(row) == {"question", "answer"} and "####" in row["answer"])
def gsm8k(row: Json) -> Task:
    solution, mark, answer = row["answer"].rpartition("####")
    require(mark and answer.strip(), "answer: no '#### result'")
    gold, metadata = {"answer": answer.strip().replace(",", "")}, {"solution": solution.strip()}
    return Task("", row["question"], (), gold, "math", metadata=metadata)


@importer(has("question options rationale"))
def aqua(row: Json) -> Task:
    letters, correct = [option[:1] for option in row["options"]], row["correct"]
    require(correct in letters, f"correct: {correct!r} is none of the options")
    request = "\n".join((row["question"], *row["options"]))
    metadata = {"solution": row["rationale"]}
    return Task("", request, (), {"answer": correct}, "choice", metadata=metadata)


@importer(has("Body Question Equation"))
def svamp(row: Json) -> Task:
    value = float(row["Answer"])
    gold = {"answer": str(int(value)) if value.is_integer() else str(value)}
    request = f"{row['Body'].rstrip()} {row['Question']}"
    metadata = {"equation": row["Equation"], "type": row.get("Type", "")}
    return Task(str(row["ID"]), request, (), gold, "math", metadata=metadata)


@importer(has("task_id code test_list"))
def mbpp(row: Json) -> Task:
    require(row["test_list"], "test_list: empty")
    imports = row.get("test_setup_code") or "\n".join(row.get("test_imports") or [])
    gold, request = {"tests": row["test_list"], "setup": imports}, row.get("text") or row["prompt"]
    metadata = {"code": row["code"], "challenge_tests": row.get("challenge_test_list", [])}
    return Task(f"mbpp-{row['task_id']}", request, (), gold, "code", metadata=metadata)


@importer(has("task_id entry_point test"))
def humaneval(row: Json) -> Task:
    check = f"{row['test']}\ncheck({row['entry_point']})"
    gold = {"tests": [check], "setup": row["prompt"], "entry_point": row["entry_point"]}
    metadata = {"code": row["canonical_solution"]}
    return Task(row["task_id"], row["prompt"], (), gold, "code", metadata=metadata)


@importer(has("db query gold"))
def intercode_sql(row: Json) -> Task:
    gold, metadata = {"sql": row["gold"], "database": row["db"]}, {"tables": row.get("db_tables")}
    return Task("", row["query"], (), gold, "sql", row["hardness"], metadata=metadata)


@importer(has("description label table"))
def dbbench(row: Json) -> Task:
    """Gold is the answer: the reference queries are unreliable."""
    request = "\n".join(t for t in (row["description"], row.get("add_description")) if t)
    changed = {"table_md5": row["answer_md5"]} if row.get("answer_md5") else {}
    metadata = {"type": row["type"], "table": row["table"], "sql": row.get("sql")}
    return Task("", request, (), {"answers": row["label"]} | changed, "sql", metadata=metadata)


@importer(has("_id question supporting_facts"))
def hotpotqa(row: Json) -> Task:
    documents = [{"title": t, "text": "".join(lines)} for t, lines in row.get("context") or []]
    gold = {"answers": [row["answer"]], "support": row["supporting_facts"]}
    metadata = {"documents": documents, "type": row.get("type", "")}
    level = row.get("level", "")
    return Task(str(row["_id"]), row["question"], (), gold, "qa", level, metadata=metadata)


@importer(lambda row: set(row) - {"branch"} == {"id", "question", "answer"})
def llmcompiler(row: Json) -> Task:
    gold, metadata = {"answers": [str(row["answer"])]}, picked(row, "branch")
    return Task(str(row["id"]), row["question"].strip(), (), gold, "qa", metadata=metadata)


@importer(has("prompt expected_number"))
def longeval(row: Json) -> Task:
    metadata = picked(row, "num_lines", "token_size", "random_idx")
    gold = {"answers": [str(row["expected_number"])]}
    return Task("", row["prompt"], (), gold, "retrieval", metadata=metadata)


@importer(has("ordered_kv_records key"))
def kv_retrieval(row: Json) -> Task:
    records, sought = row["ordered_kv_records"], [row["key"], row["value"]]
    require(sought in records, "the key is not among the records")
    data = json.dumps(dict(records), ensure_ascii=False, indent=0)
    request = f"{data}\n\nWhich value does this JSON object hold for the key {row['key']!r}?"
    metadata = {"keys": len(records), "position": records.index(sought)}
    return Task("", request, (), {"answers": [row["value"]]}, "retrieval", metadata=metadata)


@importer(has("task vague missing_details"))
def in3(row: Json) -> Task:
    vague = row["vague"]
    require(isinstance(vague, bool), f"vague: expected true or false, found {vague!r}")
    gold = {"decision": "ask" if vague else "act", "missing": row["missing_details"]}
    metadata = {"category": row["category"], "thought": row["thought"]}
    return Task("", row["task"], (), gold, "timing", metadata=metadata)


@importer(has("correct_answer answers tools|chosen_response"))
def when2call(row: Json) -> Noun:
    tools = tools_from(row["tools"])
    if "chosen_response" in row:
        pair = (said(row[key]) for key in ("chosen_response", "rejected_response"))
        return Preference(said(row["messages"]), *pair, tools=tools)
    gold = {"decision": DECISIONS[row["correct_answer"]]}
    gold |= {"answer": row["answers"][row["correct_answer"]]}
    metadata = rest(row, "question", "tools", "uuid")
    return Task(str(row.get("uuid", "")), row["question"], tools, gold, "timing", metadata=metadata)
