"""Environments: in each, gold solves its task and an empty answer does not; limits hold."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sharpen.data.sources import read_tasks
from sharpen.envs.find import find_environment
from sharpen.envs.python import PythonTools
from sharpen.kinds import KindEnvironment
from sharpen.rewards.verifiable import VerifiableRewardCalculator
from sharpen.rollout import rollout
from sharpen.types import (
    Message,
    RowError,
    Sampling,
    SharpenError,
    StopReason,
    Task,
    ToolCall,
    ToolSpec,
    Turn,
    UnparsedToolCall,
)
from sharpen.world.sql import Database

SHOP = """create table item (name text primary key, price int, stock int);
insert into item values ('tea', 3, 9), ('cup', 8, 2), ('pot', 21, 0);"""
SQUARE = "def square(x):\n    return x * x"


class Script:
    """A policy that says the given messages, one per turn, and then "done"."""

    def __init__(self, *messages: Message):
        self.messages = messages

    def respond(self, dialogs, sampling):
        script = (*self.messages, say("done"))
        turns = []
        for dialog in dialogs:
            turn_number = sum(message.role == "assistant" for message in dialog.messages)
            turns.append(Turn(script[turn_number]))
        return turns


def call(*calls: tuple[str, dict], text: str = "") -> Message:
    return Message("assistant", text, tuple(ToolCall(name, values) for name, values in calls))


def say(text: str) -> Message:
    return Message("assistant", text)


def sql_task(kind: str = "sql", **gold) -> Task:
    return Task("s", "Ask the shop.", gold={"schema": SHOP, **gold}, kind=kind)


def fenced(code: str, language: str = "python") -> Message:
    return say(f"```{language}\n{code}\n```")


CODE = Task("c", "Write square.", gold={"tests": ["assert square(7) == 49"]}, kind="code")
CODE = replace(CODE, metadata={"visible_tests": ["assert square(2) == 4", "assert square(3) == 9"]})
CALCULATE = ToolSpec("calculate", "")
DEAR = "select name from item where price > 5 order by price"
SELL = "update item set stock = stock - 1 where name = 'cup'"
CASES = {
    "math": (Task("m", "17 * 23?", gold={"answer": "391"}, kind="math"), [say("\\boxed{391}")]),
    "math with a tool": (
        Task("m", "17 * 23?", (CALCULATE,), {"answer": "391"}, "math"),
        [call(("calculate", {"expression": "17 * 23"})), say("The answer is 391.")],
    ),
    "code": (CODE, [call(("run_tests", {"code": SQUARE})), fenced(SQUARE)]),
    "sql": (sql_task(sql=DEAR), [call(("run_sql", {"query": DEAR})), fenced(DEAR, "sql")]),
    "sql answers": (
        sql_task(answers=["cup", "pot"]),
        [call(("run_sql", {"query": DEAR})), say("Answer: cup, pot")],
    ),
    "sql state": (
        sql_task("tool_state", sql=SELL, writable=True),
        [call(("run_sql", {"query": "update item set stock = 1 where price = 8"})), say("Sold.")],
    ),
}


def walk(task: Task, *messages: Message, env=None, **limits):
    name = task.kind if task.kind in ("math", "code") else "sql"
    make = env or find_environment(name)
    (trajectory,) = rollout(Script(*messages), [task], lambda: make(**limits), Sampling())
    return trajectory


@pytest.mark.parametrize("case", CASES)
def test_gold_solves_and_nothing_fails(case):
    task, messages = CASES[case]
    with VerifiableRewardCalculator() as reward:
        solved = walk(task, *messages)
        failed = walk(task, say(""))
        assert solved.stop is StopReason.ANSWERED and "error" not in solved.metadata
        for turn in solved.turns[:-1]:
            assert turn.results and '"error"' not in turn.results[0].content
        assert reward.score(task, solved).parts["correctness"] == 1
        assert reward.score(task, failed).parts["correctness"] == 0


def test_every_task_is_played_in_the_environment_of_its_kind(own):
    world_task = next(iter(read_tasks("procedural/tools:train?count=1")))
    task_of = {
        "SQL": CASES["sql state"][0],
        "ToolWorld": world_task,
        "Mathematics": CASES["math"][0],
        "Programming": CODE,
        "PythonTools": Task("p", "", metadata={"python_tools": own}),
        "OneTurn": replace(world_task, kind="propose"),
    }
    for name, task in task_of.items():
        environment = KindEnvironment()
        environment.reset(task)
        assert type(environment.environment).__name__ == name
    assert environment.step(say("x")) == ((), StopReason.ANSWERED)
    for task, messages in CASES.values():
        trajectory = walk(task, *messages, env=KindEnvironment)
        assert trajectory.stop is StopReason.ANSWERED and len(trajectory.turns) == len(messages)


def test_tools_of_code_and_math_really_run():
    wrong = "def square(x):\n    return x + x"
    calls = call(("run_tests", {"code": wrong}), ("run_python", {"code": "print(5)"}))
    tests, printed = walk(CODE, calls).turns[0].results
    assert tests.content.splitlines() == [
        "passed: assert square(2) == 4",
        "failed: assert square(3) == 9 (AssertionError: )",
    ]
    assert printed.content == "5"
    trajectory = walk(CODE, call(("run_tests", {"code": "def ("})))
    assert "SyntaxError" in trajectory.turns[0].results[0].content
    plain = replace(CASES["math"][0], tools=())
    (refused,) = walk(plain, call(("calculate", {"expression": "1"}))).turns[0].results
    assert "unknown_tool" in refused.content
    dialog = find_environment("math")(tools=("run_python",)).reset(plain)  # type: ignore[call-arg]
    assert [spec.name for spec in dialog.tools] == ["run_python"]


OWN = '''
import time
from sharpen import tool

seen = []

@tool
def note(text: str) -> int:
    """Keeps a text and says how many there are."""
    seen.append(text)
    return len(seen)

@tool(timeout_s=0.05)
def hang() -> int:
    """Never answers."""
    time.sleep(1)

@tool
def fail(a: int) -> int:
    """Divides by it."""
    return 1 // a

@tool(max_bytes=10)
def flood() -> str:
    """Says much."""
    return "x" * 100

plain = 3
'''


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(OWN)
    return [f"{file}:{name}" for name in ("note", "hang", "fail", "flood")]


def results(trajectory) -> list[str]:
    return [result.content for turn in trajectory.turns for result in turn.results]


def test_calls_of_one_message_are_answered_in_order_and_failures_are_answers(own):
    task = Task("p", "Note it.", metadata={"python_tools": own})
    many = call(
        ("note", {"text": "a"}),
        ("hang", {}),
        ("note", {"text": "b"}),
        ("fail", {"a": 0}),
        ("fail", {"a": "x"}),
        ("flood", {}),
        ("other", {}),
    )
    broken = replace(many, unparsed=(UnparsedToolCall("{", "not JSON"),))
    trajectory = walk(task, broken, env=find_environment("python"))
    texts = results(trajectory)
    assert [r.name for r in trajectory.turns[0].results[:2]] == ["note", "hang"]
    assert (texts[0], texts[2]) == ("1", "2") and "[cut: 10 of 100 bytes]" in texts[5]
    errors = [json.loads(texts[n])["error"] for n in (1, 3, 4, 6, 7)]
    assert errors == ["timeout", "failed", "invalid_argument", "unknown_tool", "invalid_call"]
    again = walk(task, call(("note", {"text": "a"})), say(""), env=PythonTools)
    assert results(again) == ["1"]  # every episode has its own


def test_limits_of_a_tool_and_of_an_episode(own):
    task = Task("p", "Note it.", kind="own_tools")
    three_notes = call(*[("note", {"text": "a"})] * 3)
    trajectory = walk(task, three_notes, env=PythonTools, tools=own, calls_per_tool=2)
    assert "no more than 2 calls of note" in results(trajectory)[2]
    assert trajectory.stop is StopReason.ANSWERED
    trajectory = walk(task, three_notes, env=PythonTools, tools=own, max_calls=2)
    assert "no more than 2 calls are" in results(trajectory)[2]
    assert trajectory.stop is StopReason.TURNS
    slow = call(("hang", {}), ("note", {"text": "a"}))
    trajectory = walk(task, slow, env=PythonTools, tools=own, tools_s=0.04)
    assert trajectory.stop is StopReason.TIMEOUT
    assert json.loads(results(trajectory)[1])["error"] == "timeout"


def test_wrong_tools_are_named(own, tmp_path):
    task = Task("p", "Note it.", (ToolSpec("away"),))
    with pytest.raises(SharpenError, match=r"task p: no tool 'away' here; there are: note, hang"):
        PythonTools(own).reset(task)
    with pytest.raises(SharpenError, match=r"is not marked with @tool"):
        PythonTools([own[0].replace(":note", ":plain")]).reset(task)
    with pytest.raises(SharpenError, match="visible_tests: expected a list"):
        find_environment("code")().reset(replace(CODE, metadata={"visible_tests": "assert 1"}))
    with pytest.raises(RowError, match=r"s: gold.schema: .*syntax error"):
        find_environment("sql")().reset(replace(sql_task(), gold={"schema": "create tabel"}))


ENDLESS = "with recursive n(i) as (select 1 union all select i + 1 from n) select "


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("attach '/tmp/x.db' as x", "not authorized"),
        ("vacuum into '/tmp/sharpen-leak.db'", "authorization denied"),
        ("pragma query_only = 0", "not authorized"),
        ("select load_extension('x')", "not authorized"),
        ("update item set price = 0", "readonly"),
        ("select 1; select 2", "one statement"),
        ("select zeroblob(100000000)", "too big"),
        (f"{ENDLESS} max(i) from n", "longer than 0.2 s"),
        (f"{ENDLESS} i from n order by -i", "longer than 0.2 s"),
        ("selec", "syntax error"),
        ("", ""),
    ],
)
def test_a_database_keeps_statements_in(statement, said):
    base = Database(sql_task())
    before = base.state()
    answer = base.run(statement, limit_s=0.2)
    assert said in answer.get("message", "") and ("error" in answer or not statement)
    assert base.state() == before


def test_rows_are_bounded_and_plain():
    answer = Database(sql_task()).run(f"{ENDLESS} i, x'ff00' from n", max_rows=3)
    assert answer == {
        "columns": ["i", "x'ff00'"],
        "rows": [[1, "ff00"], [2, "ff00"], [3, "ff00"]],
        "more": True,
    }
    assert Database(sql_task(writable=True)).run(SELL) == {"changed": 1}


def test_statements_past_the_limit_do_not_count():
    task, _ = CASES["sql state"]
    sell = call(("run_sql", {"query": SELL}))
    look = call(("run_sql", {"query": "select 1"}))
    with VerifiableRewardCalculator("tool_state") as reward:
        for messages, value in (([sell], 1), ([sell, sell], 0), ([look, look, sell], 0)):
            trajectory = walk(task, *messages, max_calls=2)
            assert reward.score(task, trajectory).value == value
        with pytest.raises(RowError, match=r"s: gold.sql"):
            reward.score(sql_task("tool_state", sql="selec"), trajectory)
