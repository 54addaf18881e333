"""The registry of task kinds: for every kind, gold is solved, nothing is not, and reward and metric
agree about it."""

from __future__ import annotations

import pytest

from sharpen.data.sources import read_tasks
from sharpen.envs.one_turn import OneTurn
from sharpen.evals.items import Suite
from sharpen.evals.own_code import own_code_digest
from sharpen.kinds import (
    KINDS,
    KindEnvironment,
    KindReward,
    TaskKind,
    gold_messages,
    kind_name,
    kind_of,
    measure_item,
)
from sharpen.rewards.metrics import Item
from sharpen.rollout import rollout
from sharpen.types import (
    Dialog,
    Message,
    RowError,
    Sampling,
    Score,
    Task,
    ToolSpec,
    Turn,
)

SHAPE = {"type": "object", "properties": {"x": {"type": "integer"}}}
TOOLS = (ToolSpec("f", "Does f.", SHAPE), ToolSpec("g", "Does g.", SHAPE))
CALL = {"name": "f", "arguments": {"x": 1}}
NODES = {"nodes": [{"id": "1", "tool": "f"}, {"id": "2", "tool": "g"}], "edges": [["1", "2"]]}
TABLE = "create table item (name text, stock int); insert into item values ('cup', 2);"
SELL = "update item set stock = stock - 1"
SQUARE = "def square(x):\n    return x * x"
# kinds without gold of their own, or whose environment a benchmark brings
UNSCORED = {"open", "propose", "tau"}
MADE = {
    "agent": Task("t", "Do f.", TOOLS, {"calls": [CALL]}),
    "calls": Task("t", "Do f.", TOOLS, {"calls": [CALL]}, "calls"),
    "no_call": Task("t", "Do h.", TOOLS, {"calls": []}, "no_call"),
    "any_call": Task("t", "Do f.", TOOLS, {"decision": "call"}, "any_call"),
    "tool_choice": Task("t", "Do g.", TOOLS, {"tools": ["g"]}, "tool_choice"),
    "decision": Task("t", "Do.", TOOLS, {"decision": "ask"}, "decision"),
    "plan_graph": Task("t", "Do f, g.", gold=NODES, kind="plan_graph"),
    "math": Task("t", "17 * 23?", gold={"answer": "391"}, kind="math"),
    "choice": Task("t", "A or B?", gold={"answer": "B"}, kind="choice"),
    "exact": Task("t", "Who?", gold={"answers": ["Ada"]}, kind="exact"),
    "qa": Task("t", "Who?", gold={"answers": ["Ada"]}, kind="qa"),
    "set": Task("t", "Which?", gold={"answers": ["cup", "pot"]}, kind="set"),
    "json": Task("t", "As JSON?", gold={"json": {"a": 1}}, kind="json"),
    "code": Task(
        "t", "Square.", gold={"tests": ["assert square(7) == 49"]}, kind="code",
        metadata={"code": SQUARE},
    ),
    "code_session": Task(
        "t", "Square.", gold={"tests": ["assert square(7) == 49"]}, kind="code_session",
        metadata={"code": SQUARE, "visible_tests": ["assert square(2) == 4"]},
    ),
    "sql": Task(
        "t", "Names?", gold={"sql": "select name from item", "schema": TABLE,
        "result": [["cup"]]}, kind="sql",
    ),
    "sql_session": Task(
        "t", "Names?", gold={"sql": "select name from item", "schema": TABLE}, kind="sql_session"
    ),
    "retrieval": Task("t", "The value?", gold={"answers": ["f00d"]}, kind="retrieval"),
}  # fmt: skip


class Script:
    """A policy that says the given messages one after the other."""

    def __init__(self, messages: list[Message]):
        self.messages = messages

    def respond(self, dialogs: list[Dialog], sampling: Sampling) -> list[Turn]:
        (dialog,) = dialogs
        spoken = sum(message.role == "assistant" for message in dialog.messages)
        return [Turn(self.messages[min(spoken, len(self.messages) - 1)])]


@pytest.fixture(scope="module")
def tasks(agent_data):
    """Some tasks of each kind that can be played here."""
    found = {name: [task] for name, task in MADE.items()}
    for part in ("selection", "timing", "planning", "end_to_end"):
        path = agent_data / "agent_benchmark" / part / "test.jsonl"
        found[part] = list(read_tasks(str(path)))
    found["tool_state"] = list(read_tasks("procedural/tools:train?count=3"))
    return found


def play(task: Task, messages: list[Message], reward: KindReward) -> Item:
    (trajectory,) = rollout(Script(messages), [task], KindEnvironment, Sampling())
    return Item(task, trajectory, reward.score(task, trajectory))


@pytest.mark.parametrize(
    "kind", [*MADE, "selection", "timing", "planning", "end_to_end", "tool_state"]
)
def test_gold_is_solved_and_nothing_is_not(kind, tasks):
    """Reward and metric are one judgement, whatever partial credit there is."""
    with KindReward() as reward:
        for task in tasks[kind]:
            assert kind_name(task) == kind
            gold = play(task, gold_messages(task), reward)
            empty = play(task, [Message("assistant")], reward)
            assert gold.score.is_solved and gold.score.solved is True, task.id
            assert empty.score.solved is False, task.id
            assert gold.score.value > empty.score.value
            for item in (gold, empty):
                measured = measure_item(item)
                assert measured["accuracy"] == float(item.score.is_solved)
                for name in ("timing_precision", "plan_success_rate", "end_to_end_success"):
                    if kind_of(task).metrics[0] == name:
                        assert measured[name] == float(item.score.is_solved)


def test_every_kind_is_tested_or_has_no_gold():
    tested = {*MADE, "selection", "timing", "planning", "end_to_end", "tool_state"}
    others = {"own_tools", "database_state"}  # tests/test_envs.py
    assert tested | UNSCORED | others == set(KINDS)


def test_unknown_kinds_name_the_nearest():
    with pytest.raises(RowError, match="t: kind 'mathe' is unknown; did you mean 'math'"):
        kind_of(Task("t", "", kind="mathe"))
    with pytest.raises(RowError, match="kind 'mcp' cannot be played: its servers are not here"):
        kind_of(Task("t", "", kind="mcp"))
    with pytest.raises(RowError, match="kind 'open' has no reward of its own; name one"):
        KindReward().score(Task("t", "", kind="open"), None)


OLD = [
    (Task("t", "", kind="planning", gold=NODES), "plan_graph"),
    (Task("t", "", kind="selection", gold={"tools": ["f"]}), "tool_choice"),
    (Task("t", "", kind="timing", gold={"decision": "act", "missing": []}), "decision"),
    (Task("t", "", kind="calls", gold={"calls": []}), "no_call"),
    (Task("t", "", kind="call", gold={"calls": [CALL]}), "calls"),
    (Task("t", "", kind="sql", gold={"answers": ["3"]}), "set"),
    (Task("t", "", kind="tool_state", gold={"schema": TABLE, "sql": SELL}), "database_state"),
    (Task("t", "", metadata={"python_tools": ["tools.py:f"]}), "own_tools"),
]


@pytest.mark.parametrize(("task", "name"), OLD)
def test_rows_of_before_keep_their_meaning(task, name):
    assert kind_of(task) is KINDS[name]


OWN = """
from sharpen.kinds import TaskKind
from sharpen.types import Message, Score


class Spelling:
    def score(self, task, trajectory):
        right = trajectory.turns[-1].message.content == task.gold["word"]
        return Score(float(right), solved=right)


def gold(task):
    return [Message("assistant", task.gold["word"])]


spelling = TaskKind("spelling", "one word", Spelling, gold_messages=gold, max_tokens=8)
"""


def test_a_users_own_kind(tmp_path):
    (tmp_path / "my_kinds.py").write_text(OWN)
    task = Task("t", "Spell it.", gold={"word": "cat"}, kind=f"{tmp_path}/my_kinds.py:spelling")
    kind = kind_of(task)
    assert isinstance(kind, TaskKind) and kind.make_environment is OneTurn
    with KindReward() as reward:
        assert play(task, gold_messages(task), reward).score.solved
        assert not play(task, [Message("assistant", "dog")], reward).score.solved


def test_an_edited_kind_is_scored_again(tmp_path):
    """The cache and stopped evaluations depend on the user's own files too."""
    file = tmp_path / "my_kinds.py"
    file.write_text(OWN)
    task = Task("t", "Spell it.", gold={"word": "cat"}, kind=f"{file}:spelling")
    before = own_code_digest([Suite("own", [task])])
    file.write_text(OWN.replace("one word", "a word"))
    assert before and own_code_digest([Suite("own", [task])]) != before
    assert own_code_digest([Suite("made", [MADE["math"]])]) == ""


def test_a_reward_that_does_not_say_counts_from_a_half_up():
    assert Score(0.5).is_solved and not Score(0.4).is_solved
    assert not Score(1.0, solved=False).is_solved
