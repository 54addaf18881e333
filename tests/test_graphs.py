"""Plans as graphs of text, and the actions of a service, against gold."""

from __future__ import annotations

import pytest

from sharpen.rewards.graphs import ActionsReward, PlanGraphReward, is_dag, read_plan, write_plan
from sharpen.types import Message, RowError, StopReason, Task, ToolCall, Trajectory, Turn

TEXT = """Node:
1: find the red book
2: open the drawer
3: put the red book in the drawer
Edge: (START,1) (START,2) (1,3) (2,3) (3,END)"""
GOLD = read_plan(TEXT)


def scored(text, gold=GOLD):
    made = Trajectory("t", (Turn(Message("assistant", text)),), StopReason.ANSWERED)
    return PlanGraphReward().score(Task("t", "", (), gold, "planning"), made)


def test_a_plan_is_read_as_it_is_written():
    assert read_plan(write_plan(GOLD)) == GOLD and len(GOLD["nodes"]) == 3
    assert GOLD["edges"] == [["1", "3"], ["2", "3"]]
    for text in ("", "Node:\n1: a", "Edge: (START,1)", "Node:\n1: a\nEdge: (1,2)"):
        with pytest.raises(RowError):
            read_plan(text)


@pytest.mark.parametrize(
    ("text", "graph", "node", "edge", "success"),
    [
        (TEXT, 1, 1, 1, 1),
        (TEXT.replace("the red book\n", "the small red book\n"), 1, 1, 1, 1),  # alike by its words
        (TEXT.replace("3: put the red book in the drawer", "3: go home"), 2 / 3, 2 / 3, 0, 0),
        (TEXT.replace("(2,3) ", ""), 2 / 3, 1, 2 / 3, 0),
        (TEXT.replace("(1,3)", "(3,1)"), 2 / 3, 1, 1 / 2, 0),
        (TEXT.replace("(3,END)", "(3,1)"), 2 / 3, 1, 4 / 5, 0),  # a circle
        (TEXT.split("Edge")[0] + "Edge: (START,1)", 2 / 3, 1, 0, 0),
        ("I would open the drawer.", 0, 0, 0, 0),
    ],
)
def test_graph_f1(text, graph, node, edge, success):
    parts = scored(text).parts
    assert (parts["graph_f1"], parts["node_f1"]) == pytest.approx((graph, node))
    assert (parts["edge_f1"], parts["plan_success"]) == pytest.approx((edge, success))


def test_a_plan_in_several_parts_is_whole():
    text = "Node:\n1: a b\n2: c d\n3: e f\nEdge: (START,1) (START,3) (1,2) (2,END) (3,END)"
    assert scored(text, read_plan(text)).parts["graph_f1"] == 1.0


def test_names_of_tools_are_exact():
    gold = {"nodes": [{"id": "1", "tool": "get_book"}], "edges": []}
    assert scored("Node:\n1: get_book\nEdge: (START,1) (1,END)", gold).value == 1
    assert scored("Node:\n1: get_books\nEdge: (START,1) (1,END)", gold).value == 0


@pytest.mark.parametrize(
    ("edges", "right"),
    [([], 1), (["12", "23", "13"], 1), (["12", "21"], 0), (["11"], 0), (["12", "23", "32"], 0)],
)
def test_circles(edges, right):
    assert is_dag(edges) == bool(right)


CANCEL = {"name": "cancel_order", "arguments": {"id": "W1"}}
LOOK = {"name": "get_order", "arguments": {"id": "W1"}}


@pytest.mark.parametrize(
    ("made", "said", "success", "recall"),
    [
        ([LOOK, CANCEL], "You get 1,200 back.", 1, 1),
        ([CANCEL], "That is 1200.", 1, 0.5),  # what is only read is free
        ([LOOK, CANCEL], "Done.", 0, 1),
        ([LOOK, CANCEL, CANCEL], "1200", 0, 1),
        ([LOOK], "1200", 0, 0.5),
        ([], "", 0, 0),
    ],
)
def test_actions(made, said, success, recall):
    calls = tuple(ToolCall(**call) for call in made)
    turns = (Turn(Message("assistant", tool_calls=calls)), Turn(Message("assistant", said)))
    gold = {"actions": [LOOK, CANCEL], "outputs": ["1200"]}
    found = ActionsReward().score(
        Task("t", "", (), gold, "tau"), Trajectory("t", turns, StopReason.ANSWERED)
    )
    assert found.value == success and found.parts["action_recall"] == recall


def test_a_refusal_needs_words():
    task, stop = Task("t", "", (), {"actions": []}, "tau"), StopReason.ANSWERED
    for said, right in (("I cannot do that.", 1), ("", 0)):
        made = Trajectory("t", (Turn(Message("assistant", said)),), stop)
        assert ActionsReward().score(task, made).value == right
