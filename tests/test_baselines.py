"""Baselines on the agent benchmark: gold is right by every metric and on every part, plain and
perturbed; chance is near chance; a memory of names is worth nothing once they are changed."""

from __future__ import annotations

import pytest

from agent_items import EMPTY, Says
from sharpen.envs.perturb import PERTURBATION_KINDS, Perturbation
from sharpen.evals.evaluator import AgentTrainingEvaluator
from sharpen.kinds import gold_messages
from sharpen.rewards.metrics import AGENT_METRICS
from sharpen.spec.data import AgentTrainingUsage
from sharpen.types import Dialog, Message, SharpenError, Task, ToolCall, ToolSpec

TOGETHER = ("rename", "shuffle", "distract")
ZERO = ("hallucinated_tool_rate", "over_calling_rate")
FREE = ("tokens_per_task", "latency_per_task", "precision@3", "precision@5")


@pytest.fixture(autouse=True)
def data(agent_data, monkeypatch):
    monkeypatch.setenv("SHARPEN_DATA", str(agent_data))


def evaluate(model, split="test", **options):
    """The figures that are shown, and all results."""
    evaluator = AgentTrainingEvaluator(AgentTrainingUsage(), options=options | {"general": False})
    return evaluator.evaluate(model, split), evaluator.results


@pytest.mark.parametrize(
    "ways", [(), *((way,) for way in PERTURBATION_KINDS), TOGETHER, ("reword", *TOGETHER[1:])]
)
def test_gold_is_right_by_every_metric(ways):
    five, results = evaluate("baseline:gold", perturb=ways)
    assert set(five) == set(AGENT_METRICS) and {f["mean"] for f in five.values()} == {1.0}
    assert {"mean", "std", "count", "low", "high"} == set(five["timing_precision"])
    for figures in (results["all"], *results["parts"].values(), *results["difficulty"].values()):
        wrong = {n: f["mean"] for n, f in figures.items() if n not in (*FREE, *ZERO)}
        assert {n: mean for n, mean in wrong.items() if mean != 1.0} == {}
        assert all(figures[name]["mean"] == 0.0 for name in ZERO if name in figures)


def test_chance_is_near_chance():
    five, results = evaluate("baseline:random", "train")
    tasks = [t for t in AgentTrainingUsage().iter_samples("train") if t.kind == "selection"]
    chance = sum(1 / len(task.tools) for task in tasks) / len(tasks)
    selection = five["tool_selection_accuracy"]
    timing = five["timing_precision"]
    assert selection["low"] < chance < selection["high"] and selection["mean"] < 0.3
    assert timing["low"] < 0.25 < timing["high"]
    assert five["end_to_end_success"]["mean"] < 0.2 and five["plan_success_rate"]["mean"] < 0.1
    assert results["all"]["hallucinated_tool_rate"]["mean"] == 0.0


def test_words_beat_chance_and_silence_scores_nothing():
    rates = {}
    for kind in ("keyword", "random"):
        evaluator = AgentTrainingEvaluator(
            "agent_benchmark/selection:train", options={"general": False}
        )
        rates[kind] = evaluator.evaluate(f"baseline:{kind}")["tool_selection_accuracy"]
    assert rates["keyword"]["mean"] > rates["random"]["high"]
    silent, results = evaluate(Says(EMPTY))
    assert {figure["mean"] for figure in silent.values()} == {0.0}
    assert results["all"]["accuracy"]["mean"] == 0.0 and results["all"]["reward"]["mean"] < 0


def test_remembered_names_are_worth_nothing():
    tasks = {task.id: task for task in AgentTrainingUsage().iter_samples("test")}

    def remembers(dialog: Dialog):
        script = gold_messages(tasks[dialog.id])
        said = sum(m.role == "assistant" for m in dialog.messages[len(tasks[dialog.id].context) :])
        return script[min(said, len(script) - 1)]

    assert evaluate(Says(remembers))[0]["tool_selection_accuracy"]["mean"] == 1.0
    for way in ("rename", "reword"):
        renamed, results = evaluate(Says(remembers), perturb=(way,))
        assert renamed["tool_selection_accuracy"]["mean"] == 0
        assert renamed["plan_success_rate"]["mean"] == 0
        assert results["all"]["hallucinated_tool_rate"]["mean"] == 1.0


def test_errors_speak_of_the_names_that_were_shown():
    fields = {"day": {"description": "Day of the visit"}, "mat": {}}
    shape = {"properties": fields, "required": ["day"], "additionalProperties": False}
    tool = ToolSpec("book_in", "Books a visit for somebody.", shape)
    task = Task("a", "Book me in.", (tool,))
    perturbation = Perturbation([task], ["reword"])
    [shown] = perturbation.dialog(Dialog(task.messages, task.tools, "a")).tools
    assert set(shown.name.split("_")) <= {"books", "visit", "somebody"}
    assert [*shown.parameters["properties"]] == ["day_visit", "mat_2"]  # its own name stays unknown
    assert shown.parameters["required"] == ["day_visit"]
    said = Message("assistant", "", (ToolCall(shown.name, {"mat": 1, "day_visit": "x"}),))
    [call] = perturbation.restore_message("a", said).tool_calls
    assert (call.name, call.arguments) == ("book_in", {"unknown.mat": 1, "day": "x"})
    said = Message("assistant", f"By {shown.name}. I would book.")
    original = perturbation.restore_message("a", said)
    assert original.content == "By book_in. I would book."
    assert perturbation.show_message("a", original).content == said.content
    error = '{"error":"invalid","message":"day: \\"today\\" is no date; no unknown.mat"}'
    answer = Message("tool", error, name="book_in")
    shown_answer = perturbation.show_message("a", answer)
    dialog = Dialog((answer,), task.tools, "a")
    assert perturbation.dialog(dialog).messages == (
        shown_answer,
    )  # in an evaluation as in training
    for text in ("day_visit: ", "no mat", "today"):
        assert text in shown_answer.content
    fine = Message("tool", '{"day": "2026-01-01"}', name="book_in")
    assert perturbation.show_message("a", fine).content == fine.content


def test_records_have_other_keys_and_the_same_change_undoes_it():
    text = "LN-7707, LO-123 or QX 456, 456/QX, BE71 0961; 99 EUR on 2027-05-23"
    said = Message("assistant", text, (ToolCall("pay", {"to": ["LN-7707"], "by": {"x": 3}}),))
    shapes = set()
    for number in range(60):
        perturbation = Perturbation([Task(str(number), text, (ToolSpec("pay"),))], ["rekey"])
        seen = perturbation.dialog(Dialog((said,), (ToolSpec("pay"),), str(number)))
        assert [tool.name for tool in seen.tools] == ["pay"]
        [shown] = seen.messages
        first, other = shown.content.split(", ")[:2]
        assert "7707" in first and "LN" not in first and "LO" not in other
        assert shown.content.endswith(", BE71 0961; 99 EUR on 2027-05-23")
        assert shown.tool_calls[0].arguments == {"to": [first], "by": {"x": 3}}
        assert perturbation.restore_message(str(number), shown) == said
        shapes.add("".join("A" if c.isalpha() else c for c in first))
    assert shapes == {"AA-7707", "AA7707", "AA 7707", "AA/7707", "7707-AA", "7707/AA"}


def test_perturbed_dialogs_hold_what_they_should():
    tasks = list(AgentTrainingUsage().iter_samples("test"))
    perturbation = Perturbation(tasks, TOGETHER, seed=1)
    for task in tasks:
        seen = perturbation.dialog(Dialog(task.messages, task.tools, task.id, task.kind))
        own = {tool.name for tool in task.tools}
        assert not own & {tool.name for tool in seen.tools}
        texts = [tool.description for tool in seen.tools]
        assert all(tool.description in texts for tool in task.tools)
        declines = task.gold.get("decision") == "decline"
        assert len(seen.tools) == len(own) + (0 if declines else 5)
        (message,) = gold_messages(task)[:1]
        assert (
            perturbation.restore_message(task.id, perturbation.show_message(task.id, message))
            == message
        )
    with pytest.raises(SharpenError, match="perturb 'renam': expected rename"):
        Perturbation(tasks, ["renam"])
    with pytest.raises(SharpenError, match="perturb: rename or reword"):
        Perturbation(tasks, ["rename", "reword"])
    with pytest.raises(SharpenError, match="perturb 'rekey': no task names a key"):
        Perturbation([Task("a", "Book me in.", (ToolSpec("book"),))], ["rekey"])
