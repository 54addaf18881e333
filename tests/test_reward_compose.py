"""Composition of rewards from one block: weights, gates, clipping, a user's own functions, and
parts that fail; and `sharpen reward try`."""

from __future__ import annotations

import json
import math
import time

import pytest

from sharpen.rewards import compose
from sharpen.rewards.agent import AgentRewardModel
from sharpen.rewards.compose import build_reward
from sharpen.types import Message, SharpenError, StopReason, Task, ToolCall, ToolSpec, Turn
from sharpen.types import Trajectory as Run

TOOL = ToolSpec("add", "", {"type": "object", "properties": {"x": {"type": "integer"}}})
TASK = Task("t1", "Add one.", (TOOL,), {"calls": [{"name": "add", "arguments": {"x": 1}}]})


def run(*calls: ToolCall, text: str = "") -> Run:
    return Run("t1", (Turn(Message("assistant", text, calls)),), StopReason.ANSWERED)


RIGHT, WRONG, EMPTY = run(ToolCall("add", {"x": 1})), run(ToolCall("add", {"x": "1"})), run()
USER = """
import time
from sharpen.types import Score

def number(task, trajectory):
    return 0.5

def score(task, trajectory):
    return Score(0.25, {"style": 0.75}, "so so")

def table(task, trajectory):
    return {"total": 1, "breakdown": {"a": 0.5}, "feedback": "fine"}

async def later(task, trajectory):
    return 0.125

class Kind:
    def __init__(self, value=1.0):
        self.value = value
    def score(self, task, trajectory):
        return self.value

def nan(task, trajectory):
    return float("nan")

def infinite(task, trajectory):
    return Score(0.0, {"a": float("inf")})

def text(task, trajectory):
    return "0.5"

def nothing(task, trajectory):
    pass

def no_total(task, trajectory):
    return {"bonus": 1}

def broken(task, trajectory):
    raise KeyError("answer")

def dies(task, trajectory):
    raise SystemExit(3)

def hangs(task, trajectory):
    time.sleep(60)

THREE = 3
"""


@pytest.fixture
def user(tmp_path):
    (tmp_path / "my.py").write_text(USER)
    return lambda name: f"{tmp_path / 'my.py'}:{name}"


def test_a_name_alone_is_that_reward():
    for trajectory in (RIGHT, WRONG, EMPTY):
        alone = AgentRewardModel().score(TASK, trajectory)
        found = build_reward("agent").score(TASK, trajectory)
        assert found.value == alone.value
        assert found.parts == {
            **{f"agent.{name}": value for name, value in alone.parts.items()},
            "agent": alone.value,
            "failed": 0,
        }


def test_a_weighted_sum_of_named_parts(user):
    block = {"parts": [{"name": "calls", "weight": 2}, {"name": user("number"), "weight": -1}]}
    found = build_reward(block).score(TASK, RIGHT)
    assert found.value == 2 * 1.0 - 0.5
    assert found.parts["calls"] == 1 and found.parts[user("number")] == 0.5
    normalised = build_reward(block | {"normalise": True}).score(TASK, RIGHT)
    assert normalised.value == pytest.approx(1.5 / 3)
    assert build_reward(block | {"clip": [0, 1]}).score(TASK, RIGHT).value == 1
    assert build_reward(block | {"clip": [0, 1]}).score(TASK, EMPTY).value == 0


def test_gates_close_on_parts_and_on_their_breakdown(user):
    gate = {"part": "agent.format_compliance", "at_least": 1, "otherwise": -0.25}
    judge = build_reward({"parts": [{"name": "agent"}], "gates": [gate]})
    assert judge.score(TASK, RIGHT).value == 1
    closed = judge.score(TASK, WRONG)
    assert closed.value == -0.25 and "gate: agent.format_compliance < 1" in closed.feedback
    only = {"parts": [{"name": user("number")}, {"name": "calls", "weight": 0}]}
    judge = build_reward(only | {"gates": [{"part": "calls"}]})
    assert judge.score(TASK, RIGHT).value == 0.5 and judge.score(TASK, WRONG).value == 0
    unmet = build_reward(only | {"gates": [{"part": "calls.no_such"}]}).score(TASK, RIGHT)
    assert unmet.value == 0, "a part that is not there does not open a gate"


def test_options_reach_the_reward(user):
    weights = {"config": {"weights": {"efficiency": 0, "tool_accuracy": 0}}}
    judge = build_reward({"parts": [{"name": "agent", "options": weights}]})
    assert judge.score(TASK, WRONG).value != build_reward("agent").score(TASK, WRONG).value
    kind = {"parts": [{"name": user("Kind"), "options": {"value": 0.75}}]}
    assert build_reward(kind).score(TASK, RIGHT).value == 0.75


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("number", 0.5, {}),
        ("score", 0.25, {"style": 0.75}),
        ("table", 1.0, {"a": 0.5}),
        ("later", 0.125, {}),
        ("Kind", 1.0, {}),
    ],
)
def test_a_users_function_may_return_what_it_likes(user, name, value, parts):
    found = build_reward(user(name)).score(TASK, RIGHT)
    assert found.value == value and found.parts["failed"] == 0
    assert all(found.parts[f"{user(name)}.{part}"] == number for part, number in parts.items())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nan", "value: expected a finite number, found nan"),
        ("infinite", "a: expected a finite number, found inf"),
        ("text", "expected a finite number, found '0.5'"),
        ("nothing", "expected a finite number, found None"),
        ("no_total", "expected a finite number, found {'bonus': 1}"),
        ("broken", "KeyError: 'answer'"),
        ("dies", "SystemExit: 3"),
        ("hangs", "TimeoutError"),
    ],
)
def test_a_part_that_fails_is_counted_said_and_never_a_crash(user, name, reason, monkeypatch):
    monkeypatch.setattr(compose, "TIMEOUT_S", 0.2)
    judge = build_reward({"parts": [{"name": "calls"}, {"name": user(name), "weight": 5}]})
    started = time.monotonic()
    found = [judge.score(TASK, RIGHT) for _ in range(2)]
    assert time.monotonic() - started < 5
    for score in found:
        assert score.value == 1 and score.parts["failed"] == 1, "the other part still counts"
        assert user(name) not in score.parts and reason in score.feedback
        assert math.isfinite(score.value)
    assert sum(judge.failures.values()) == 2 and reason in next(iter(judge.failures))


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ("agnet", "expected agent, calls, math"),
        ("no_such.py:score", "no such file"),
        ({"parts": []}, "at least 1"),
        ({"parts": [{"name": "agent", "wieght": 1}]}, "did you mean 'weight'"),
        ({"parts": [{"name": "agent"}, {"name": "agent"}]}, "given twice"),
        ({"parts": [{"name": "agent"}], "gates": [{"part": "calls"}]}, "expected one of the parts"),
        ({"parts": [{"name": "agent", "weight": float("nan")}]}, "finite"),
        ({"parts": [{"name": "agent", "options": {"speed": 1}}]}, "speed"),
        ({"parts": [{"name": "agent", "options": {"config": {"weights": {"x": 1}}}}]}, "x"),
        ({"parts": [{"name": "agent"}], "clip": [1, -1]}, "clip: expected low below high"),
        ({"parts": "agent"}, "list"),
    ],
)
def test_wrong_blocks_are_refused_in_one_line(block, said):
    with pytest.raises(SharpenError, match=said) as caught:
        build_reward(block)
    assert "\n" not in str(caught.value)


def test_what_is_no_reward_is_refused(user):
    with pytest.raises(SharpenError, match="neither a function nor a class with score"):
        build_reward(user("THREE"))


def test_verifiable_rewards_are_found_by_name():
    task = Task("m", "What is 6 times 7?", gold={"answers": ["42"]}, kind="exact")
    judge = build_reward("exact")
    right, empty = judge.score(task, run(text="The answer is 42")), judge.score(task, EMPTY)
    assert right.value == right.parts["exact.correctness"] == 1 and empty.value == 0


# sharpen reward try ------------------------------------------------------------------------------

ROW = {
    "id": "t1",
    "instruction": "Add one.",
    "tools": [{"function": {"name": "add", "parameters": TOOL.parameters}}],
    "gold": TASK.gold,
}
SAID = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
MESSAGES = [
    {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"x": 2}}}]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "Done."},
]


def rows_file(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def test_try_shows_gold_beside_nothing(sharpen, tmp_path):
    code, out, err = sharpen("reward", "try", rows_file(tmp_path, ROW), "--json")
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    assert found["mean"] == {"gold": 1.0, "empty": -1.0} and found["failures"] == {}
    assert [row["what"] for row in found["rows"]] == ["gold", "empty"]
    assert "agent.task_completion 1.00" in out and "no_call: 1" in out


def test_try_scores_responses_and_trajectories(sharpen, tmp_path):
    rows = [ROW | {"response": SAID}, ROW | {"messages": MESSAGES}, ROW | {"answer": "No."}]
    code, out, _ = sharpen("reward", "try", rows_file(tmp_path, *rows), "--json")
    values = [row["value"] for row in json.loads(out.splitlines()[-1])["rows"]]
    assert code == 0 and values[0] == 1 > values[1] > values[2] == -1
    code, out, _ = sharpen("reward", "try", rows_file(tmp_path, *rows), "--limit", "1", "--json")
    assert len(json.loads(out.splitlines()[-1])["rows"]) == 1


def test_try_takes_a_file_of_ones_own_and_a_block(sharpen, tmp_path, user):
    file = rows_file(tmp_path, ROW | {"response": SAID})
    code, out, _ = sharpen("reward", "try", file, "--reward", user("score"))
    assert code == 0 and "  0.250  response" in out and "style 0.75" in out
    code, out, _ = sharpen("reward", "try", file, "--reward", user("broken"))
    assert code == 0 and "failed 1 times" in out and "KeyError" in out
    (tmp_path / "reward.yaml").write_text("reward: {parts: [{name: calls, weight: 3}]}\n")
    code, out, _ = sharpen("reward", "try", file, "--config", str(tmp_path / "reward.yaml"))
    assert code == 0 and "  3.000  response" in out


@pytest.mark.parametrize(
    ("rows", "said"),
    [([], "no rows"), ([{"id": 1}], "instruction"), ([ROW | {"messages": [3]}], "response[0]"),
     ([ROW | {"response": {"x": 1}}], "expected text")],
)  # fmt: skip
def test_try_names_what_is_wrong(sharpen, tmp_path, rows, said):
    code, _, err = sharpen("reward", "try", rows_file(tmp_path, *rows))
    assert code == 2 and said in err and err.startswith("error: ") and err.count("\n") == 1
