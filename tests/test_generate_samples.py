"""Single samples, trajectories, renamed tools, reasoning, long context, and data for own tools."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sharpen.data.check import CheckReport, check_rows, tool_problems
from sharpen.data.generate.samples import (
    Filters,
    mask_functions,
    preference_pair,
    sft_from_trajectories,
)
from sharpen.data.generate.schema_values import draw_value
from sharpen.data.generate.user_tools import build_for_tools, description_to_goal, rephrase
from sharpen.rows import dialog_from_row, dialog_to_row
from sharpen.spec.data_generators import (
    LongContextDataGenerator,
    ReActDataGenerator,
    ReasoningDataGenerator,
    ToolCallDataGenerator,
)
from sharpen.types import (
    Dialog,
    Message,
    Score,
    SharpenError,
    StopReason,
    Task,
    ToolCall,
    ToolSpec,
    Trajectory,
    Turn,
)
from sharpen.world.state import seeded_rng

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_tools"
TOOLS = [
    {
        "name": "check_inventory",
        "description": "Tells how many pieces there are.",
        "parameters": {
            "type": "object",
            "properties": {"product_id": {"type": "string"}, "city": {"type": "string"}},
            "required": ["product_id"],
        },
    }
]


class Scripted:
    """A policy that says what it was told to say."""

    def __init__(self, *texts: str, stop: StopReason = StopReason.ANSWERED):
        self.texts = list(texts)
        self.stop = stop
        self.prompts = []

    def respond(self, dialogs, sampling):
        self.prompts += [dialog.messages[-1].content for dialog in dialogs]
        return [Turn(Message("assistant", self.texts.pop(0)), self.stop) for _ in dialogs]


# Samples ---------------------------------------------------------------------------------------


def test_tool_call_samples():
    maker = ToolCallDataGenerator(TOOLS)
    single = maker.generate_sft_sample(
        "Any P1?", "check_inventory", {"product_id": "P1"}, "3", "3."
    )
    assert [m["role"] for m in single["messages"]] == ["user", "assistant", "tool", "assistant"]
    step = {"tool": "check_inventory", "args": {"product_id": "P2"}, "result": "0"}
    both = maker.generate_multi_tool_sample("P2, twice", [step, step | {"final_response": "None."}])
    assert len(both["messages"]) == 6
    failing = {"tool": "check_inventory", "args": {"product_id": "P2"}, "error": "timeout"}
    retry = maker.generate_retry_sample("P2?", [failing], [step | {"final_response": "None."}])
    assert json.loads(retry["messages"][2]["content"]) == {"error": "timeout"}
    assert retry["messages"][3]["content"] == "That failed, so I try again."
    none = maker.generate_no_tool_sample("Hello", "Hello!")
    assert len(none["messages"]) == 2 and len(none["tools"]) == 1
    for row in (single, both, retry, none):
        assert list(tool_problems(dialog_from_row(row), CheckReport(""))) == []


def test_tool_call_samples_refuse_what_does_not_fit():
    maker = ToolCallDataGenerator(TOOLS)
    with pytest.raises(SharpenError, match="'sell' is not offered"):
        maker.generate_sft_sample("q", "sell", {}, "r", "a")
    with pytest.raises(SharpenError, match="product_id"):
        maker.generate_sft_sample("q", "check_inventory", {}, "r", "a")
    with pytest.raises(SharpenError, match="final_response"):
        maker.generate_multi_tool_sample("q", [])


def test_react_text_and_logs():
    steps = [
        {"thought": "look", "action": "find", "action_input": {"q": 1}, "observation": "2"},
        {"thought": "done", "final_answer": "2"},
    ]
    maker = ReActDataGenerator()
    text = maker.generate_react_trajectory("q", steps)
    assert text == (
        'Thought: look\nAction: find\nAction Input: {"q": 1}\nObservation: 2\n'
        "Thought: done\nFinal Answer: 2\n"
    )
    logs = [{"question": "q", "trajectory": steps, "success": s} for s in (True, False)]
    assert maker.generate_from_logs(logs) == [
        {"question": "q", "react_trajectory": text, "tools_used": ["find"]}
    ]
    with pytest.raises(SharpenError, match="step 1 has no observation"):
        maker.generate_react_trajectory(
            "q", [{k: v for k, v in steps[0].items() if k != "observation"}]
        )


SPEC = ToolSpec("check_inventory", "Tells how many.", TOOLS[0]["parameters"])
TASK = Task("t1", "Any P1?", (SPEC,), kind="selection")


def walk(
    score: float | None, arguments: dict | None = None, stop=StopReason.ANSWERED
) -> Trajectory:
    call = ToolCall("check_inventory", {"product_id": "P1"} if arguments is None else arguments)
    turns = (
        Turn(Message("assistant", tool_calls=(call,)), results=(Message("tool", "3"),)),
        Turn(Message("assistant", f"There are {score}.")),
    )
    return Trajectory("t1", turns, stop, None if score is None else Score(score))


def test_trajectories_become_dialogs_if_they_are_fit():
    trajectories = [
        walk(1.0),
        walk(1.0),
        walk(0.5),
        walk(None),
        walk(2.0, {}),
        walk(3.0, stop=StopReason.TURNS),
    ]
    dialogs, reasons = sft_from_trajectories((TASK, trajectory) for trajectory in trajectories)
    assert [d.messages[-1].content for d in dialogs] == ["There are 1.0."]
    assert [m.role for m in dialogs[0].messages] == ["user", "assistant", "tool", "assistant"]
    expected = {"duplicate": 1, "score": 2, "invalid call": 1, "stopped by turns": 1}
    assert dict(reasons) == expected
    lenient, _ = sft_from_trajectories([(TASK, walk(0.5))], Filters(min_score=0.5, max_turns=1))
    assert lenient == []


def test_preference_pairs_drop_ties_and_keep_scores():
    assert preference_pair(TASK, [walk(1.0), walk(1.0)]) is None
    assert preference_pair(TASK, [walk(1.0), walk(None)]) is None
    pair = preference_pair(TASK, [walk(0.2), walk(0.9), walk(0.5)])
    assert pair is not None and (pair.chosen_score, pair.rejected_score) == (0.9, 0.2)
    assert pair.chosen[-1].content == "There are 0.9." and pair.prompt == TASK.messages
    assert preference_pair(TASK, [walk(0.2), walk(0.9)], margin=0.8) is None


def test_masked_functions_still_fit_their_schemas():
    call = ToolCall("check_inventory", {"product_id": "P1", "city": "Oslo"}, "c1")
    messages = (
        Message("user", "check_inventory of P1"),
        Message("assistant", "Plan: check_inventory.", (call,)),
        Message("tool", "3", name="check_inventory", tool_call_id="c1"),
        Message("assistant", "3."),
    )
    dialog = Dialog(messages, (SPEC,), "d1", metadata={"target_tools": ["check_inventory"]})
    masked = mask_functions(dialog)
    name = masked.tools[0].name
    assert name.startswith("func_") and masked.messages[1].tool_calls[0].name == name
    assert masked.messages[1].tool_calls[0].arguments == {"arg_1": "P1", "arg_2": "Oslo"}
    assert masked.messages[1].content == f"Plan: {name}." and masked.messages[0] == messages[0]
    assert masked.messages[2].name == name and masked.metadata["target_tools"] == [name]
    assert list(tool_problems(dialog_from_row(dialog_to_row(masked)), CheckReport(""))) == []
    assert mask_functions(dialog) == masked != mask_functions(dialog, seed=1)
    error = '{"error":"invalid_argument","message":"parameters: product_id, city"}'
    wrong = replace(messages[2], content=error)
    masked = mask_functions(replace(dialog, messages=(*messages[:2], wrong, *messages[3:])))
    assert masked.messages[2].content == error.replace("product_id, city", "arg_1, arg_2")


# Reasoning and long context --------------------------------------------------------------------


def boxed(response: str, answer: str) -> bool:
    return f"\\boxed{{{answer}}}" in response


def test_only_verified_reasoning_is_kept():
    policy = Scripted("<think>2+2</think> \\boxed{4}", "\\boxed{5}")
    rows = ReasoningDataGenerator(policy, boxed).generate_cot_data(["2+2?", "3+3?"], ["4", "6"])
    assert [row["question"] for row in rows] == ["2+2?"] and rows[0]["answer"] == "4"
    assert "2+2?" in policy.prompts[0]
    cut = Scripted("\\boxed{4}", stop=StopReason.TOKENS)
    assert ReasoningDataGenerator(cut, boxed).generate_cot_data(["2+2?"], ["4"]) == []
    policy = Scripted("a \\boxed{4}", "b \\boxed{4}", "a \\boxed{4}", "\\boxed{9}", "c \\boxed{4}")
    solutions = ReasoningDataGenerator(policy, boxed).generate_diverse_solutions("2+2?", "4")
    assert solutions == ["a \\boxed{4}", "b \\boxed{4}", "c \\boxed{4}"]
    assert len(set(policy.prompts)) == 5
    with pytest.raises(SharpenError, match="2 questions, but 1 answers"):
        ReasoningDataGenerator(policy, boxed).generate_cot_data(["a", "b"], ["c"])


@pytest.mark.parametrize("position", [0.0, 0.5, 1.0])
def test_needle_lies_where_it_should(position):
    needle = "The password of the old lighthouse is marmalade."
    row = LongContextDataGenerator().generate_needle_in_haystack(6000, needle, position)
    assert row["context"].count(needle) == 1 and row["answer"] == needle
    assert 5800 <= len(row["context"]) <= 6000
    assert abs(row["context"].index(needle) / len(row["context"]) - position) < 0.03


def test_long_context_rows_and_their_limits():
    maker = LongContextDataGenerator(filler=["It rained."])
    assert "It rained." in maker.generate_needle_in_haystack(200, "Needle.")["context"]
    with pytest.raises(SharpenError, match="does not fit"):
        maker.generate_needle_in_haystack(200, "Needle.", 1.5)
    row = maker.generate_multi_doc_qa(["one", "two"], "Which?", [1], "two")
    assert "=== Document 2 ===\ntwo" in row["context"] and row["relevant_docs"] == [1]
    with pytest.raises(SharpenError, match="no document 2"):
        maker.generate_multi_doc_qa(["one", "two"], "Which?", [2])
    with pytest.raises(SharpenError, match="written by a policy"):
        maker.generate_long_form_completion("Write.", 100)
    written = LongContextDataGenerator(Scripted("text")).generate_long_form_completion("Go.", 100)
    assert (written["completion"], written["length"], written["complete"]) == ("text", 4, True)
    with pytest.raises(SharpenError, match="wrote nothing"):
        LongContextDataGenerator(Scripted("")).generate_long_form_completion("Go.", 100)


# Own tools -------------------------------------------------------------------------------------


def test_own_python_tools_are_executed(tmp_path):
    manifest = build_for_tools(EXAMPLE / "my_tools.py", tmp_path / "a")
    assert build_for_tools(EXAMPLE / "my_tools.py", tmp_path / "b") == manifest
    assert manifest["left_out"] == {} and manifest["rows"]["agent_tools/tools.jsonl"] == 3
    instructions = []
    for path in sorted((tmp_path / "a").rglob("*.jsonl")):
        assert all(not problems for _, problems in check_rows(path, CheckReport("")))
    for line in (tmp_path / "a/agent_sft/train.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        instructions.append(row["messages"][0]["content"])
        for message in row["messages"]:
            if message["role"] == "tool" and message["name"] == "check_stock":
                answer = json.loads(message["content"])
                assert answer["pieces"] == {"tea": 12, "coffee": 0, "cocoa": 30}.get(
                    answer["product"], answer["pieces"]
                )
    assert len(set(instructions)) == len(instructions)


def test_openapi_rows_claim_no_result(tmp_path):
    build_for_tools(EXAMPLE / "openapi.json", tmp_path)
    lines = (tmp_path / "agent_sft/train.jsonl").read_text("utf-8").splitlines()
    for row in map(json.loads, lines):
        assert all(m["role"] != "tool" for m in row["messages"])
        assert row["metadata"]["executed"] is False
    names = {t["function"]["name"] for row in map(json.loads, lines) for t in row["tools"]}
    assert names == {"getOrder", "cancelOrder", "placeOrder"}


def test_a_tool_that_never_succeeds_is_left_out_and_named(tmp_path):
    file = tmp_path / "tools.py"
    file.write_text(
        "from sharpen import tool\n"
        "@tool\ndef broken(city: str) -> str:\n    'Breaks.'\n    raise ValueError('no luck')\n"
        "@tool\ndef fine(city: str) -> str:\n    'Greets a city.'\n    return f'Hello {city}'\n"
    )
    manifest = build_for_tools(file, tmp_path / "out")
    assert list(manifest["left_out"]) == ["broken"] and "no luck" in manifest["left_out"]["broken"]
    assert manifest["rows"]["agent_sft/train.jsonl"] > 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "api.json:1:2: not YAML"),
        ("[]", "has no paths"),
        ('{"paths": {}}', "has no operations"),
        ('{"paths": {"/a": {"get": {"parameters": [{"$ref": "#/x"}]}}}}', "leads nowhere"),
        (
            '{"paths": {}, "a": {"$ref": "#/a/b"}, "b": {"$ref": "#/b"}}',
            "contains itself",
        ),
        (
            '{"paths": {"/a": {"get": {"operationId": "x"}, "put": {"operationId": "x"}}}}',
            "two operations are called 'x'",
        ),
    ],
)
def test_bad_openapi_is_one_line(sharpen, tmp_path, text, problem):
    file = tmp_path / "api.json"
    file.write_text(text)
    code, _, err = sharpen("data", "build", "--tools", str(file), "--out", str(tmp_path / "out"))
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and problem in err


def test_values_come_from_the_schema():
    rng = seeded_rng(1)
    assert draw_value("x", {"enum": ["a"]}, "train", rng) == "a"
    assert 5 <= draw_value("n", {"type": "integer", "minimum": 5, "maximum": 6}, "train", rng) <= 6
    nested = {"type": "object", "properties": {"on": {"type": "boolean"}}}
    assert isinstance(draw_value("o", nested, "dev", rng)["on"], bool)
    many = {"type": "array", "items": {"type": "string", "format": "date"}, "minItems": 2}
    assert all(day.startswith("2028-") for day in draw_value("d", many, "test", rng))
    train = {draw_value("city", {"type": "string"}, "train", rng) for _ in range(200)}
    assert not train & {draw_value("city", {"type": "string"}, "test", rng) for _ in range(200)}
    assert description_to_goal("Finds the van. It is red.") == "find the van"
    assert description_to_goal("Fetches mail.") == "fetch mail"
    assert description_to_goal("Copies a file") == "copy a file"


def test_a_wording_that_loses_a_value_is_not_used():
    values = {"c": "Oslo", "n": 3}
    keeps_all = Scripted('"3 for Oslo?"')
    assert rephrase("Plain Oslo 3.", values, keeps_all, 0) == "3 for Oslo?"
    loses_one = Scripted("Oslo?")
    assert rephrase("Plain Oslo 3.", values, loses_one, 0) == "Plain Oslo 3."


def test_build_command(sharpen, tmp_path):
    tools = ["--tools", str(EXAMPLE / "my_tools.py")]
    code, _, err = sharpen("data", "build", *tools)
    assert code == 2 and "--tools needs --out" in err
    out = tmp_path / "out"
    code, text, _ = sharpen("data", "build", *tools, "--out", str(out), "--rows", "40", "--json")
    shown = json.loads(text.splitlines()[-1])
    assert code == 0 and shown["rows"]["agent_sft/train.jsonl"] == 32
