"""Rows ↔ nouns: nothing lost, wrong rows named."""

from __future__ import annotations

import pytest

from sharpen.rows import (
    dialog_from_row,
    dialog_to_row,
    message_from_wire,
    message_to_wire,
    preference_from_row,
    preference_to_row,
    task_from_row,
    task_to_row,
)
from sharpen.types import Message, RowError, ToolCall

TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "F.", "parameters": {"type": "object"}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
ROW = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "1", "name": "f", "tool_call_id": "c1"},
        {"role": "assistant", "content": "done"},
    ],
    "tools": [TOOL],
    "id": "r1",
    "task_type": "tool_selection",
    "metadata": {"source": "test"},
}


def test_dialog_round_trip():
    dialog = dialog_from_row(ROW)
    assert dialog.messages[2].tool_calls == (ToolCall("f", {"x": 1}, "c1"),)
    assert dialog_to_row(dialog) == ROW


def test_a_weight_of_0_is_kept():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    wrong = {"role": "assistant", "content": "c", "weight": 0}
    dialog = dialog_from_row({"messages": [*messages, wrong, messages[1] | {"weight": 1}]})
    assert [m.trained for m in dialog.messages] == [True, True, False, True]
    assert dialog_to_row(dialog)["messages"] == [*messages, wrong, messages[1]]
    assert "weight" not in message_to_wire(dialog.messages[2], True)  # what a server would refuse


def test_other_spellings_are_read():
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [
                {"name": "f", "arguments": '{"x": 1}'}, {"function": {"name": "f", "arguments": ""}}
            ]},
        ],
        "tools": '[{"name": "f"}]',
        "extra": 5,
    }  # fmt: skip
    dialog = dialog_from_row(row)
    assert dialog.messages[0].content == "ab"
    assert [c.arguments for c in dialog.messages[1].tool_calls] == [{"x": 1}, {}]
    assert dialog.metadata == {"extra": 5}


def test_arguments_are_text_only_on_the_wire():
    wire = message_to_wire(Message("assistant", tool_calls=(ToolCall("f", {"x": "é"}),)), True)
    assert wire["tool_calls"][0]["function"]["arguments"] == '{"x": "é"}'


def test_preference_and_task_round_trip():
    pair = {
        "prompt": [{"role": "user", "content": "q"}],
        "chosen": [{"role": "assistant", "content": "a"}],
        "rejected": [{"role": "assistant", "content": "b"}],
        "tools": [TOOL],
        "chosen_score": 1.0,
        "rejected_score": 0.25,
        "id": "p",
    }
    assert preference_to_row(preference_from_row(pair)) == pair
    task = {
        "id": "t",
        "instruction": "go",
        "tools": [TOOL],
        "gold": {"calls": []},
        "kind": "call",
        "difficulty": "easy",
        "context": [{"role": "system", "content": "s"}],
    }
    assert task_to_row(task_from_row(task)) == task
    assert [m.role for m in task_from_row(task).messages] == ["system", "user"]


def changed(**fields):
    return {**ROW, **fields}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "messages: expected a non-empty list"),
        (changed(messages=[]), "non-empty"),
        (changed(messages=["hi"]), r"messages\[0\]: expected an object, found str"),
        (changed(messages=[{"role": "robot", "content": ""}]), "found 'robot'"),
        (changed(messages=[{"role": "user", "content": 5}]), r"messages\[0\].content"),
        (changed(messages=[{"role": "user", "tool_calls": [CALL]}]), "only an assistant"),
        (changed(messages=[{"role": "assistant", "tool_calls": {}}, 1]), r"messages\[1\]"),
        (changed(messages=[{"role": "assistant", "tool_calls": [{}]}]), "with a name"),
        (
            changed(
                messages=[{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]
            ),
            "arguments: not JSON",
        ),
        (
            changed(
                messages=[{"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}]
            ),
            "expected an object, found list",
        ),
        (changed(messages=[{"role": "user", "content": "", "weight": 0}]), "0 on 'user'"),
        (changed(messages=[{"role": "assistant", "content": "", "weight": 0.5}]), "weight: .*0.5"),
        (changed(tools={}), "tools: expected a list"),
        (changed(tools="[" * 5), "tools: not JSON"),
        (changed(tools=[{"name": ""}]), r"tools\[0\]: expected an object with a name"),
        (changed(tools=[TOOL, TOOL]), "'f' stands twice"),
        (changed(tools=[{"name": "f", "parameters": []}]), None),
        (changed(tools=[{"name": "f", "parameters": [1]}]), "expected a JSON schema"),
        (changed(id=[1]), "id: expected text"),
        (changed(metadata=[1]), "metadata: expected an object"),
    ],
)
def test_wrong_rows_are_named(row, reason):
    if reason is None:
        dialog_from_row(row)
        return
    with pytest.raises(RowError, match=reason) as caught:
        dialog_from_row(row, "x.jsonl:3")
    assert str(caught.value).startswith("x.jsonl:3: ") and "\n" not in str(caught.value)


def test_wrong_tasks_and_pairs_are_named():
    with pytest.raises(RowError, match="instruction: expected text"):
        task_from_row({"instruction": 3})
    with pytest.raises(RowError, match="gold: expected an object"):
        task_from_row({"instruction": "x", "gold": [1]})
    with pytest.raises(RowError, match="chosen: expected a non-empty list"):
        preference_from_row({"prompt": [{"role": "user", "content": "q"}]})
    silent = [{"role": "assistant", "content": "a", "weight": 0}]
    with pytest.raises(RowError, match="weight: a chosen or rejected message cannot have weight 0"):
        preference_from_row(dict.fromkeys(("prompt", "chosen", "rejected"), silent))
    with pytest.raises(RowError, match="chosen_score: expected a number"):
        preference_from_row(
            {k: [{"role": "user"}] for k in ("prompt", "chosen", "rejected")}
            | {"chosen_score": "9"}
        )


@pytest.mark.parametrize("field", ["name", "tool_call_id"])
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_a_message_keeps_its_name_and_id(role, field):
    wire = {"role": role, "content": "x", field: "y"}
    assert message_to_wire(message_from_wire(wire)) == wire
