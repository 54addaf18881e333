"""The tool world: execution, errors, faults, end states, families, determinism, and the
environment over it."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
from collections import Counter

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sharpen.calls import parse_message
from sharpen.envs.toolworld import ToolWorld
from sharpen.types import Message, SharpenError, StopReason, Task, ToolCall
from sharpen.world.cards import card_row
from sharpen.world.domain import DomainError, load_domain
from sharpen.world.episode import Faults, World, outcome_of
from sharpen.world.expressions import Expression, ToolFailure, parse_condition, parse_named
from sharpen.world.fields import FAMILIES
from sharpen.world.operations import OPERATIONS
from sharpen.world.phrases import fill, missing_question, slots
from sharpen.world.state import base_rows, seeded_rng

CATEGORIES = ["calendar/meetings", "finance/accounts", "home/lighting", "travel/flights"]
FLIGHTS = ["travel/flights"]
quick = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def a_call(world: World, name: str, outcome: str = "ok", seed: int = 0) -> tuple:
    """An episode and a call of the tool that will have this outcome in it."""
    tool = world.tool(name)
    for number in range(seed, seed + 30):
        episode = world.episode([tool.category], number)
        using = slots(tool.operation.ask[0])
        call = episode.sample(tool, random.Random(number), using, outcome)
        if call is not None:
            return episode, call
    raise AssertionError(f"{name} never was {outcome}")


def walk(episode, rng: random.Random, steps: int) -> list[ToolCall]:
    """Calls that succeed, one after the other."""
    tools = list(episode.tools())
    calls = []
    for _ in range(steps):
        call = episode.sample(rng.choice(tools), rng)
        if call is not None:
            episode.call(call)
            calls.append(call)
    return calls


# Execution -------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", sorted(OPERATIONS))
def test_every_template_executes_and_answers_in_its_shape(world, op):
    tool = next(t for t in world.tools(CATEGORIES) if t.operation.op == op)
    episode, call = a_call(world, tool.name)
    result = episode.call(call)
    assert outcome_of(result) == "ok"
    assert jsonschema_rs.is_valid(tool.outputs(), result)
    assert set(result) <= set(tool.outputs()["properties"]), "an answer has undeclared parts"
    assert bool(episode.changes()) == (not tool.read_only)


@pytest.mark.parametrize(
    "code, name, arguments",
    [
        ("unknown_tool", "get_flight_statuses", {}),
        ("invalid_argument", "get_flight_status", {}),
        ("invalid_argument", "get_flight_status", {"flight_id": 7}),
        ("invalid_argument", "get_flight_status", {"flight_id": "FL-1", "extra": 1}),
        ("not_found", "get_flight_status", {"flight_id": "FL-0000"}),
    ],
)
def test_wrong_calls_are_answered_with_their_error(world, code, name, arguments):
    episode = world.episode(FLIGHTS, 1)
    result = episode.call(ToolCall(name, arguments))
    assert result["error"] == code and result["message"]
    assert episode.changes() == {}


def test_errors_say_what_would_have_been_right(world):
    episode = world.episode(FLIGHTS, 1)
    flight = next(iter(episode.state()["travel/flights.flight"]))

    def message(name: str, arguments: dict) -> str:
        return episode.call(ToolCall(name, arguments))["message"]

    wrong_choice = message("add_trip_extra", {"booking_id": flight, "extra": "window"})
    assert '"window" is not one of "lounge", "priority_boarding", "wifi"' in wrong_choice
    assert '"extra_legroom"; parameters: booking_id, extra' in wrong_choice
    unknown_parameter = message("check_in_passenger", {"booking_id": flight, "row": 3})
    assert unknown_parameter.endswith("parameters: booking_id, seat")
    wrong_key = message("view_itinerary", {"booking_id": flight})
    assert wrong_key.endswith(f"{flight!r}, which is the key of another kind: flight")


@pytest.mark.parametrize("code", ["conflict", "permission", "not_found"])
def test_refused_writes_change_nothing(world, code):
    seen = 0
    for tool in world.tools(CATEGORIES):
        episode = world.episode([tool.category], 3)
        call = None if tool.read_only else episode.sample(tool, seeded_rng(tool.name), outcome=code)
        if call is not None:
            seen += 1
            assert episode.call(call)["error"] == code
            assert episode.changes() == {} and episode.snapshot() == {}
    assert seen >= 3


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


JUNK = [None, True, float("nan"), float("inf"), 10**400, -1, 1e308, "", "\ud800", "x" * 5000]
JUNK += [[], [[]], ["\ud800"], {}, {"a": 1}, "2026-02-31", "99:99", "9999-12-31", nested(300)]


@pytest.mark.parametrize("category", CATEGORIES)
def test_no_argument_makes_a_tool_raise(world, category):
    refused = 0
    for tool in world.domain(category).tools.values():
        episode = world.episode([category], 1)
        call = episode.sample(tool, random.Random(1), tool.params) or ToolCall(tool.name)
        for name in tool.params:
            for junk in JUNK:
                result = episode.fork().call(ToolCall(tool.name, call.arguments | {name: junk}))
                json.dumps(result, ensure_ascii=False, allow_nan=False).encode()
                refused += "error" in result
    assert refused > 100


def test_only_tools_on_offer_can_be_called(world):
    episode, call = a_call(world, "get_flight_status")
    assert episode.call(call, offered={"book_flight"})["error"] == "unknown_tool"


def test_numbers_are_kept_in_bounds_and_in_one_form(world):
    episode, call = a_call(world, "transfer_between_accounts")
    huge = ToolCall(call.name, call.arguments | {"amount": 1e15})
    assert episode.call(huge)["error"] == "invalid_argument"
    with_integer = episode.fork()
    with_float = episode.fork()
    integer_call = ToolCall(call.name, call.arguments | {"amount": 1})
    float_call = ToolCall(call.name, call.arguments | {"amount": 1.0})
    assert with_integer.call(integer_call) == with_float.call(float_call)
    assert with_integer.digest() == with_float.digest()


def test_unknown_categories_tools_and_families_are_named(world):
    with pytest.raises(SharpenError, match="no category 'travel/rockets'"):
        world.episode(["travel/rockets"])
    with pytest.raises(SharpenError, match="no tool 'fly'"):
        world.tool("fly")
    with pytest.raises(SharpenError, match="family"):
        world.episode(FLIGHTS, family="holdout")


# Faults ----------------------------------------------------------------------------------------


def test_faults_strike_where_they_are_told_and_change_nothing(world):
    clean, call = a_call(world, "book_flight")
    struck = world.episode(FLIGHTS, clean.seed, faults=Faults(at={0: "timeout", 1: "rate_limit"}))
    assert [struck.call(call)["error"] for _ in range(2)] == ["timeout", "rate_limit"]
    assert struck.changes() == {}
    assert struck.call(call) == clean.call(call)
    assert struck.same(clean)


def test_fault_rates_are_drawn_from_the_seed():
    def kinds(seed: int) -> list[str]:
        faults = Faults(timeout=0.2, rate_limit=0.1, seed=seed)
        return [faults.kind(number) for number in range(2000)]

    assert kinds(1) == kinds(1) != kinds(2)
    counts = Counter(kinds(1))
    assert 320 < counts["timeout"] < 480 and 130 < counts["rate_limit"] < 270
    with pytest.raises(SharpenError, match="timeout or rate_limit"):
        Faults(at={0: "explosion"})


# State -----------------------------------------------------------------------------------------


@quick
@given(seed=st.integers(0, 10**6), steps=st.integers(1, 6), family=st.sampled_from(FAMILIES))
def test_base_rows_are_shared_and_never_written(world, seed, steps, family):
    category = CATEGORIES[seed % 4]
    episode = world.episode([category], seed % 50, family)
    before = copy.deepcopy(episode.state())
    for call in walk(episode, random.Random(seed), steps):
        scribble(episode.fork().call(call))  # a caller may do what it likes with an answer
    assert world.episode([category], seed % 50, family).state() == before
    episode.reset()
    assert episode.state() == before and episode.changes() == {}


def scribble(value) -> None:
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, (dict, list)):
            scribble(inner)
    value.clear()


@quick
@given(seed=st.integers(0, 10**6), before=st.integers(0, 4), after=st.integers(1, 4))
def test_a_snapshot_brings_its_state_back(world, seed, before, after):
    episode = world.episode([CATEGORIES[seed % 4]], seed % 50)
    rng = random.Random(seed)
    walk(episode, rng, before)
    snapshot = episode.snapshot()
    state = episode.state()
    digest = episode.digest()
    fork = episode.fork()
    walk(fork, rng, after)
    assert episode.state() == state, "a fork wrote to its origin"
    walk(episode, rng, after)
    episode.restore(snapshot)
    assert (episode.state(), episode.digest()) == (state, digest)
    assert episode.same(world_at(episode, snapshot)) and episode.diff(episode.fork()) == []


def world_at(episode, snapshot):
    other = episode.fork()
    other.restore(json.loads(json.dumps(snapshot)))  # a snapshot survives the disk
    return other


@quick
@given(seed=st.integers(0, 10**6))
def test_end_states_do_not_depend_on_the_order_of_independent_calls(world, seed):
    episode = world.episode([CATEGORIES[seed % 4]], seed % 50)
    rng = random.Random(seed)
    writers = [t for t in episode.tools() if not t.read_only]
    calls = [episode.sample(rng.choice(writers), rng) for _ in range(2)]
    if None in calls:
        return
    alone = []
    for call in calls:
        fork = episode.fork()
        fork.call(call)
        alone.append({(table, key) for table, edits in fork.snapshot().items() for key in edits})
    ways = [episode.fork(), episode.fork()]
    answers = []
    for way, order in zip(ways, (calls, calls[::-1]), strict=True):
        answers.append({id(call): way.call(call) for call in order})
    if answers[0] == answers[1] and not alone[0] & alone[1]:  # neither met the other's effect
        assert ways[0].same(ways[1]) and ways[0].digest() == ways[1].digest()


def test_differences_are_readable(world):
    done, call = a_call(world, "book_flight")
    idle = done.fork()
    booked = done.call(call)
    lines = idle.diff(done)
    assert any(booked["booking_id"] in line and "not changed" in line for line in lines)
    assert any("should not have changed" in line for line in done.diff(idle))
    assert not idle.same(done) and idle.digest() != done.digest()
    more = done.fork()
    snapshot = more.snapshot()
    table = "travel/flights.booking"
    snapshot[table][booked["booking_id"]] = dict(snapshot[table][booked["booking_id"]], bags=5)
    more.restore(snapshot)
    assert any(".bags: 5, expected" in line for line in more.diff(done))


def test_the_same_row_made_twice_is_two_rows(world):
    episode, call = a_call(world, "create_fare_alert")
    first = episode.call(call)
    second = episode.call(call)
    if "error" not in second:
        assert first["alert_id"] != second["alert_id"]


def test_free_wording_does_not_count_but_its_presence_does(world):
    episode = world.episode(FLIGHTS, 2)
    booking = world.domain("travel/flights").entities["booking"]
    key, row = next((k, r) for k, r in episode.state()[booking.table].items() if not r["note"])
    ends = []
    for note in ("by the window", "a seat at the window please", None):
        other = episode.fork()
        other.tables.put(booking, key, row | {"note": note})
        ends.append(other)
    assert ends[0].same(ends[1]) and not ends[0].same(ends[2])


# Families and determinism ----------------------------------------------------------------------


def test_families_share_no_keys_and_no_texts(world):
    for category in CATEGORIES:
        entities = world.domain(category).entities
        seen = {family: set() for family in FAMILIES}
        for family in FAMILIES:
            for entity in entities.entities.values():
                names = [n for n, f in entity.fields.items() if f.kind in ("id", "text")]
                for seed in range(8):
                    rows = base_rows(entities, family, seed, entity.name).values()
                    seen[family] |= {row[n] for row in rows for n in names} - {None}
        assert not seen["train"] & (seen["dev"] | seen["test"])
        assert not seen["dev"] & seen["test"]


def test_episodes_are_the_same_in_every_process():
    code = (
        "import random; from sharpen.world.episode import World\n"
        "w = World()\n"
        "for c in ('travel/flights', 'finance/accounts'):\n"
        "    e = w.episode([c], 11, 'dev'); r = random.Random(5)\n"
        "    for t in e.tools():\n"
        "        call = e.sample(t, r); call and e.call(call)\n"
        "    print(e.digest(), hash('x'))"
    )
    runs = []
    for hash_seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        runs.append([line.split() for line in done.stdout.splitlines()])
    assert [line[0] for line in runs[0]] == [line[0] for line in runs[1]]
    assert runs[0][0][1] != runs[1][0][1], "the hash seeds were not in effect"


# The two small languages -----------------------------------------------------------------------


def test_expressions_work_out_and_refuse():
    scope = {"fare": 20, "n": 3, "flight": {"fare": 7}, "x": None}
    for source, wanted in {
        "fare * n + flight.fare": 67,
        "round(fare / n, 2)": 6.67,
        "'low' if fare < 30 else 'high'": "low",
        "x is None and n in [1, 3]": True,
        "2 ** n": 8,
        "max(fare, n) - min(fare, n)": 17,
        "days_between('2026-03-02', '2026-03-09')": 7,
        "add_minutes('09:30', 45)": "10:15",
    }.items():
        assert Expression(source)(scope) == wanted
    for source in ("__import__('os')", "[i for i in n]", "fare.x.y", "fare(", "lambda: 1", "n[0]"):
        with pytest.raises(ValueError):
            Expression(source)
    for source in ("1 / (n - 3)", "fare + 'a'", "9 ** 9 ** 9"):
        with pytest.raises(ToolFailure):
            Expression(source)(scope)
    with pytest.raises(SharpenError, match="unknown name"):
        Expression("price")(scope)


@pytest.mark.parametrize(
    "text, value, wanted, holds",
    [
        ("city", "Oslo", "oslo", True),
        ("fare <= most", 20, 20, True),
        ("fare < most", 20, 20, False),
        ("fare >= least", 20, 21, False),
        ("name contains words", "Red kite", "KITE", True),
        ("tags has tag", ["a", "b"], "b", True),
        ("fare in fares", 3, [1, 2], False),
        ("fare != other", 1, 2, True),
        ("fare = given?", 1, None, True),
        ("fare > least", None, 2, False),
    ],
)
def test_conditions(text, value, wanted, holds):
    condition = parse_condition(text)
    args = {condition.name: wanted}
    assert condition.holds({condition.field: value}, args) is holds


def test_parameters_and_conditions_that_cannot_be_read_are_refused():
    assert parse_named("limit?=5").value == 5 and not parse_named("note?").required
    for wrong in ("limit=5", "Two words", "a??"):
        with pytest.raises(ValueError):
            parse_named(wrong)
    with pytest.raises(ValueError):
        parse_condition("fare ~ most")


DOMAIN = """
category: test/shelf
about: Books on a shelf.
entities:
  book:
    fields:
      book_id: {id: "BO-####", about: book}
      title: {text: [a, b, c, d, e], about: title of the book}
tools:
  get_book:
    {op: get, entity: book, about: A., goal: b, ask: [c], say: [d]}
"""


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("op: get", "op: got", "op: expected one of"),
        ("entity: book,", "entity: shelf,", "no entity 'shelf'"),
        ("say: [d]", "say: [d], shown: [x]", "shown: unknown field, did you mean 'show'?"),
        ("say: [d]", "say: [d], show: [page]", "book has no field 'page'"),
        ("say: [d]", 'say: [d], require: {"title +": no}', "not an expression"),
        ("say: [d]", "say: [d], with: [page]", "parameter 'page' is neither"),
        ("{text: [a, b, c, d, e]", "{text: [a, b]", "at least 5 different values"),
        ("{text: [a, b, c, d, e]", "{text: colour", "no pool 'colour'"),
        ("{text: [a, b, c, d, e]", "{ref: shelf", "no entity 'shelf'"),
        ("about: book}", "about: book, about: tome}", "stands twice"),
        ("category: test/shelf", "category: ToolPool", "expected domain/subdomain"),
    ],
)
def test_what_is_wrong_with_a_domain_file_is_said(tmp_path, old, new, said):
    good = tmp_path / "good.yaml"
    bad = tmp_path / "bad.yaml"
    good.write_text(DOMAIN)
    assert list(load_domain(good).tools) == ["get_book"]
    assert old in DOMAIN
    bad.write_text(DOMAIN.replace(old, new, 1))
    with pytest.raises(DomainError, match=r"bad\.yaml") as caught:
        load_domain(bad)
    assert said in str(caught.value)


def test_all_problems_of_a_domain_file_are_said_at_once(tmp_path):
    second = DOMAIN.split("tools:\n")[1].replace("get_book", "see_book")
    path = tmp_path / "bad.yaml"
    path.write_text((DOMAIN + second).replace("op: get", "op: got"))
    with pytest.raises(DomainError) as caught:
        load_domain(path)
    assert [p.split(": ")[1] for p in caught.value.problems] == [
        "tools.get_book",
        "tools.see_book",
    ]


# Cards and words -------------------------------------------------------------------------------


def test_a_card_says_what_the_tool_is(world):
    row = card_row(world, world.tool("book_flight"))
    assert row == card_row(world, world.tool("book_flight"))
    assert json.loads(json.dumps(row)) == row
    assert row["category"] == "travel/flights" and row["read_only"] is False
    assert 0.9 < row["reliability"] < 1 and row["latency_ms"] > 0
    assert row["capabilities"] == ["reserve flight", "takes flight", "gives booking"]
    assert len(row["examples"]) == 2
    for example in row["examples"]:
        assert jsonschema_rs.is_valid(row["parameters"], example["arguments"])
        assert jsonschema_rs.is_valid(row["outputs"], example["result"])
        assert example["arguments"]["flight_id"] in example["request"]


def test_questions_for_missing_values_read_well(world):
    assert missing_question(world.tool("get_flight_status"), "flight_id") == (
        "What is the flight number?"
    )
    several = missing_question(world.tool("compare_fares"), "flight_ids")
    assert several == "What is the flight number of each?"
    task = missing_question(world.tool("add_action_item"), "task")
    assert task == "Could you tell me what has to be done?"


def test_phrases_speak_values():
    result = {"rows": [{"fare": 2.0, "id": "A"}, {"fare": 3, "id": "B"}], "ok": True, "n": None}
    said = fill("{rows.*.id}, {rows.0.fare}, {ok}, {n}, {kind}", result, {"kind": "gluten_free"})
    assert said == "A and B, 2, yes, none, gluten free"
    with pytest.raises(SharpenError, match="nothing for"):
        fill("{rows.9.id}", result)


# The environment -------------------------------------------------------------------------------


@pytest.fixture
def task(world) -> Task:
    """A booking and another change, two calls."""
    episode = world.episode(FLIGHTS, 4)
    calls = []
    for name in ("book_flight", "create_fare_alert"):
        call = episode.sample(world.tool(name), random.Random(3))
        episode.call(call)
        calls.append({"name": call.name, "arguments": call.arguments})
    gold = {"categories": FLIGHTS, "seed": 4, "family": "train", "calls": calls}
    return Task("t1", "Book it and watch the fares.", gold=gold, kind="toolworld")


def gold_message(task: Task) -> Message:
    calls = [ToolCall(c["name"], c["arguments"], f"c{i}") for i, c in enumerate(task.gold["calls"])]
    return Message("assistant", tool_calls=tuple(calls))


def test_parallel_calls_run_in_order_and_reach_the_end_state(world, task):
    env = ToolWorld(world)
    dialog = env.reset(task)
    assert len(dialog.tools) == 24 and dialog.messages[-1].content == task.instruction
    assert not env.end_state_reached() and env.differences()
    results, stop = env.step(gold_message(task))
    assert stop is None and env.end_state_reached() and env.differences() == []
    assert [(m.role, m.name, m.tool_call_id) for m in results] == [
        ("tool", "book_flight", "c0"),
        ("tool", "create_fare_alert", "c1"),
    ]
    assert [json.loads(m.content) for m in results] == [e.result for e in env.executed]
    assert all(executed.ok for executed in env.executed)
    assert env.step(Message("assistant", "Done.")) == ((), StopReason.ANSWERED)
    env.step(Message("assistant", tool_calls=gold_message(task).tool_calls[:1]))
    assert not env.end_state_reached(), "booked twice"
    env.reset(task)
    assert env.executed == [] and not env.end_state_reached()


def test_the_other_order_reaches_the_end_state_too(world, task):
    env = ToolWorld(world)
    env.reset(task)
    for call in reversed(gold_message(task).tool_calls):
        env.step(Message("assistant", tool_calls=(call,)))
    assert env.end_state_reached()


def test_injected_faults_can_be_recovered_from(world, task):
    env = ToolWorld(world)
    gold = json.loads(json.dumps(task.gold | {"faults": {"at": {0: "rate_limit"}}}))
    env.reset(Task("t2", "Go.", gold=gold))
    first, second = gold_message(task).tool_calls
    results, stop = env.step(Message("assistant", tool_calls=(first,)))
    assert "rate_limit" in results[0].content and stop is None and not env.executed[0].ok
    env.step(Message("assistant", tool_calls=(first, second)))
    assert env.end_state_reached()


def test_unknown_and_broken_calls_are_answered_with_errors(world, task):
    env = ToolWorld(world)
    offered = (world.tool("book_flight").spec, world.tool("create_fare_alert").spec)
    env.reset(Task(task.id, task.instruction, offered, task.gold))
    results, stop = env.step(Message("assistant", tool_calls=(ToolCall("get_flight_status"),)))
    assert stop is None and json.loads(results[0].content)["error"] == "unknown_tool"
    broken = parse_message('<tool_call>{"name": "book_flight", </tool_call>')
    results, stop = env.step(broken)
    assert stop is None and json.loads(results[0].content)["error"] == "invalid_call"
    assert env.step(gold_message(task))[1] is None and env.end_state_reached()


def test_the_call_limit_ends_the_episode_when_it_is_exceeded(world, task):
    env = ToolWorld(world, max_calls=2)
    env.reset(task)
    assert env.step(gold_message(task))[1] is None, "an answer may still come"
    results, stop = env.step(gold_message(task))
    assert stop is StopReason.TURNS and len(env.executed) == 2
    assert {json.loads(m.content)["error"] for m in results} == {"call_limit"}
    assert env.end_state_reached(), "what exceeds the limit is not run"


@pytest.mark.parametrize(
    "change, said",
    [
        ({"categories": ["travel/rockets"]}, "no category"),
        ({"family": "holdout"}, "family"),
        ({"seed": None, "faults": {"wind": 1}}, "does not describe an episode"),
        ({"faults": {"at": {"0": "explosion"}}}, "timeout or rate_limit"),
    ],
)
def test_gold_that_describes_no_episode_is_refused(world, task, change, said):
    with pytest.raises(SharpenError, match=said):
        ToolWorld(world).reset(Task("bad", "x", gold=task.gold | change))


def test_what_the_environment_cannot_do_is_said(world, task):
    with pytest.raises(SharpenError, match="reset"):
        ToolWorld(world).step(gold_message(task))
    with pytest.raises(SharpenError, match="'categories' is missing"):
        ToolWorld(world).reset(Task("bad", "x"))
    other = (world.tool("get_account_balance").spec,)
    with pytest.raises(SharpenError, match="'get_account_balance' is not of travel/flights"):
        ToolWorld(world).reset(Task("bad", "x", other, task.gold))
