"""Every benchmark that is known by name: gold scores 1.0 and an empty answer 0, on the published
rows where they are here, else on fixtures; what cannot be scored is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent_items import EMPTY, Says
from sharpen.evals.benchmarks import BENCHMARKS, load_benchmark, unique
from sharpen.evals.evaluator import AgentTrainingEvaluator
from sharpen.types import Message, SharpenError, Task, ToolCall

FIXTURES = Path(__file__).parent / "fixtures"
# benchmark → where its rows are (below the shared data, unless a fixture), and how many are taken
PUBLISHED = [
    ("bfcl", "bfcl/unused_datasets/question", 40),
    ("seal_tools", "sealtools/dev.jsonl", 30),
    pytest.param("metatool", "metatool/query_tool.jsonl", 10, marks=pytest.mark.slow),
    ("api_bank", "apibank", 20),
    ("nestful", "nestful/non-executable/non-executable-glaive-data.json", 30),
    ("worfbench", "worfbench", 20),
    ("ultratool", "planbench_gnn4taskplan/ultratool_train.jsonl", 20),
    ("tau", "taubench_tasks/retail_dev.json", 20),
    ("tau2", "tau2/airline/tasks_train.jsonl", 30),
    ("tau2", "tau2/telecom/tasks_train.jsonl", 30),
    ("gsm8k", "gsm8k/train.jsonl", 40),
    ("aqua", "aqua/dev.json", 40),
    ("mbpp", "mbpp/mbpp_train.jsonl", 4),
    ("longeval", "longchat_longeval/lines/testcases/200_lines.jsonl", 3),
    ("kv_retrieval", "lost_in_middle/kv_retrieval_data/kv-retrieval-75_keys.jsonl.gz", 5),
]
MADE = [
    ("when2call", FIXTURES / "when2call.jsonl"),
    ("metatool", FIXTURES / "metatool"),
    ("toolalpaca", FIXTURES / "toolalpaca.json"),
    ("svamp", FIXTURES / "svamp.json"),
    ("humaneval", FIXTURES / "humaneval.jsonl"),
    ("kv_retrieval", "30"),
    ("needle", "2000"),
]


COUNTED_FAULTS = ("hallucinated_tool_rate", "over_calling_rate")


def customer(dialog):
    """Says what it wants, and leaves when it has been answered."""
    return Message("assistant", "Please help." if len(dialog.messages) < 3 else "###STOP###")


def results(suite, model, limit=0, **options):
    judge = AgentTrainingEvaluator(suite, options={"limit": limit, "general": False, **options})
    judge.evaluate(model)
    return judge.results


def loaded(spec):
    return load_benchmark(spec, Says(customer))


def check_gold(figures) -> None:
    """Gold is right by every metric. It may break its own schema: what it does is right."""
    for metric, figure in figures.items():
        if metric != "valid_call" and figure["count"]:
            assert figure["mean"] == (0.0 if metric in COUNTED_FAULTS else 1.0), metric


def prove(spec, limit=0):
    suite = loaded(spec)
    gold = results(suite, "baseline:gold", limit)
    check_gold(gold["metrics"])
    assert gold["all"]["accuracy"]["mean"] == 1.0
    empty = results(suite, Says(EMPTY), limit)
    assert empty["all"]["accuracy"]["mean"] == 0.0
    assert {f["mean"] for f in empty["metrics"].values()} == {0.0}
    return gold


@pytest.mark.parametrize(("name", "place", "limit"), PUBLISHED)
def test_gold_is_right_and_nothing_is_wrong(name, place, limit, shared_data):
    prove(f"{name}:{shared_data / place}", limit)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "place", "_"), PUBLISHED)
def test_gold_of_every_published_row(name, place, _, shared_data):
    gold = results(loaded(f"{name}:{shared_data / place}"), "baseline:gold")["metrics"]
    check_gold(gold)


@pytest.mark.slow
def test_sql_of_all_databases(shared_data):
    spec = f"intercode_sql:{shared_data / 'intercode_sql/spider_dev_visible.jsonl'}"
    gold = prove(spec, 60)
    assert sum(gold["left_out"].values()) < 8  # of 802 that SQLite does not run


@pytest.mark.parametrize(("name", "place"), MADE)
def test_made_rows(name, place):
    prove(f"{name}:{place}")


def test_every_entry_is_proven():
    published = [getattr(row, "values", row) for row in PUBLISHED]
    here = {name for name, *_ in (*published, *MADE)} | {"intercode_sql"}
    assert here == set(BENCHMARKS)


JAVA = {
    "n": ("integer", 5), "big": ("long", 7), "part": ("float", 1.5), "on": ("boolean", True),
    "label": ("String", "Front Page"), "names": ("ArrayList", ["ann", "bob"], "String"),
    "cells": ("Array", [1, 2, 3], "integer"), "options": ("HashMap", {"depth": [3]}),
}  # fmt: skip
SCRIPT = {
    "n": ("integer", 5), "big": ("Bigint", 7), "part": ("float", 1.5), "on": ("Boolean", False),
    "label": ("String", "Front Page"), "xs": ("array", [1, 2], "integer"),
    "names": ("array", ["ann", "bob"], "String"), "options": ("dict", {"depth": [3]}),
}  # fmt: skip


def bfcl_rows(folder: Path) -> str:
    def row(name, fields, question="Go."):
        shape = {
            n: {"type": k[0]} | ({"items": {"type": k[2]}} if k[2:] else {}) for n, k in fields
        }
        parameters = {"type": "dict", "properties": shape, "required": [n for n, _ in fields]}
        function = {"name": "app.go", "description": "Goes.", "parameters": parameters}
        asked = [[{"role": "user", "content": question}]]
        return {"id": name, "question": asked, "function": [function]}

    rows = [row("simple_java_0", JAVA.items()), row("simple_javascript_0", SCRIPT.items())]
    rows += [row("irrelevance_0", []), row("live_relevance_0", []), row("parallel_0", [])]
    rows[4]["function"][0]["parameters"]["properties"] = {"x": {"type": "integer"}}
    answers = [("simple_java_0", [{"app.go": {n: [k[1]] for n, k in JAVA.items()}}])]
    answers += [("simple_javascript_0", [{"app.go": {n: [k[1]] for n, k in SCRIPT.items()}}])]
    answers += [("parallel_0", [{"app.go": {"x": [1]}}, {"app.go": {"x": [2, 3]}}])]
    (folder / "possible_answer").mkdir()
    file = folder / "BFCL_v4_made.json"
    file.write_text("\n".join(map(json.dumps, rows)))
    truth = [json.dumps({"id": name, "ground_truth": answer}) for name, answer in answers]
    (folder / "possible_answer" / file.name).write_text("\n".join(truth))
    return f"bfcl:{file}"


def test_bfcl_languages_and_relevance(tmp_path):
    spec = loaded(bfcl_rows(tmp_path))
    gold = results(spec, "baseline:gold")
    assert gold["all"]["accuracy"] == gold["all"]["accuracy"] | {"mean": 1.0, "count": 5}
    empty = results(spec, Says(EMPTY))["categories"]
    right = {name: figures["accuracy"]["mean"] for name, figures in empty.items()}
    # BFCL counts silence as right where no function fits; here an empty answer is never right
    assert right == dict.fromkeys(right, 0.0) and len(right) == 5
    any_call = Says(Message("assistant", tool_calls=(ToolCall("app.go", {"n": "5"}),)))
    called = results(spec, any_call)["categories"]
    right = {name: figures["accuracy"]["mean"] for name, figures in called.items()}
    assert right == dict.fromkeys(right, 0.0) | {"live_relevance": 1.0}
    assert called["simple_java"]["argument_accuracy"]["mean"] == pytest.approx(1 / 8)


@pytest.mark.parametrize(("name", "place", "_"), PUBLISHED[:2])
def test_gold_of_perturbed_copies(name, place, _, shared_data):
    options = {"perturb": ("rename", "shuffle", "distract"), "limit": 30}
    gold = results(loaded(f"{name}:{shared_data / place}"), "baseline:gold", **options)
    assert gold["all"]["accuracy"]["mean"] == 1.0


def test_general_items():
    gold = prove("general")
    assert gold["all"]["accuracy"]["count"] == 40 and set(gold["parts"]) == {
        "math", "exact", "choice", "set", "json"
    }  # fmt: skip
    assert len(load_benchmark("general:math").tasks) == 12


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("bfc:rows.json", "benchmark 'bfc:rows.json': expected agent_benchmark:SPLIT"),
        ("bfcl", "needs its file, as in bfcl:PATH"),
        ("needle:x", "expected a size from 202 up, such as needle:4000"),
        ("gsm8k:{empty}", "nothing in it can be scored"),
        ("gsm8k:{dialogs}", "nothing in it can be scored: no field"),
        ("tau2:{tau}", "needs a policy that plays the user"),
        ("agent_benchmark:exam", "splits are train, dev, test"),
    ],
)
def test_what_cannot_be_scored_says_so(spec, problem, tmp_path):
    files = {name: tmp_path / f"{name}.jsonl" for name in ("empty", "dialogs", "tau")}
    files["empty"].write_text("")
    files["dialogs"].write_text('{"messages": []}\n')
    row = {
        "id": "1",
        "user_scenario": {"instructions": "x"},
        "evaluation_criteria": {"actions": []},
    }
    files["tau"].write_text(json.dumps(row) + "\n")
    with pytest.raises(SharpenError, match=problem):
        load_benchmark(spec.format(**files))


def test_items_have_names_of_their_own():
    assert [task.id for task in unique([Task("a", ""), Task("b", ""), Task("a", "")])] == [
        "a", "b", "a#2"
    ]  # fmt: skip


@pytest.mark.slow
def test_math_scores_equal_math_verify(shared_data):
    """Boxed answers to GSM8K, right and wrong in many forms, judged by the benchmark and by the
    library itself."""
    from math_verify import parse, verify

    suite = load_benchmark(f"gsm8k:{shared_data / 'gsm8k/train.jsonl'}")
    forms = ("{a}", "{a}.0", "{a}.5", "{b}", "-{a}", r"\frac{{{c}}}{{2}}", "{a}+0", "{d}-{a}", "x")
    tasks, verdicts, ours = suite.tasks[:40], [], []
    for form in forms:
        said, wanted = {}, {}
        for task in tasks:
            a = int(task.gold["answer"])
            filled = form.format(a=a, b=a + 1, c=2 * a, d=2 * a)
            said[task.id] = f"So it is \\boxed{{{filled}}}."
            wanted[task.id] = bool(verify(parse(f"\\boxed{{{a}}}"), parse(said[task.id])))
        speaker = Says(lambda dialog, said=said: Message("assistant", said[dialog.id]))
        judge = AgentTrainingEvaluator(suite, options={"general": False, "limit": len(tasks)})
        judge.evaluate(speaker)
        ours += [row["metrics"]["accuracy"] == 1 for row in judge.items[0]]
        verdicts += [wanted[task.id] for task in tasks]
    assert ours == verdicts and 0.3 < sum(verdicts) / len(verdicts) < 0.8
