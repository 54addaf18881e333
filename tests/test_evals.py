"""Intervals, the call reward, and evaluation: gold scores 1.0, an empty answer 0."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharpen.cli.evaluate import show
from sharpen.data.generate.starter import starter_dialogs, starter_task
from sharpen.envs.one_turn import OneTurn
from sharpen.evals.benchmarks import tasks_suite
from sharpen.evals.evaluator import AgentTrainingEvaluator
from sharpen.evals.intervals import interval, wilson
from sharpen.evals.items import Suite
from sharpen.render import Renderer
from sharpen.rewards.calls import CallReward, ToolCallEvaluator, call_problems, equal_value
from sharpen.types import (
    Dialog,
    Message,
    Sampling,
    SharpenError,
    ToolCall,
    ToolSpec,
    Turn,
    UnparsedToolCall,
)


class Scripted:
    """Answers by rendering and parsing a given message, as a model's answer would be."""

    def __init__(self, tokenizer, answers: dict[str, Message]):
        self.renderer, self.answers = Renderer(tokenizer), answers

    def respond(self, dialogs: Sequence[Dialog], sampling: Sampling) -> list[Turn]:
        turns = []
        for dialog in dialogs:
            full = Dialog((*dialog.messages, self.answers[dialog.id]), dialog.tools)
            [datum] = list(self.renderer.render([full]))
            ids = datum.ids[datum.mask].tolist()
            turns.append(Turn(self.renderer.parse(ids), ids=tuple(ids)))
        return turns


def evaluated(policy, tasks) -> AgentTrainingEvaluator:
    evaluator = AgentTrainingEvaluator(tasks_suite("starter", tasks), options={"general": False})
    evaluator.evaluate(policy)
    return evaluator


def test_gold_is_right_and_empty_is_wrong(pico_tokenizer):
    dialogs = starter_dialogs("test", 40)
    tasks = [starter_task(d) for d in dialogs]
    gold = Scripted(pico_tokenizer, {d.id: d.messages[1] for d in dialogs})
    empty = Scripted(pico_tokenizer, {d.id: Message("assistant", "Hello.") for d in dialogs})
    assert evaluated(gold, tasks).results["all"]["exact_call"]["mean"] == 1.0
    lost = evaluated(empty, tasks)
    for name in ("valid_call", "right_tool", "exact_call"):
        assert lost.results["all"][name]["mean"] == 0.0
    assert all(row["feedback"] == "no tool call" for row in lost.items[0])


def test_a_random_choice_of_tool_is_near_chance(pico_tokenizer):
    dialogs = starter_dialogs("test", 90)
    answers = {
        d.id: Message("assistant", "", (ToolCall(d.tools[i % 3].name, {}),))
        for i, d in enumerate(dialogs)
    }
    policy = Scripted(pico_tokenizer, answers)
    figures = evaluated(policy, [starter_task(d) for d in dialogs]).results["all"]
    rate = figures["right_tool"]
    assert rate["low"] < 1 / 3 < rate["high"] and figures["valid_call"]["mean"] == 0.0


def test_an_environment_that_raises_is_named(pico_tokenizer, capsys):
    """Its items are scored as they stood, and nobody takes that for the model's doing."""

    class Shaky(OneTurn):
        def reset(self, task):
            self.task = task.id
            return super().reset(task)

        def step(self, message):
            if self.task == tasks[1].id:
                raise OSError("the service is gone")
            return super().step(message)

    dialogs = starter_dialogs("test", 3)
    tasks = [starter_task(d) for d in dialogs]
    gold = Scripted(pico_tokenizer, {d.id: d.messages[1] for d in dialogs})
    judge = AgentTrainingEvaluator(
        Suite("shaky", tasks, CallReward(), Shaky, metrics=()), options={"general": False}
    )
    judge.evaluate(gold)
    [(told, count)] = judge.results["broken"].items()
    assert told.startswith("OSError: the service is gone (test_evals.py:") and count == 1
    assert [row["error"] for row in judge.items[0]] == ["", told, ""]
    show(judge.results)
    assert "1 broken by their environment" in capsys.readouterr().out


def test_no_tasks_is_an_error(pico_tokenizer):
    with pytest.raises(SharpenError, match="no tasks"):
        evaluated(Scripted(pico_tokenizer, {}), [])


SPEC = ToolSpec(
    "f", "", {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (Message("assistant", "", (ToolCall("f", {"x": 1}),)), None),
        (Message("assistant", "text"), "no tool call"),
        (Message("assistant", "", (ToolCall("g", {}),)), "'g' is not offered"),
        (Message("assistant", "", (ToolCall("f", {}),)), "required"),
        (Message("assistant", "", (), (UnparsedToolCall("{", "not JSON"),)), "broken call"),
    ],
)
def test_call_problems(message, problem):
    found = call_problems(message, [SPEC])
    assert (not found) if problem is None else problem in found[0]


def test_calls_compare_as_multisets():
    a, b = ToolCall("f", {"x": 1}), ToolCall("f", {"x": 2})
    others = (([a, a], [a], False), ([a], [a, a], False), ([], [a], False))
    for found, wanted, same in (([a, b], [b, a], True), *others):
        assert ToolCallEvaluator().evaluate_calls(found, wanted)["overall_correct"] is same
    assert equal_value(2, 2.0) and equal_value(" Paris", "paris ") and not equal_value(True, 1)
    assert not equal_value("2", 2) and not equal_value({"a": 1}, {"a": 1, "b": None})


def test_wilson_known_values():
    low, high = wilson(0.5, 100)
    assert math.isclose(low, 0.4038, abs_tol=1e-4) and math.isclose(high, 0.5962, abs_tol=1e-4)
    assert wilson(0.0, 64)[0] == 0.0 and math.isclose(wilson(0.0, 64)[1], 0.0566, abs_tol=1e-4)


@given(st.lists(st.sampled_from([0.0, 1.0]) | st.floats(-5, 5), min_size=1, max_size=50))
def test_figures_hold_their_mean(values):
    found = interval(values)
    assert (
        found.low <= found.mean + 1e-9
        and found.mean <= found.high + 1e-9
        and found.count == len(values)
    )
