"""Score plans written as graphs (WorFBench), and the actions of episodes (tau-bench).

A plan is text: `Node: 1: … Edge: (START,1) (1,2) …`. Benchmarks use both rewards; importers and
baselines read and write the plans.
"""

from __future__ import annotations

import graphlib
import re
from collections.abc import Iterable, Sequence

from sharpen.rewards.calls import ToolCallEvaluator
from sharpen.rewards.trajectory import words
from sharpen.rows import call_from_wire
from sharpen.types import Json, RowError, Score, Task, ToolCall, Trajectory

_NODE = re.compile(r"(?m)^[ \t]*(\d{1,4})[:.] ?(.*)$")
_EDGE = re.compile(r"(?i)\((START|\d{1,4}), ?(END|\d{1,4})\)")
_MAX_NODES = 200
_MIN_SIMILARITY = 0.5  # of two labels that may name the same node
_PART_NAMES = ("graph_f1", "node_f1", "edge_f1", "valid", "plan_success")
# names of tools that read and change nothing
READING_TOOL = re.compile(r"(?:get|find|list|search|calculate|check|think|can)(?:_|$)")


# Plans as text ------------------------------------------------------------------------------------


def read_plan(text: str) -> Json:
    """Read `Node:` and `Edge:` text as `nodes` and `edges`.

    START and END are left out: they are the nodes that nothing precedes or follows."""
    head, _, tail = text.partition("\nEdge")
    tasks = {number: task.strip() for number, task in _NODE.findall(head)[:_MAX_NODES]}
    written_edges = _EDGE.findall(tail or text)
    if not tasks or not written_edges:
        raise RowError("", "no graph in the answer")
    edges = [(a, b) for a, b in written_edges if a.isdigit() and b.isdigit()]
    for edge in edges:
        for number in edge:
            if number not in tasks:
                raise RowError("", f"an edge names node {number}, which is not there")
    nodes = [{"id": number, "task": task} for number, task in tasks.items()]
    return {"nodes": nodes, "edges": [list(edge) for edge in dict.fromkeys(edges)]}


def write_plan(gold: Json) -> str:
    """Write a plan as the text that `read_plan` takes."""
    ids = [node["id"] for node in gold["nodes"]]
    sources = {edge[0] for edge in gold["edges"]}
    targets = {edge[1] for edge in gold["edges"]}
    edges = [("START", node_id) for node_id in ids if node_id not in targets]
    edges += [tuple(edge) for edge in gold["edges"]]
    edges += [(node_id, "END") for node_id in ids if node_id not in sources]
    node_lines = [f"{node['id']}: {_label(node)}" for node in gold["nodes"]]
    edge_line = "Edge: " + " ".join(f"({a},{b})" for a, b in edges)
    return "\n".join(["Node:", *node_lines, edge_line])


def _label(node: Json) -> str:
    return str(node.get("tool") or node.get("task") or "")


# Comparison of graphs -----------------------------------------------------------------------------


def _similarity(a: str, b: str) -> float:
    """The share of words that two labels have in common; 1 for the same text."""
    if a.strip().casefold() == b.strip().casefold():
        return 1.0
    first = words(a.replace("_", " "))
    second = words(b.replace("_", " "))
    return len(first & second) / max(len(first | second), 1)


def _match_nodes(nodes: Sequence[Json], gold_nodes: Sequence[Json]) -> dict[str, str]:
    """Match the ids of nodes with gold's, the most similar ones first.

    The name of a tool has to be the same."""
    names_tools = any("tool" in node for node in gold_nodes)
    min_similarity = 1.0 if names_tools else _MIN_SIMILARITY
    candidates = []
    for gold_index, gold_node in enumerate(gold_nodes):
        for index, node in enumerate(nodes):
            similarity = _similarity(_label(node), _label(gold_node))
            candidates.append((-similarity, gold_index, index))
    gold_id_of: dict[str, str] = {}
    used_gold: set[int] = set()
    for negative_similarity, gold_index, index in sorted(candidates):
        node_id = nodes[index]["id"]
        is_free = node_id not in gold_id_of and gold_index not in used_gold
        if -negative_similarity >= min_similarity and is_free:
            used_gold.add(gold_index)
            gold_id_of[node_id] = gold_nodes[gold_index]["id"]
    return gold_id_of


def is_dag(edges: Iterable[Sequence[str]]) -> bool:
    """Whether the edges form no cycle."""
    graph = graphlib.TopologicalSorter()
    for source, target in edges:
        graph.add(target, source)
    try:
        graph.prepare()
    except graphlib.CycleError:
        return False
    return True


def _f1(right: int, predicted: int, expected: int) -> float:
    total = predicted + expected
    return 2 * right / total if total else 1.0


def _size_of_common_subgraph(
    nodes: Iterable[str], edges: set[tuple[str, str]], gold_edges: set[tuple[str, str]]
) -> int:
    """Returns the size of the largest subgraph that is induced in both graphs.

    It is found greedily: while an edge is in only one of the graphs, the node with most such edges
    is removed."""
    disagreeing: dict[str, set[str]] = {node: set() for node in nodes}
    for source, target in edges ^ gold_edges:
        if source in disagreeing and target in disagreeing:
            disagreeing[source].add(target)
            disagreeing[target].add(source)
    while disagreeing:
        worst = max(disagreeing, key=lambda node: len(disagreeing[node]))
        if not disagreeing[worst]:
            break
        for other in disagreeing.pop(worst) - {worst}:
            disagreeing[other].discard(worst)
    return len(disagreeing)


class PlanGraphReward:
    """Graph F1 of a plan: the largest induced subgraph that answer and gold have in common, against
    the nodes of both.

    Nodes are matched by their words, where WorFBench uses sentence embeddings."""

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        gold = task.gold
        text = trajectory.turns[-1].message.content if trajectory.turns else ""
        parts: dict[str, float] = dict.fromkeys(_PART_NAMES, 0.0)
        try:
            plan = read_plan(text)
        except RowError as error:
            return Score(0.0, parts, error.reason, solved=False)
        gold_id_of = _match_nodes(plan["nodes"], gold["nodes"])
        gold_edges = {tuple(edge) for edge in gold["edges"]}
        edges = {(gold_id_of.get(a, ""), gold_id_of.get(b, "")) for a, b in plan["edges"]}
        common_nodes = _size_of_common_subgraph(gold_id_of.values(), edges, gold_edges)
        node_count = len(plan["nodes"])
        gold_node_count = len(gold["nodes"])
        parts["graph_f1"] = _f1(common_nodes, node_count, gold_node_count)
        parts["node_f1"] = _f1(len(gold_id_of), node_count, gold_node_count)
        parts["edge_f1"] = _f1(len(edges & gold_edges), len(plan["edges"]), len(gold_edges))
        parts["valid"] = float(is_dag(plan["edges"]))
        success = parts["valid"] == 1 and parts["node_f1"] == 1 and parts["edge_f1"] == 1
        parts["plan_success"] = float(success)
        return Score(parts["graph_f1"], parts, solved=success)


# Actions ------------------------------------------------------------------------------------------


class ActionsReward:
    """Whether an episode made exactly gold's changing actions and said gold's outputs.

    Actions that only read are free, as where databases are compared; the share of gold's actions
    that were made is a part. Used where the tools cannot be executed here (tau-bench)."""

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        calls = [call for turn in trajectory.turns for call in turn.message.tool_calls]
        gold_calls = [call_from_wire(row, task.id, "gold.actions") for row in task.gold["actions"]]
        evaluator = ToolCallEvaluator(task.tools)
        texts = [turn.message.content for turn in trajectory.turns]
        said_text = _normalize_output(" ".join(texts))
        changes_match = evaluator.evaluate_calls(_changing(calls), _changing(gold_calls))
        actions_right = changes_match["overall_correct"]
        outputs = task.gold.get("outputs") or task.gold.get("communicate_info") or []
        outputs_told = all(_normalize_output(str(output)) in said_text for output in outputs)
        is_silent = not calls and not said_text.strip()  # silence solves nothing
        recall = evaluator.evaluate_calls(calls, gold_calls)["recall"]
        success = bool(actions_right and outputs_told and not is_silent)
        parts = {
            "actions_right": float(actions_right),
            "outputs_told": float(outputs_told),
            "success": float(success),
            "action_recall": 0.0 if is_silent else recall,
        }
        return Score(float(success), parts, solved=success)


def _changing(calls: Sequence[ToolCall]) -> list[ToolCall]:
    """The calls of tools that may change something."""
    return [call for call in calls if not READING_TOOL.match(call.name)]


def _normalize_output(text: str) -> str:
    return text.replace(",", "").casefold()
