"""The call evaluator: type-aware equality, defaults, allowed values, any order, references, and
Java and JavaScript values. `test_bfcl_oracle.py` compares it with the BFCL checker."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharpen import ToolCallEvaluator
from sharpen.rewards.calls import CallReward, as_call, equal_value, resolve
from sharpen.rewards.literals import read_literal
from sharpen.types import Message, StopReason, Task, ToolCall, ToolSpec, Trajectory, Turn

SPEC = ToolSpec(
    "find",
    "",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "limit": {"type": "integer", "default": 5},
            "near": {"type": "object"},
        },
        "required": ["city"],
    },
)


def call(name="find", **arguments):
    return {"name": name, "arguments": arguments}


@pytest.mark.parametrize(
    ("found", "wanted", "rate"),
    [
        (call(city="Rome"), call(city="Rome"), 1),
        (call(city=" rome "), call(city="Rome"), 1),
        (call(city="Rome", limit=5), call(city="Rome"), 1),
        (call(city="Rome"), call(city="Rome", limit=5), 1),
        (call(city="Rome", limit=5.0), call(city="Rome", limit=5), 1),
        (call(city="Rome", limit=6), call(city="Rome"), 1 / 2),
        (call(city="Rome", limit="5"), call(city="Rome"), 1 / 2),
        (call(city="Rome", limit=True), call(city="Rome", limit=1), 1 / 2),
        (call(near={"x": [1, {"y": "A"}]}), call(near={"x": [1.0, {"y": "a"}]}), 1),
        (call(city="Rome", near={"x": 1, "z": 2}), call(city="Rome", near={"x": 1}), 2 / 3),
        (call(limit=5), call(city="Rome"), 1 / 2),
        (call(city="Oslo"), call(city="Rome"), 1 / 2),
        (call(city="Rome", mood="good"), call(city="Rome"), 2 / 3),
    ],
)  # fmt: skip
def test_one_call(found, wanted, rate):
    verdict = ToolCallEvaluator([SPEC]).evaluate(found, wanted)
    assert verdict == {
        "tool_name_correct": True,
        "args_correct": rate == 1,
        "overall_correct": rate == 1,
        "args_match_rate": pytest.approx(rate),
    }


def test_the_name_decides_too():
    verdict = ToolCallEvaluator().evaluate(call("f", x=1), call("g", x=1))
    assert not verdict["tool_name_correct"] and not verdict["overall_correct"]
    assert verdict["args_correct"] and verdict["args_match_rate"] == 1


@pytest.mark.parametrize(
    "broken",
    [None, 3, "find", [], {}, {"name": 3}, {"name": "f", "arguments": "{"}, {"arguments": {}},
     {"name": "f", "arguments": [1]}, {"function": None}],
)  # fmt: skip
def test_malformed_calls_are_wrong_and_never_an_exception(broken):
    judge = ToolCallEvaluator([SPEC])
    assert not judge.evaluate(broken, call(city="Rome"))["overall_correct"]
    found = judge.evaluate_calls([broken, call(city="Rome")], [call(city="Rome")])
    assert not found["overall_correct"] and found["precision"] == 0.5 and found["recall"] == 1


def test_arguments_as_json_text_and_the_openai_shape_are_calls():
    wire = {"id": "c1", "function": {"name": "find", "arguments": '{"city": "Rome"}'}}
    assert ToolCallEvaluator([SPEC]).evaluate(wire, call(city="Rome"))["overall_correct"]


def test_sets_have_no_order_and_count_instances():
    judge = ToolCallEvaluator()
    a, b = call("f", x=1), call("f", x=2)
    assert judge.evaluate_calls([b, a], [a, b])["overall_correct"]
    twice = judge.evaluate_calls([a, a], [a])
    assert not twice["overall_correct"] and twice["precision"] == 0.5 and twice["recall"] == 1
    once = judge.evaluate_calls([a], [a, a])
    assert not once["overall_correct"] and once["precision"] == 1 and once["recall"] == 0.5
    near = judge.evaluate_calls([call("f", x=1, y=3)], [call("f", x=1, y=2)])
    assert near["f1"] == pytest.approx(0.5) and not near["overall_correct"]
    assert judge.evaluate_calls([call("g", x=1)], [a])["f1"] == 0
    assert judge.evaluate_calls([], [a])["f1"] == 0 and judge.evaluate_calls([a], [])["f1"] == 0
    assert judge.evaluate_calls([], []) == {
        "overall_correct": True, "precision": 1, "recall": 1, "f1": 1, "exact": []
    }  # fmt: skip


def test_an_exact_call_is_matched_before_a_near_one():
    a, b = call("f", x=1, y=1), call("f", x=1, y=2)
    found = ToolCallEvaluator().evaluate_calls([b, a], [a])
    assert found["recall"] == 1 and found["precision"] == 0.5


ROUTE = {"name": "route", "arguments": {"to": "Bonn"}, "label": "var1"}
JOKE = {"name": "joke", "arguments": {}, "label": "var2"}
PACE = {"name": "pace", "arguments": {"d": "$var1.distance$", "all": ["$var2$"]}, "label": "var3"}


def test_references_follow_what_they_point_at():
    judge = ToolCallEvaluator()
    wanted = [ROUTE, JOKE, PACE]
    other = [
        JOKE | {"label": "x"},
        ROUTE | {"label": "y"},
        {"name": "pace", "arguments": {"d": "$y.distance$", "all": ["$x$"]}},
    ]
    assert judge.evaluate_calls(wanted, wanted)["overall_correct"]
    assert judge.evaluate_calls(other, wanted)["overall_correct"]
    wrong_path = PACE | {"arguments": {"d": "$var1.time$", "all": ["$var2$"]}}
    assert not judge.evaluate_calls([ROUTE, JOKE, wrong_path], wanted)["overall_correct"]
    swapped = PACE | {"arguments": {"d": "$var2.distance$", "all": ["$var1$"]}}
    assert not judge.evaluate_calls([ROUTE, JOKE, swapped], wanted)["overall_correct"]
    elsewhere = [ROUTE | {"arguments": {"to": "Ulm"}}, JOKE, PACE]
    assert judge.evaluate_calls(elsewhere, wanted)["f1"] < 0.9, "what it points at differs too"


def test_unlabelled_calls_go_by_their_place():
    plain = [ToolCall("route", {"to": "Bonn"}), ToolCall("pace", {"d": "$var1.distance$"})]
    index = [ToolCall("route", {"to": "Bonn"}), ToolCall("pace", {"d": {"$from": "s1.distance"}})]
    assert ToolCallEvaluator().evaluate_calls(plain, index)["overall_correct"]
    first = [ToolCall("a"), ToolCall("b", {"x": "API_call_0"})]
    assert resolve(first)[1].arguments["x"] != "API_call_0"
    ahead = [ToolCall("b", {"x": "$var2.y$"}), ToolCall("a")]
    assert resolve(ahead)[0].arguments == {"x": "$var2.y$"}, "nothing earlier: it stays"


ALLOWED = {"city": ["New York", "NYC"], "limit": [5, ""], "near": [{"x": [1, 2], "y": ["", 3]}, ""]}


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ({"city": "NYC"}, True),
        ({"city": "new-york"}, True),
        ({"city": "York"}, False),
        ({"city": "NYC", "limit": 5}, True),
        ({"city": "NYC", "limit": 5.0}, False),
        ({"city": "NYC", "limit": 4}, False),
        ({"limit": 5}, False),
        ({"city": "NYC", "near": {"x": 2}}, True),
        ({"city": "NYC", "near": {"x": 2, "y": 3}}, True),
        ({"city": "NYC", "near": {"y": 3}}, False),
        ({"city": "NYC", "near": {"x": 2, "z": 1}}, False),
        ({"city": "NYC", "extra": 1}, False),
    ],
)
def test_allowed_values(arguments, right):
    judge = ToolCallEvaluator([SPEC], allowed=True)
    wanted = {"name": "find", "arguments": ALLOWED}
    assert judge.evaluate(call(**arguments), wanted)["overall_correct"] is right
    task = Task("t", "", (SPEC,), {"calls": [wanted], "match": "allowed"})
    message = Message("assistant", tool_calls=(ToolCall("find", arguments),))
    score = CallReward().score(task, Trajectory("t", (Turn(message),), StopReason.ANSWERED))
    assert score.value == score.parts["exact_call"] == right


def test_no_call_is_right_where_none_is_wanted():
    task = Task("t", "", (SPEC,), {"calls": []})
    quiet = Trajectory("t", (Turn(Message("assistant", "No tool fits.")),), StopReason.ANSWERED)
    assert CallReward().score(task, quiet).value == 1
    loud = Message("assistant", tool_calls=(ToolCall("find", {"city": "Rome"}),))
    assert CallReward().score(task, Trajectory("t", (Turn(loud),), StopReason.ANSWERED)).value == 0


K = {"k": 1, "b": True}


@pytest.mark.parametrize(
    ("text", "language", "kind", "inner", "value"),
    [
        ("5L", "java", "long", "", 5),
        ("5", "java", "long", "", "5"),
        ("1.5f", "java", "float", "", 1.5),
        ("2e3", "java", "double", "", 2000.0),
        ("true", "java", "boolean", "", True),
        ('new ArrayList<>(Arrays.asList("a", "b"))', "java", "ArrayList", "String", ["a", "b"]),
        ("new ArrayList<Integer>() {{ add(1); add(2); }}", "java", "ArrayList", "integer", [1, 2]),
        ("new ArrayList<>()", "java", "ArrayList", "String", []),
        ("new int[]{1, 2}", "java", "Array", "integer", [1, 2]),
        ('new HashMap<>() {{ put("k", 1); put("b", true); }}', "java", "HashMap", "", K),
        ("7n", "javascript", "Bigint", "", 7),
        ("'hi'", "javascript", "String", "", "hi"),
        ("[1, 2]", "javascript", "array", "integer", [1, 2]),
        ("[[1, 2], [3, 4]]", "javascript", "array", "array", [[1, 2], [3, 4]]),
        ("{a: 1, 'b': ['x', 'y']}", "javascript", "dict", "", {"a": 1, "b": ["x", "y"]}),
        ("someVariable", "javascript", "dict", "", "someVariable"),
    ],
)  # fmt: skip
def test_java_and_javascript_values(text, language, kind, inner, value):
    found = read_literal(text, language, kind, inner)
    assert found == value and type(found) is type(value)


BAIT = [
    "new HashMap<" * 800, "new ArrayList<" + " " * 9000, "{" + "a:" * 4500, "[" * 9900,
    "new HashMap<>() { {" + " " * 9000, "{a: 1," + " " * 9000, "-" + "1" * 9000 + "x",
    'put("' * 1900, "add(" * 2000, "x" * 1_000_000, "{a:" + ", " * 4500, "new " * 2400,
]  # fmt: skip


@pytest.mark.parametrize("bait", BAIT)
def test_no_text_makes_the_patterns_slow(bait):
    started = time.process_time()
    for kind in ("ArrayList", "Array", "HashMap", "double", "String"):
        read_literal(bait, "java", kind, "integer")
    for kind in ("array", "dict", "float", "String"):
        read_literal(bait, "javascript", kind, "integer")
    assert time.process_time() - started < 1.0


def test_deep_and_strange_values_are_bounded():
    deep = value = {}
    for _ in range(5000):
        value["x"] = value = {}
    call_ = ToolCall("find", {"city": deep})
    judge = ToolCallEvaluator([SPEC])
    assert not judge.evaluate_calls([call_], [call(city="Rome")])["overall_correct"]
    assert not judge.evaluate(call_, call(city="Rome"))["overall_correct"]
    assert not judge.evaluate(call(city=float("nan")), call(city="Rome"))["overall_correct"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(json_values, json_values)
def test_equality_is_an_equality(a, b):
    assert equal_value(a, a) and equal_value(a, b) == equal_value(b, a)


made_calls = st.builds(
    ToolCall,
    st.sampled_from("fg"),
    st.dictionaries(st.sampled_from("xy"), json_values, max_size=2),
)


@given(st.lists(made_calls, max_size=5), st.randoms())
def test_a_set_equals_itself_in_any_order_and_no_smaller_set(calls, random):
    judge = ToolCallEvaluator()
    mixed = list(calls)
    random.shuffle(mixed)
    assert judge.evaluate_calls(mixed, calls)["overall_correct"]
    if calls:
        assert not judge.evaluate_calls(mixed[1:], calls)["overall_correct"]
        assert judge.evaluate_calls(mixed[1:], calls)["f1"] < 1
    assert as_call(ToolCall("f")) == ToolCall("f")
