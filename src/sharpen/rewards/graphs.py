"""Plans as graphs of text (`Node: 1: … Edge: (START,1) (1,2) …`, as in WorFBench) and the actions
of an episode whose tools cannot be executed here (tau-bench), each against gold."""

from __future__ import annotations

import graphlib
import itertools
import re
from collections.abc import Iterable, Sequence

from sharpen.rewards.calls import ToolCallEvaluator
from sharpen.rewards.trajectory import words
from sharpen.rows import call_from_wire
from sharpen.types import Json, RowError, Score, Task, Trajectory

NODE = re.compile(r"(?m)^[ \t]*(\d{1,4})[:.] ?(.*)$")
EDGE = re.compile(r"(?i)\((START|\d{1,4}), ?(END|\d{1,4})\)")
MAX_NODES, ALIKE = 200, 0.5
PARTS = ("graph_f1", "node_f1", "edge_f1", "valid", "plan_success")
READS = re.compile(r"(?:get|find|list|search|calculate|check|think|can)(?:_|$)")


def read_plan(text: str) -> Json:
    """`Node:` and `Edge:` text → `nodes` and `edges`. START and END are left out: they are the
    nodes that nothing precedes or follows."""
    head, _, tail = text.partition("\nEdge")
    nodes = {number: task.strip() for number, task in NODE.findall(head)[:MAX_NODES]}
    found = EDGE.findall(tail or text)
    if not nodes or not found:
        raise RowError("", "no graph in the answer")
    edges = [(a, b) for a, b in found if a.isdigit() and b.isdigit()]
    for number in (number for edge in edges for number in edge):
        if number not in nodes:
            raise RowError("", f"an edge names node {number}, which is not there")
    listed = [{"id": number, "task": task} for number, task in nodes.items()]
    return {"nodes": listed, "edges": [list(edge) for edge in dict.fromkeys(edges)]}


def write_plan(gold: Json) -> str:
    """The text of a plan, as `read_plan` takes it."""
    ids = [node["id"] for node in gold["nodes"]]
    before, after = ({edge[side] for edge in gold["edges"]} for side in (0, 1))
    pairs = [("START", i) for i in ids if i not in after] + [tuple(edge) for edge in gold["edges"]]
    pairs += [(i, "END") for i in ids if i not in before]
    lines = [f"{node['id']}: {label(node)}" for node in gold["nodes"]]
    return "\n".join(["Node:", *lines, "Edge: " + " ".join(f"({a},{b})" for a, b in pairs)])


def label(node: Json) -> str:
    return str(node.get("tool") or node.get("task") or "")


def alike(a: str, b: str) -> float:
    """The share of words that two labels have in common; 1 for the same text."""
    first, second = words(a.replace("_", " ")), words(b.replace("_", " "))
    same = a.strip().casefold() == b.strip().casefold()
    return 1.0 if same else len(first & second) / max(len(first | second), 1)


def matching(found: Sequence[Json], wanted: Sequence[Json]) -> dict[str, str]:
    """Nodes of an answer → gold's, the most alike first. A tool's name has to be the same."""
    exact = any("tool" in node for node in wanted)
    both = itertools.product(enumerate(found), enumerate(wanted))
    scored = [(-alike(label(a), label(b)), j, i) for (i, a), (j, b) in both]
    pairs, used = dict[str, str](), set[int]()
    for score, j, i in sorted(scored):
        if -score >= (1.0 if exact else ALIKE) and found[i]["id"] not in pairs and j not in used:
            used.add(j)
            pairs[found[i]["id"]] = wanted[j]["id"]
    return pairs


def is_dag(edges: Iterable[Sequence[str]]) -> bool:
    graph = graphlib.TopologicalSorter()
    for a, b in edges:
        graph.add(b, a)
    try:
        graph.prepare()
    except graphlib.CycleError:
        return False
    return True


def f1(right: int, found: int, wanted: int) -> float:
    return 2 * right / (found + wanted) if found + wanted else 1.0


def in_common(nodes: Iterable[str], edges: set[tuple[str, str]], gold: set[tuple[str, str]]) -> int:
    """How many nodes the largest subgraph has that is induced in both: of every pair whose edge
    only one of them has, a node goes, the one in most such pairs first."""
    odd = {node: set[str]() for node in nodes}
    for a, b in edges ^ gold:
        if a in odd and b in odd:
            odd[a].add(b)
            odd[b].add(a)
    while odd and odd[worst := max(odd, key=lambda node: len(odd[node]))]:
        for other in odd.pop(worst) - {worst}:
            odd[other].discard(worst)
    return len(odd)


class PlanGraphReward:
    """Graph F1: the largest induced subgraph that answer and gold have in common, against the nodes
    of both. Nodes are alike by their words, where WorFBench asks a sentence encoder."""

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        text, gold = trajectory.turns[-1].message.content if trajectory.turns else "", task.gold
        parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        try:
            plan = read_plan(text)
        except RowError as error:
            return Score(0.0, parts, error.reason)
        names = matching(plan["nodes"], gold["nodes"])
        wanted = {tuple(edge) for edge in gold["edges"]}
        edges = {(names.get(a, ""), names.get(b, "")) for a, b in plan["edges"]}
        kept = edges & wanted
        sizes = len(plan["nodes"]), len(gold["nodes"])
        parts["graph_f1"] = f1(in_common(names.values(), edges, wanted), *sizes)
        parts["node_f1"] = f1(len(names), *sizes)
        parts["edge_f1"] = f1(len(kept), len(plan["edges"]), len(wanted))
        parts["valid"] = float(is_dag(plan["edges"]))
        whole = parts["valid"] * (parts["node_f1"] == 1) * (parts["edge_f1"] == 1)
        return Score(parts["graph_f1"], parts | {"plan_success": float(whole)})


class ActionsReward:
    """Whether an episode made exactly gold's changing actions and said gold's outputs. Reading
    actions are free, as where a database is compared; their share found is a part."""

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        made = [call for turn in trajectory.turns for call in turn.message.tool_calls]
        gold = [call_from_wire(call, task.id, "gold.actions") for call in task.gold["actions"]]
        judge, texts = ToolCallEvaluator(task.tools), [t.message.content for t in trajectory.turns]
        said = " ".join(texts).replace(",", "").casefold()
        changes, due = ([c for c in calls if not READS.match(c.name)] for calls in (made, gold))
        right = float(judge.evaluate_calls(changes, due)["overall_correct"])
        outputs = task.gold.get("outputs") or task.gold.get("communicate_info") or []
        told = float(all(str(each).replace(",", "").casefold() in said for each in outputs))
        spoke = float(bool(made) or bool(said.strip()))  # nothing at all solves nothing
        parts = {"actions_right": right, "outputs_told": told, "success": right * told * spoke}
        parts["action_recall"] = spoke * judge.evaluate_calls(made, gold)["recall"]
        return Score(parts["success"], parts)
