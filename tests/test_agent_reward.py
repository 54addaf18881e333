"""The agent reward over real benchmark tasks: gold has 1, every mutation of gold less, nothing done
the floor; and each mistake that such rewards are known to make."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sharpen import (
    AgentRewardConfig,
    AgentRewardModel,
    AgentTrajectoryRL,
    PlanEvaluator,
    SharpenError,
    ToolVerifier,
)
from sharpen.calls import assistant_text, parse_message
from sharpen.data.generate.build import Sizes, build_data
from sharpen.envs.toolworld import ToolWorld
from sharpen.records import read_jsonl
from sharpen.rewards.agent import PENALTIES, WEIGHTS
from sharpen.rewards.trajectory import (
    discounted_returns,
    group_relative,
    turn_rewards,
)
from sharpen.rows import task_from_row, tool_to_wire
from sharpen.types import Message, StopReason, Task, ToolCall, ToolSpec, Trajectory, Turn
from sharpen.world.episode import DOMAINS, World
from sharpen.world.gold import (
    CallExecutor,
    Outcome,
    gold_calls,
    gold_outcome,
    gold_trajectory,
    start_episode,
)

NAMES = ("calendar_meetings", "finance_accounts", "home_lighting", "travel_flights")
FLOOR = -1.0


class Bench:
    """A small build of the benchmark, the world it lives in, and the reward over it."""

    def __init__(self, folder: Path):
        (folder / "domains").mkdir()
        for name in NAMES:
            shutil.copy(DOMAINS / f"{name}.yaml", folder / "domains")
        self.world = World(folder / "domains")
        build_data(folder / "out", 3, Sizes(dialogs=3, tasks=0.1, extended=30), world=self.world)
        files = sorted((folder / "out" / "agent_benchmark").rglob("*.jsonl"))
        self.tasks = [
            task_from_row(row.value, row.where) for file in files for row in read_jsonl(file)
        ]
        self.acting = [task for task in self.tasks if task.gold.get("calls")]
        self.model = AgentRewardModel(AgentRewardConfig(), self.world)

    def gold(self, task: Task) -> Trajectory:
        found = gold_trajectory(task, self.world)
        assert found is not None
        return found

    def value(
        self, task: Task, *messages: Message, stop: StopReason = StopReason.ANSWERED
    ) -> float:
        return self.score(task, *messages, stop=stop).value

    def score(self, task: Task, *messages: Message, stop: StopReason = StopReason.ANSWERED):
        turns = tuple(Turn(message) for message in messages)
        return self.model.score(task, Trajectory(task.id, turns, stop))

    def first(self, **wanted) -> Task:
        """A task whose gold has these values."""
        return next(t for t in self.tasks if all(t.gold.get(k) == v for k, v in wanted.items()))


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


def calling(*calls: ToolCall, text: str = "") -> Message:
    return Message("assistant", text, tuple(calls))


EMPTY = Message("assistant", "")


# Gold and its mutations --------------------------------------------------------------------------


def test_gold_has_one_and_silence_has_nothing(bench):
    kinds = set()
    for task in bench.tasks:
        score = bench.model.score(task, bench.gold(task))
        assert score.value == pytest.approx(1.0), (task.id, score)
        assert all(score.parts[name] == 1 for name in WEIGHTS)
        assert all(score.parts[name] == 0 for name in PENALTIES)
        assert score.feedback == ""
        silent = bench.value(task, EMPTY)
        assert silent == (FLOOR if task.gold.get("calls") else 0.0)
        kinds.add((task.kind, task.gold.get("decision")))
    assert len(kinds) == 7, "all four parts and all four decisions were met"


def mutate(bench: Bench, task: Task, kind: str, pick) -> list[Message] | None:
    """Gold's messages with one mistake of this kind; None where the kind does not apply."""
    messages = [turn.message for turn in bench.gold(task).turns]
    at = pick([i for i, m in enumerate(messages) if m.tool_calls])
    [call] = messages[at].tool_calls
    if kind == "dropped":
        kept = [m for m in messages if m.tool_calls != (call,)]
        return kept
    if kind == "repeated":
        return [*messages[: at + 1], calling(call), *messages[at + 1 :]]
    if kind == "wrong argument":
        if not call.arguments:
            return None
        name = pick(sorted(call.arguments))
        wrong = ToolCall(call.name, call.arguments | {name: another(call.arguments[name])})
        return [calling(wrong) if m.tool_calls == (call,) else m for m in messages]
    if kind == "extra":
        others = [t.name for t in task.tools if t.name not in {c.name for c in gold_calls(task)}]
        extra = ToolCall(pick(others), {}) if others else None
        return [*messages[:at], calling(extra), *messages[at:]] if extra else None
    if kind == "invented":
        return [*messages[:at], calling(ToolCall("do_what_i_mean", {})), *messages[at:]]
    if kind == "broken":
        return [*messages[:at], parse_message("<tool_call>{oops</tool_call>"), *messages[at:]]
    assert kind == "empty"
    return [EMPTY]


def another(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return f"{value} or so" if isinstance(value, str) else []


MUTATIONS = ("dropped", "repeated", "wrong argument", "extra", "invented", "broken", "empty")


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), kind=st.sampled_from(MUTATIONS))
def test_every_mutation_of_gold_is_worse_than_gold_and_no_worse_than_nothing(bench, data, kind):
    task = data.draw(st.sampled_from(bench.acting))
    messages = mutate(bench, task, kind, lambda options: data.draw(st.sampled_from(options)))
    if messages is None:
        return
    gold = bench.model.score(task, bench.gold(task)).value
    found = bench.value(task, *messages)
    assert found < gold - 1e-6
    attempted = any(m.tool_calls or m.unparsed for m in messages)
    silent = bench.value(task, EMPTY)
    assert found > silent if attempted else found == silent
    talk = bench.value(task, Message("assistant", "I have done that for you."))
    assert not attempted or found > talk


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_the_worst_attempt_still_beats_silence(bench, data):
    task = data.draw(st.sampled_from(bench.acting))
    names = [*(tool.name for tool in task.tools), "no_such_tool", "neither_this"]
    made = st.builds(ToolCall, st.sampled_from(names), st.just({}))
    calls = data.draw(st.lists(made, min_size=1, max_size=30))
    stop = data.draw(st.sampled_from([StopReason.ANSWERED, StopReason.TIMEOUT, StopReason.TURNS]))
    found = bench.value(task, calling(*calls), stop=stop)
    assert FLOOR < found <= 1.0
    assert found > bench.value(task, EMPTY, stop=stop)


def test_calling_where_no_call_is_wanted_is_worse_than_saying_anything(bench):
    for task in bench.tasks:
        if task.gold.get("decision") in ("ask", "answer", "decline"):
            called = bench.value(task, calling(ToolCall(task.tools[0].name, {})))
            said = bench.value(task, Message("assistant", "Well."))
            assert called < 0 < said
            assert said < 1 or task.metadata["variant"] == "explain", "whose gold has no words"


# Completion by execution -------------------------------------------------------------------------


def test_another_way_to_the_end_state_completes_the_task(bench):
    """A look-up before the change costs efficiency and accuracy, and is no wrong tool."""
    for task in bench.acting:
        outcome = gold_outcome(bench.world, task)
        episode = start_episode(bench.world, task.id, task.gold)
        looks = [t for t in task.tools if (tool := episode.tool(t.name)) and tool.read_only]
        looks = [t for t in looks if t.name not in {c.name for c in gold_calls(task)}]
        if not outcome.changes or not looks or task.gold.get("faults"):
            continue
        messages = [turn.message for turn in bench.gold(task).turns]
        score = bench.score(task, calling(ToolCall(looks[0].name, {})), *messages)
        assert score.parts["task_completion"] == 1 and score.parts["wrong_tool"] == 0
        assert score.parts["tool_accuracy"] < 1 and score.parts["efficiency"] < 1
        assert 0 < score.value < 1
        return
    pytest.fail("no such task")


def test_text_alone_completes_nothing(bench):
    """The words of a success earn nothing where the state did not change."""
    task = next(t for t in bench.acting if gold_outcome(bench.world, t).changes)
    said = " ".join(str(value) for call in gold_calls(task) for value in call.arguments.values())
    score = bench.score(task, Message("assistant", f"Done, successfully completed: {said}"))
    assert score.parts["task_completion"] == 0 and score.value == FLOOR


def test_a_task_that_only_reads_needs_the_answer_to_have_been_obtained(bench):
    reading = [t for t in bench.acting if not gold_outcome(bench.world, t).changes]
    assert len(reading) > 5
    for task in reading:
        wrong = next(t.name for t in task.tools if t.name not in {c.name for c in gold_calls(task)})
        score = bench.score(task, calling(ToolCall(wrong, {})))
        assert score.parts["task_completion"] == 0, "the end state alone was right from the start"
        assert "not found out" in score.feedback


def test_a_read_that_feeds_a_later_call_is_vouched_for_by_the_end_state(bench):
    fed = 0
    for task in bench.acting:
        outcome, calls = gold_outcome(bench.world, task), gold_calls(task)
        episode = start_episode(bench.world, task.id, task.gold)
        reads = [c for c in calls if (tool := episode.tool(c.name)) and tool.read_only]
        unused = [r for r in reads if r not in [done.call for done in outcome.reads]]
        if not unused or task.gold.get("faults"):
            continue
        fed += 1
        kept = [calling(call) for call in calls if call not in unused]
        assert bench.score(task, *kept).parts["task_completion"] == 1
        assert bench.value(task, *kept) < 1
    assert fed


def test_a_default_value_given_or_not_is_the_same_call(bench):
    for task in bench.acting:
        specs = {tool.name: tool for tool in task.tools}
        calls = gold_calls(task)
        fields = specs[calls[0].name].parameters["properties"]
        extra = {n: f["default"] for n, f in fields.items() if "default" in f}
        extra = {n: v for n, v in extra.items() if n not in calls[0].arguments}
        if len(calls) == 1 and extra:
            spelt = ToolCall(calls[0].name, calls[0].arguments | extra)
            assert bench.value(task, calling(spelt)) == pytest.approx(1.0)
            return
    pytest.fail("no such task")


def test_trying_again_after_an_injected_fault_costs_nothing(bench):
    faulty = [task for task in bench.acting if task.gold.get("faults")]
    assert faulty
    for task in faulty:
        trajectory = bench.gold(task)
        assert sum(bool(t.message.tool_calls) for t in trajectory.turns) > len(gold_calls(task))
        assert bench.model.score(task, trajectory).value == pytest.approx(1.0)
        stubborn = bench.score(task, *(calling(call) for call in gold_calls(task)))
        assert stubborn.parts["task_completion"] == 0 and stubborn.value < 1


def test_the_reward_and_the_environment_execute_alike(bench):
    environment = ToolWorld(bench.world)
    for task in bench.acting[:60]:
        environment.reset(task)
        for turn in bench.gold(task).turns:
            results, _ = environment.step(turn.message)
            assert results == turn.results
        run = CallExecutor(
            start_episode(bench.world, task.id, task.gold), {t.name for t in task.tools}
        )
        for turn in bench.gold(task).turns:
            run.step(turn.message)
        assert environment.end_state_reached() and run.executed == environment.executed
        assert gold_outcome(bench.world, task).missing(run) == []
    assert Outcome({"t": {"k": None}}, ()).missing(run)


def test_calls_past_the_limit_are_not_run(bench):
    task = next(t for t in bench.acting if len(gold_calls(t)) == 1 and not t.gold.get("faults"))
    other = next(t.name for t in task.tools if t.name != gold_calls(task)[0].name)
    many = [ToolCall(other, {}) for _ in range(16)]
    late = bench.score(task, calling(*many, *gold_calls(task)))
    assert late.parts["task_completion"] == 0
    early = bench.score(task, calling(*gold_calls(task), *many))
    assert early.parts["task_completion"] == 1 > early.value


# Timing ------------------------------------------------------------------------------------------


def test_asking_counts_when_it_asks_for_what_is_missing(bench):
    task = bench.first(decision="ask")
    right = bench.gold(task).turns[-1].message
    assert bench.score(task, right).parts["timing_quality"] == 1
    for text, asks in (("What is the weather?", True), ("I shall see to it.", False)):
        score = bench.score(task, Message("assistant", text))
        # to ask is the right decision; to ask for what is missing is the rest of the credit
        assert score.solved is asks and score.parts["task_completion"] == float(asks)
        assert score.parts["timing_quality"] == 0.5
        assert "expected: ask" in score.feedback


def test_an_answer_needs_what_the_gold_answer_says(bench):
    task = next(t for t in bench.tasks if t.gold.get("answer"))
    right, wrong = task.gold["answer"], "I believe it was forty-two."
    assert bench.value(task, Message("assistant", f"I said it before: {right}")) == 1
    score = bench.score(task, Message("assistant", wrong))
    assert score.solved, "to answer is the right decision"
    assert score.parts["timing_quality"] == 0.5 and score.value < 1


@pytest.mark.parametrize(
    ("text", "declines"),
    [
        ("I'm sorry, I cannot do that here.", True),
        ("None of the tools on offer can do this.", True),
        ("抱歉，目前没有合适的工具可以做到。", True),
        ("我无法完成这个请求。", True),
        ("All done!", False),
        ("好的，已经完成。", False),
    ],
)
def test_declining_is_told_from_claiming(bench, text, declines):
    score = bench.score(bench.first(decision="decline"), Message("assistant", text))
    assert score.parts["timing_quality"] == (1 if declines else 0.5)


# The known mistakes, one by one ------------------------------------------------------------------

TOOLS = (
    ToolSpec(
        "add",
        "",
        {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "deep": {"type": "object"}},
            "required": ["x"],
        },
    ),
    ToolSpec("look"),
)
OFFER = [tool_to_wire(tool) for tool in TOOLS]
GOLD = {"calls": [{"name": "add", "arguments": {"x": 1}}], "available_tools": OFFER}


def text_of(*calls: ToolCall) -> str:
    return assistant_text(calling(*calls), "")


ONE = text_of(ToolCall("add", {"x": 1}))


def reward(response, truth=None, trace=None, **config):
    return AgentRewardModel(AgentRewardConfig(**config)).compute_reward("q", response, truth, trace)


def test_an_empty_response_without_ground_truth_earns_nothing():
    empty, called = reward("", {"available_tools": OFFER}), reward(ONE, {"available_tools": OFFER})
    assert empty["total"] == 0.0 < called["total"] == 1.0
    assert "empty response" in empty["feedback"]


def test_without_ground_truth_only_the_verifiable_is_scored_and_said():
    found = reward(ONE, {"available_tools": OFFER})
    assert set(found["breakdown"]) & set(WEIGHTS) == {"efficiency", "format_compliance"}
    assert "no ground truth" in found["feedback"]
    assert "not verifiable and left out: task_completion, tool_accuracy" in found["feedback"]
    offer = {"available_tools": OFFER}
    twice = reward(ONE + ONE, offer)
    assert twice["breakdown"]["redundant_call"] == -0.2 and twice["total"] < found["total"]
    invented = reward(text_of(ToolCall("fly", {})), offer)
    assert invented["breakdown"]["hallucinated_tool"] == -0.3 and invented["total"] == 0.7
    misfit = reward(text_of(ToolCall("add", {"x": "one"})), offer)
    assert misfit["breakdown"]["format_error"] == -0.1 and misfit["total"] < invented["total"]


def test_duplicates_are_counted_and_not_merged_before_scoring():
    once, thrice = reward(ONE, GOLD), reward(ONE * 3, GOLD)
    assert once["total"] == 1.0 and once["breakdown"]["tool_accuracy"] == 1
    assert thrice["breakdown"]["tool_accuracy"] == pytest.approx(0.5)
    assert thrice["breakdown"]["redundant_call"] == pytest.approx(-0.4)
    assert thrice["breakdown"]["efficiency"] < 1 and thrice["total"] < 0.2


def test_a_call_that_gold_repeats_is_not_redundant():
    truth = GOLD | {"calls": GOLD["calls"] * 2}
    assert reward(ONE * 2, truth)["total"] == 1.0
    assert reward(ONE * 3, truth)["breakdown"]["redundant_call"] == -0.2
    assert reward(ONE, truth)["breakdown"]["tool_accuracy"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("name", "response", "trace"),
    [
        ("wrong_tool", text_of(ToolCall("look", {})), None),
        ("redundant_call", ONE + ONE, None),
        ("format_error", ONE + "<tool_call>{</tool_call>", None),
        ("timeout", ONE, [{"name": "add", "arguments": {"x": 1}, "timeout": True}]),
        ("hallucinated_tool", ONE + text_of(ToolCall("fly", {})), None),
        ("no_call", "I would rather not.", None),
    ],
)
def test_every_penalty_is_really_applied(name, response, trace):
    found = reward(response, GOLD, trace)
    assert found["breakdown"][name] == pytest.approx(PENALTIES[name])
    assert [n for n in PENALTIES if found["breakdown"][n]] == [name]
    assert name in found["feedback"]
    off = reward(response, GOLD, trace, penalties={name: 0})
    assert off["breakdown"][name] == 0
    assert off["total"] - found["total"] == pytest.approx(-PENALTIES[name])


def test_penalties_are_bounded_one_by_one_and_together():
    many = reward(text_of(*(ToolCall(f"fly{i}", {}) for i in range(200))), GOLD)
    assert many["breakdown"]["hallucinated_tool"] == pytest.approx(-0.9)
    broken = "<tool_call>{</tool_call>" * 50
    everything = reward(text_of(*[ToolCall("fly", {})] * 9, *[ToolCall("look")] * 9) + broken, GOLD)
    assert everything["total"] >= FLOOR + 0.1 - 1e-9


def test_nested_arguments_are_parsed_and_compared():
    nested = {"x": 1, "deep": {"a": [{"b": "}{"}], "c": {"d": None}}}
    truth = GOLD | {"calls": [{"name": "add", "arguments": nested}]}
    assert reward(text_of(ToolCall("add", nested)), truth)["total"] == 1.0
    other = {"x": 1, "deep": {"a": [{"b": "}"}], "c": {"d": None}}}
    assert reward(text_of(ToolCall("add", other)), truth)["total"] < 1.0


def test_a_plan_in_words_is_no_plan():
    words = "Step 1: add. Step 2: look. Step 3: done."
    assert reward(words, GOLD)["total"] == FLOOR


def test_an_attempt_is_never_taught_away():
    """The order of all responses that training pairs are made of."""
    ranked = [
        ONE,
        text_of(ToolCall("add", {"x": 2})),
        text_of(ToolCall("look", {})),
        text_of(ToolCall("fly", {})),
        "I have added it.",
    ]
    values = [reward(response, GOLD)["total"] for response in ranked]
    assert values == sorted(values, reverse=True) and len(set(values[:3])) == 3
    assert min(values[:-1]) > values[-1]


def test_what_gold_does_is_never_at_fault():
    """Rows of others break their own schemas, name tools they do not offer, or refer to results."""
    for name, arguments in (("add", {"x": "$var1.n$"}), ("add", {"x": "one"}), ("fly", {"to": 1})):
        truth = GOLD | {"calls": [{"name": name, "arguments": arguments}]}
        assert reward(text_of(ToolCall(name, arguments)), truth)["total"] == 1.0
        other = reward(text_of(ToolCall(name, arguments | {"x": "two"})), truth)["breakdown"]
        assert other["format_error"] + other["hallucinated_tool"] < 0


# The interface of compute_reward -----------------------------------------------------------------


def test_both_entries_are_one_function(bench):
    for task in bench.acting[::9]:
        trajectory = bench.gold(task)
        trace = [
            {"tool": call.name, "arguments": call.arguments, "result": "{}"}
            for turn in trajectory.turns
            for call in turn.message.tool_calls
        ]
        truth = task.gold | {"available_tools": [tool_to_wire(tool) for tool in task.tools]}
        found = bench.model.compute_reward(task.instruction, "Done.", truth, trace)
        score = bench.model.score(task, trajectory)
        assert found["total"] == score.value and found["breakdown"] == dict(score.parts)


def test_a_call_in_the_response_and_in_the_trace_counts_once():
    trace = [{"name": "add", "arguments": {"x": 1}, "result": "2"}]
    assert reward(ONE, GOLD, trace) == reward("Done.", GOLD, trace) | {"feedback": ""}
    assert reward(ONE * 2, GOLD, trace)["breakdown"]["redundant_call"] == -0.2


def test_target_tools_alone_are_judged_by_name():
    truth = {"target_tools": ["add", "look"], "optimal_steps": 2}
    both = reward(text_of(ToolCall("look", {"any": 1}), ToolCall("add", {})), truth)
    assert both["total"] == 1.0 and "task_completion" not in both["breakdown"]
    half = reward(ONE, truth)
    assert half["breakdown"]["tool_accuracy"] == pytest.approx(2 / 3) and half["total"] < 1
    none = reward("No tool is needed.", {"target_tools": []})
    assert none["total"] == 1.0 and reward(ONE, {"target_tools": []})["total"] < 0


def test_a_decision_alone_judges_only_the_timing():
    assert reward(ONE, {"decision": "call"})["total"] == 1.0
    assert reward("Hm.", {"decision": "call"})["total"] == FLOOR


@pytest.mark.parametrize(
    "trace", [["add"], [None], [3], [{"name": 3}], [{}], [{"name": "add", "arguments": "{"}], [[]]]
)
def test_a_malformed_trace_is_bounded(trace):
    assert FLOOR <= reward(ONE, GOLD, trace)["total"] <= 1


@pytest.mark.parametrize(
    "settings",
    [{"weights": {"speed": 1}}, {"weights": {"efficiency": -1}}, {"penalties": {"timeout": 0.5}},
     {"penalties": {"wrong": -1}}, {"weights": {"efficiency": float("nan")}}, {"max_repeats": 0}],
)  # fmt: skip
def test_wrong_settings_are_refused(settings):
    with pytest.raises(SharpenError, match=r"expected|greater"):
        AgentRewardConfig(**settings)


def test_weights_that_are_not_given_keep_their_defaults():
    config = AgentRewardConfig(weights={"task_completion": 2.0}, penalties={"timeout": -0.1})
    assert config.weights == WEIGHTS | {"task_completion": 2.0}
    assert config.penalties == PENALTIES | {"timeout": -0.1}
    assert reward(ONE, GOLD, weights={"task_completion": 2.0})["total"] == 1.0


BAITS = {
    "many calls": ONE * 3_000,
    "many broken": "<tool_call>{" * 80_000,
    "never closed": "<tool_call>" + "[" * 1_000_000,
    "long number": '<tool_call>{"name": "add", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>",
    "long text": "a.b-c:" * 170_000,
    "blank": " " * 1_000_000,
    "no words": "?" * 1_000_000,
    "没有": "没有" * 300_000,
    "half a pair": '<tool_call>{"name": "add", "arguments": {"x": "\\ud800"}}</tool_call>',
    "not a number": '<tool_call>{"name": "add", "arguments": {"x": NaN}}</tool_call>',
    "deep": '<tool_call>{"name":"add","arguments":{"x":' + "[" * 900 + "]" * 900 + "}}</tool_call>",
}


@pytest.mark.parametrize("bait", BAITS)
def test_hostile_responses_are_bounded(bench, bait):
    started = time.process_time()
    for truth in (GOLD, {}, {"decision": "decline"}, {"decision": "answer", "answer": "42"}):
        assert FLOOR <= reward(BAITS[bait], truth)["total"] <= 1
    assert FLOOR <= bench.value(bench.acting[0], parse_message(BAITS[bait])) <= 1
    assert time.process_time() - started < 10


def test_a_megabyte_of_calls_takes_a_time_in_proportion():
    started = time.process_time()
    assert reward(ONE * 18_000, GOLD)["total"] == pytest.approx(-0.2, abs=0.2)
    assert time.process_time() - started < 8


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    text=st.text(max_size=60)
    | st.sampled_from(["<tool_call>", "</tool_call>", '{"name":"add"}', "null", "\\ud800"]).flatmap(
        lambda piece: st.text(max_size=20).map(lambda rest: f"<tool_call>{piece}{rest}</tool_call>")
    )
)
def test_no_response_raises_or_leaves_the_range(text):
    for truth in (GOLD, None):
        assert FLOOR <= reward(text, truth)["total"] <= 1.0


def test_gold_that_is_no_episode_is_an_error_that_names_the_task():
    task = Task("t9", "q", TOOLS, GOLD | {"categories": ["nowhere"], "seed": 1, "family": "train"})
    with pytest.raises(SharpenError, match="nowhere"):
        AgentRewardModel().score(task, Trajectory("t9", (Turn(EMPTY),), StopReason.ANSWERED))


# Tools and plans ---------------------------------------------------------------------------------


def test_the_verifier_tells_invented_from_ill_fitting():
    offered = {tool.name: tool for tool in TOOLS}
    calls = [ToolCall("add", {"x": 1}), ToolCall("add", {}), ToolCall("fly", {})]
    invented, invalid = ToolVerifier().verify(calls, offered)
    assert invented == ["fly"] and len(invalid) == 1 and "required" in invalid[0]
    assert ToolVerifier().verify(calls, {}) == ([], [])


PLAN = {
    "steps": [
        {"id": "s1", "tool": "look", "arguments": {}},
        {"id": "s2", "tool": "add", "arguments": {"x": {"$from": "s1.found.0"}}},
        {"id": "s3", "tool": "look", "arguments": {"at": 2}},
    ],
    "edges": [["s1", "s2"]],
    "calls": [
        {"name": "look", "arguments": {}},
        {"name": "add", "arguments": {"x": 7}},
        {"name": "look", "arguments": {"at": 2}},
    ],
}


def test_a_plan_respects_its_dependencies():
    judge, (first, second, third) = PlanEvaluator(), PLAN["steps"]
    for order in ([first, second, third], [third, first, second], [first, third, second]):
        found = judge.evaluate(order, PLAN, TOOLS)
        assert found["success"] and found["edges"] == found["step_f1"] == 1
    backwards = judge.evaluate([second, first, third], PLAN, TOOLS)
    assert not backwards["valid"] and "s1 is no earlier step" in backwards["problems"][0]
    assert not judge.evaluate([first, third], PLAN, TOOLS)["success"]
    unknown = judge.evaluate([first | {"tool": "fly"}, second, third], PLAN, TOOLS)
    assert "no tool 'fly'" in unknown["problems"][0]
    assert not judge.evaluate([first, first, second, third], PLAN, TOOLS)["valid"]
    renamed = [
        first | {"id": "a"},
        second | {"id": "b", "arguments": {"x": {"$from": "a.found.0"}}},
    ]
    assert judge.evaluate([*renamed, third], PLAN, TOOLS)["success"]


def test_calls_of_one_turn_cannot_build_on_each_other():
    steps = [{"tool": c["name"], "arguments": c["arguments"], "turn": 0} for c in PLAN["calls"]]
    at_once = PlanEvaluator().evaluate(steps, PLAN)
    assert at_once["edges"] == 0 and not at_once["success"]
    ordered = [step | {"turn": i} for i, step in enumerate(steps)]
    assert PlanEvaluator().evaluate(ordered, PLAN)["success"]


def test_planning_tasks_report_whether_the_plan_succeeded(bench):
    tasks = [task for task in bench.tasks if task.kind == "planning"]
    for task in tasks:
        assert bench.model.score(task, bench.gold(task)).parts["plan_success"] == 1
        cut = replace(bench.gold(task), turns=bench.gold(task).turns[1:])
        assert bench.model.score(task, cut).parts["plan_success"] == 0


# Credit along a trajectory -----------------------------------------------------------------------


def test_turn_rewards_sum_to_the_value_and_fall_where_they_belong(bench):
    task = next(t for t in bench.acting if len(gold_calls(t)) == 3 and not t.gold.get("faults"))
    gold = bench.gold(task)
    own = turn_rewards(task, gold, bench.model)
    assert sum(own) == pytest.approx(1.0) and own[-1] == pytest.approx(0.0)
    assert all(value > 0 for value in own[:3])
    spoilt = list(gold.turns)
    spoilt.insert(1, Turn(calling(ToolCall("no_such_tool", {}))))
    credit = turn_rewards(task, replace(gold, turns=tuple(spoilt)), bench.model)
    assert credit[1] < 0 < min(credit[0], credit[2]), "the mistake is charged to its own turn"


def test_discounted_returns():
    assert discounted_returns([0, 0, 1], 0.5) == [0.25, 0.5, 1]
    assert discounted_returns([1, 2, 3]) == [6, 5, 3] and discounted_returns([]) == []


def test_group_relative_credit_is_centred_and_not_a_broadcast():
    assert group_relative([[1, 1], [1]]) == [[0, 0], [0]] and group_relative([]) == []
    good, bad = group_relative([[0.0, 1.0], [0.0, -1.0]])
    assert good[1] > 0 > bad[1]
    steps = group_relative([[0.5, 0.5], [0.5, -0.9]], gamma=0.0)
    assert steps[0][0] == steps[1][0] and steps[0][1] > steps[1][1], "the shared step is not blamed"
    flat = [value for rewards in steps for value in rewards]
    assert sum(flat) == pytest.approx(0)


@pytest.mark.parametrize("mode", ["turn", "return", "group"])
def test_credit_stands_on_the_turns(bench, mode):
    task = bench.acting[0]
    group = [bench.gold(task), Trajectory(task.id, (Turn(EMPTY),), StopReason.ANSWERED)]
    first, second = AgentTrajectoryRL(bench.model).credit(task, group, mode, gamma=0.9)
    assert first.turns[0].reward > 0 > second.turns[0].reward
    assert first.turns[0].message == group[0].turns[0].message


STEPS = [
    {"thought": "I need the population of Ulm", "action": "look", "action_input": {"q": "Ulm"},
     "observation": "Ulm has 126,000 people"},
    {"thought": "126,000 people is the answer", "final_answer": "126000"},
]  # fmt: skip


def trajectory_reward(steps, answer, truth="126000"):
    judge = AgentTrajectoryRL(AgentRewardModel())
    return judge.compute_trajectory_reward("How many people live in Ulm?", steps, answer, truth)


def test_the_trajectory_reward_is_led_by_its_outcome():
    right = trajectory_reward(STEPS, "126000")
    assert right == pytest.approx(1.5)
    assert trajectory_reward(STEPS, "5") == trajectory_reward([], "") == -0.5
    assert trajectory_reward([], "", "") == -0.5, "nothing is no answer to anything"
    assert trajectory_reward([], "126000.0") == pytest.approx(1.2)


def test_repeating_and_padding_earn_nothing():
    again = [STEPS[0], STEPS[0], STEPS[1]]
    assert trajectory_reward(again, "126000") < trajectory_reward(STEPS, "126000")
    padding = "因为所以需要应该 because therefore must should " * 50
    padded = [step | {"thought": padding} for step in STEPS]
    assert trajectory_reward(padded, "126000") == pytest.approx(1.2)
    chinese = [{"thought": "需要查人口", "action": "look", "action_input": {}}]
    judge = AgentTrajectoryRL(AgentRewardModel())
    value = judge.compute_trajectory_reward("乌尔姆有多少人口？", chinese, "十二万", "十二万。")
    assert value == pytest.approx(1.5)


def test_the_trajectory_reward_with_a_tasks_gold():
    steps = [{"thought": "add one to it", "action": "add", "action_input": '{"x": 1}'}]
    judge = AgentTrajectoryRL(AgentRewardModel())
    right = judge.compute_trajectory_reward("add one", steps, "Done.", GOLD)
    assert right == pytest.approx(1.5)
    assert judge.compute_trajectory_reward("add one", [], "Done.", GOLD) == FLOOR
