"""Metrics: known values, intervals, paired tests, speed, and retrieval against pytrec-eval."""

from __future__ import annotations

import json
import random
import subprocess
import time
from pathlib import Path

import pytest

from sharpen.evals.intervals import bootstrapped, paired
from sharpen.evals.summary import summarize
from sharpen.kinds import measure_item
from sharpen.rewards import metrics
from sharpen.rewards.metrics import Item, find_metrics
from sharpen.types import (
    Message,
    Score,
    SharpenError,
    StopReason,
    Task,
    ToolCall,
    ToolSpec,
    Trajectory,
    Turn,
    UnparsedToolCall,
)

ORACLE = Path(__file__).parents[1] / ".venv-oracle" / "bin" / "python"
SHAPE = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "string"}}}
TOOLS = tuple(ToolSpec(name, "", SHAPE) for name in "fgh")


def calls(*made):
    return [{"name": name, "arguments": given} for name, given in made]


def item(gold, *answers, kind="calls", parts=None):
    turns = tuple(Turn(answer, ids=(1, 2)) for answer in answers)
    made = Trajectory("t", turns, StopReason.ANSWERED, metadata={"seconds": 0.5})
    return Item(Task("t", "do it", TOOLS, gold, kind), made, Score(0.5, parts or {}))


def said(text="", *made, broken=()):
    found = tuple(ToolCall(name, given) for name, given in made)
    return Message("assistant", text, found, tuple(UnparsedToolCall(b, "no JSON") for b in broken))


ONE = {"calls": calls(("f", {"x": 1, "y": "a"}))}
TWO = {"calls": calls(("f", {"x": 1}), ("g", {"x": 2}))}
RIGHT = said("", ("f", {"x": 1, "y": "a"}))
ASK, DECLINE = {"decision": "ask"}, {"decision": "decline"}
TABLE = [
    ("tool_selection_accuracy", item(ONE, RIGHT), 1.0),
    ("tool_selection_accuracy", item(ONE, said("", ("f", {}))), 1.0),
    ("tool_selection_accuracy", item(ONE, said("", ("f", {}), ("g", {}))), 0.0),
    ("tool_selection_accuracy", item(ONE, said("no")), 0.0),
    ("tool_selection_accuracy", item({"tools": ["g"]}, said("", ("g", {})), kind="selection"), 1.0),
    ("tool_selection_accuracy", item(ONE, RIGHT, kind="planning"), None),
    ("argument_accuracy", item(ONE, said("", ("f", {"x": 1, "y": "b"}))), 0.5),
    ("argument_accuracy", item(TWO, said("", ("f", {"x": 1}))), 0.5),
    ("argument_accuracy", item(ONE, said("", ("g", {"x": 1, "y": "a"}))), 0.0),
    ("parameter_extraction", item(ONE, said("", ("g", {"x": 1, "y": "a"}))), 1.0),
    ("parameter_extraction", item(ONE, said("", ("f", {"x": 1}))), 2 / 3),
    ("parameter_extraction", item(ONE, RIGHT, RIGHT), 1.0),
    ("parameter_extraction", item({"calls": calls(("f", {}))}, said("")), None),
    ("plan_success_rate", item({}, RIGHT, kind="planning", parts={"plan_success": 1.0}), 1.0),
    ("step_efficiency", item({}, RIGHT, kind="end_to_end", parts={"efficiency": 0.5}), 0.5),
    ("step_efficiency", item({}, RIGHT, kind="selection", parts={"efficiency": 0.5}), None),
    ("plan_dag_validity", item({}, RIGHT, kind="planning"), 1.0),
    ("plan_dag_validity", item({}, said("", ("k", {})), kind="planning"), 0.0),
    ("plan_dag_validity", item({}, said(""), kind="planning"), 0.0),
    ("timing_precision", item(ASK, said("Which one?"), kind="timing"), 1.0),
    ("timing_precision", item(ASK, said("", ("f", {})), kind="timing"), 0.0),
    ("timing_precision", item(ASK, said(""), kind="timing"), 0.0),
    ("timing_precision", item(DECLINE, said("I cannot do that."), kind="timing"), 1.0),
    ("timing_precision", item({"decision": "answer"}, said("It is 5."), kind="timing"), 1.0),
    ("timing_precision", item({"decision": "call"}, said(broken=["{"]), kind="timing"), 1.0),
    ("over_calling_rate", item(DECLINE, said("", ("f", {})), kind="timing"), 1.0),
    ("over_calling_rate", item({"calls": []}, said("no")), 0.0),
    ("over_calling_rate", item(ONE, RIGHT), None),
    ("hallucinated_tool_rate", item(ONE, said("", ("f", {}), ("k", {}))), (0.5, 2.0)),
    ("mrr", item(TWO, said("", ("h", {}), ("g", {}))), 0.5),
    ("top@1", item(TWO, said("", ("h", {}), ("g", {}))), 0.0),
    ("top@3", item(TWO, said("", ("h", {}), ("g", {}))), 1.0),
    ("recall@3", item(TWO, said("", ("h", {}), ("g", {}))), 0.5),
    ("precision@3", item(TWO, said("", ("h", {}), ("g", {}))), 1 / 3),
    ("tokens_per_task", item(ONE, RIGHT, RIGHT), 4.0),
    ("latency_per_task", item(ONE, RIGHT), 0.5),
]


@pytest.mark.parametrize(("name", "given", "wanted"), TABLE)
def test_metrics_have_known_values(name, given, wanted):
    assert measure_item(given).get(name) == pytest.approx(wanted)


def test_every_metric_bears_an_answer_of_nothing():
    for gold in (ONE, ASK, {}, {"tools": []}, {"calls": []}):
        for kind in ("calls", "timing", "planning", "end_to_end", ""):
            measure_item(item(gold, kind=kind))
            measure_item(item(gold, said(""), kind=kind))


def test_decisions_by_class():
    """Due c c a d, taken c a a -: what a confusion matrix gives."""
    told = {"c": said("", ("f", {})), "a": said("Which?"), "": said("")}
    due = {"c": {"decision": "call"}, "a": ASK, "d": {"decision": "decline"}}
    pairs = [("c", "c"), ("c", "a"), ("a", "a"), ("d", "")]
    items = [item(due[d], told[t], kind="timing") for d, t in pairs]
    found = {name: (f.mean, f.count) for name, f in summarize(rows_of(items)).items()}
    assert found["timing_precision_call"] == (1.0, 1) and found["timing_recall_call"] == (0.5, 2)
    assert found["timing_f1_call"][0] == pytest.approx(2 / 3)
    assert found["timing_precision_ask"] == (0.5, 2) and found["timing_recall_ask"] == (1.0, 1)
    assert found["timing_f1_ask"][0] == pytest.approx(2 / 3)
    assert found["timing_precision_decline"] == (0.0, 0)  # never taken: nothing is known
    assert found["timing_recall_decline"] == (0.0, 1) and found["timing_precision"][0] == 0.5


def rows_of(items):
    """Item rows as an evaluation keeps them, each of a task of its own."""
    return [
        {"id": str(n), "solved": one.score.is_solved, "metrics": measure_item(one)}
        for n, one in enumerate(items)
    ]


def test_several_samples_of_a_task_count_once():
    """Two tasks, three samples each: one solves 2 of 3, the other none."""
    rows = []
    for task, values in (("a", (1.0, 1.0, 0.0)), ("b", (0.0, 0.0, 0.0))):
        for value in values:
            rows.append({"id": task, "solved": value == 1, "metrics": {"accuracy": value}})
    figures = summarize(rows)
    assert figures["accuracy"].mean == pytest.approx(1 / 3) == figures["avg@3"].mean
    assert figures["accuracy"].count == 2
    assert figures["pass@3"].mean == 0.5
    assert figures["pass^3"].mean == 0.0


def test_names_and_aliases():
    wanted = {"tool_accuracy": "tool_selection_accuracy", "plan_success": "plan_success_rate"}
    assert find_metrics([*wanted, "efficiency"]) == wanted | {"efficiency": "step_efficiency"}
    with pytest.raises(SharpenError, match="metric 'acuracy': expected"):
        find_metrics(["acuracy"])


def test_intervals_and_paired_tests():
    found = bootstrapped([0.0, 1.0] * 50)
    assert found.mean == 0.5 and found.std == 0.5 and found.count == 100
    assert 0.38 < found.low < 0.43 and 0.57 < found.high < 0.62
    assert bootstrapped([1.0] * 64).low == pytest.approx(0.9434, abs=1e-4)  # Wilson's
    assert bootstrapped([1.0, 0.0], [3.0, 1.0]).mean == 0.75
    assert bootstrapped([0.25, 0.5, 1.0]) == bootstrapped([0.25, 0.5, 1.0])
    changed = paired([0.0] * 8 + [1.0] * 2, [1.0] * 8 + [0.0] * 2)
    assert changed.p == pytest.approx(0.109375) and changed.test == "McNemar"
    lost = paired([1.0] * 20 + [0.0] * 20, [0.0] * 10 + [1.0] * 10 + [0.0] * 20)
    assert lost.difference == -0.25 and lost.high < 0 and lost.p == pytest.approx(2 / 1024)
    values = [i / 40 for i in range(40)]
    better = paired(values, [v + 0.1 + 0.01 * (i % 3) for i, v in enumerate(values)])
    assert better.test == "bootstrap" and better.p <= 0.001 and better.low > 0.1


@pytest.mark.slow  # where nothing else runs and coverage does not count lines
def test_metric_code_is_fast():
    rows = [item(TWO, said("", ("f", {"x": 1}), ("g", {"x": 3}))) for _ in range(500)]
    rows += [item(ASK, said("Which one?"), kind="timing") for _ in range(500)]
    spans = list[float]()
    for _ in range(5):  # of the code alone: a machine that halts for a moment is not its doing
        started = time.process_time()
        summarize(rows_of(rows))
        spans.append(time.process_time() - started)
    rate = len(rows) / min(spans)
    assert rate > 2000, f"{rate:.0f} items/s"  # 12,000 on a quiet machine


TREC = """
import json, sys, pytrec_eval
qrels, run = json.load(sys.stdin)
print(json.dumps(pytrec_eval.RelevanceEvaluator(
    qrels, {"recip_rank", "P.1,3,5", "recall.1,3,5", "success.1,5"}).evaluate(run)))
"""


@pytest.mark.slow
def test_retrieval_metrics_equal_pytrec_eval():
    chance, qrels, run, rows = random.Random(0), {}, {}, {}
    for number in range(300):
        names = [f"tool{n}" for n in range(12)]
        relevant = chance.sample(names, chance.randint(1, 4))
        ranked = chance.sample(names, chance.randint(1, 8))
        query = f"q{number}"
        qrels[query] = dict.fromkeys(relevant, 1)
        run[query] = {name: float(len(ranked) - place) for place, name in enumerate(ranked)}
        rows[query] = ranked, relevant
    assert ORACLE.exists(), f"{ORACLE} is missing: run scripts/oracle.sh"
    command = [ORACLE, "-c", TREC]
    done = subprocess.run(command, input=json.dumps([qrels, run]), capture_output=True, text=True)
    assert not done.returncode, done.stderr[-2000:]
    ours = {"recip_rank": metrics.reciprocal_rank}
    ours |= {f"P_{k}": lambda *a, k=k: metrics.precision_at(*a, k) for k in (1, 3, 5)}
    ours |= {f"recall_{k}": lambda *a, k=k: metrics.recall_at(*a, k) for k in (1, 3, 5)}
    ours |= {f"success_{k}": lambda *a, k=k: metrics.top_k(*a, k) for k in (1, 5)}
    for query, wanted in json.loads(done.stdout).items():
        for name, value in wanted.items():
            assert ours[name](*rows[query]) == pytest.approx(value), (query, name)
