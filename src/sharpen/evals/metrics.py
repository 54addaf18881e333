"""What is measured of an answered task: each metric is one small entry of `METRICS`, a pure
function of the task, what was done and the reward's verdict.

A metric gives a value, a value with its weight (a rate over calls or over a class, whose mean is a
ratio of sums), or None where the task says nothing about it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sharpen.evals.intervals import Figure, bootstrapped
from sharpen.rewards.agent import ASKS, LOOKED_AT, REFUSES, PlanEvaluator
from sharpen.rewards.calls import ToolCallEvaluator, as_call, call_key, value_key
from sharpen.types import Score, SharpenError, StopReason, Task, ToolCall, ToolSpec, Trajectory
from sharpen.world.gold import example

DECISIONS = ("call", "ask", "answer", "decline")
SAME = {"act": "call", "direct": "answer", "none": "answer"}
CUTS = (1, 3, 5)
RIGHT = ("correctness", "exact_call", "success", "task_completion", "plan_success", "right")


@dataclass(frozen=True)
class Item:
    """A task, what was done about it and how that was judged."""

    task: Task
    trajectory: Trajectory
    score: Score

    @cached_property
    def calls(self) -> list[ToolCall]:
        return [call for turn in self.trajectory.turns for call in turn.message.tool_calls]

    @cached_property
    def wanted(self) -> list[ToolCall]:
        """Gold's calls; without arguments where only the tools are known."""
        gold = self.task.gold
        found = [as_call(call) for call in gold.get("calls") or ()]
        return [c for c in found if c] or [ToolCall(name) for name in gold.get("tools") or ()]

    @cached_property
    def decision(self) -> str:
        """What the first answer decided; silence and words without an end decide nothing."""
        if not self.trajectory.turns:
            return ""
        first = self.trajectory.turns[0]
        if first.message.tool_calls or first.message.unparsed:
            return "call"
        text = first.message.content[:LOOKED_AT]
        if not text.strip() or first.stop is not StopReason.ANSWERED:
            return ""
        return "ask" if ASKS.search(text) else "decline" if REFUSES.search(text) else "answer"

    @cached_property
    def due(self) -> str:
        """What gold decides; empty where that is open."""
        gold = self.task.gold
        implied = "" if "calls" not in gold else "call" if gold["calls"] else "decline"
        found = str(gold.get("decision") or ("call" if self.wanted else implied))
        return SAME.get(found, found)


Value = float | tuple[float, float] | None
Metric = Callable[[Item], Value]


def top_k(ranked: Sequence[str], relevant: Collection[str], k: int) -> float:
    """Whether one of the first k is relevant."""
    return float(any(name in relevant for name in ranked[:k]))


def recall_at(ranked: Sequence[str], relevant: Collection[str], k: int) -> float:
    return len({*ranked[:k]} & {*relevant}) / len({*relevant}) if relevant else 0.0


def precision_at(ranked: Sequence[str], relevant: Collection[str], k: int) -> float:
    """Of k places, also where fewer were filled."""
    return len({*ranked[:k]} & {*relevant}) / k


def reciprocal_rank(ranked: Sequence[str], relevant: Collection[str]) -> float:
    return next((1 / place for place, name in enumerate(ranked, 1) if name in relevant), 0.0)


def selects(item: Item) -> bool:
    """Whether the item is about which tools to take."""
    return item.task.kind in ("selection", "calls") and bool(item.wanted)


def ranked(item: Item) -> tuple[list[str], set[str]]:
    """The tools called, in order and each once, and those that are right."""
    return list(dict.fromkeys(call.name for call in item.calls)), {c.name for c in item.wanted}


def ranking(function: Callable[..., float], *more: int) -> Metric:
    return lambda item: function(*ranked(item), *more) if selects(item) else None


def part(*names: str, kinds: Collection[str] = ()) -> Metric:
    """The first of these parts that the reward has."""

    def found(item: Item) -> Value:
        parts = item.score.parts if not kinds or item.task.kind in kinds else {}
        return next((float(parts[name]) for name in names if name in parts), None)

    return found


def tool_selection_accuracy(item: Item) -> Value:
    """Exactly the right tools, whatever their arguments."""
    found, right = ranked(item)
    return float({*found} == right) if selects(item) else None


def timing_precision(item: Item) -> Value:
    """The right decision among calling, asking, answering and declining."""
    return float(item.decision == item.due) if item.task.kind == "timing" else None


def of_class(name: str, measure: str) -> Metric:
    """Precision, recall or F1 of one decision. F1 weighs an item by how often it counts."""

    def found(item: Item) -> Value:
        said, due = item.decision == name, item.due == name
        if item.task.kind != "timing" or not (said or due):
            return None
        weights = {"precision": said, "recall": due, "f1": said + due}
        return float(said and due), float(weights[measure])

    return found


def checked_tools(task: Task) -> tuple[ToolSpec, ...]:
    """The tools by whose types calls are judged: the declared ones, where text was shown."""
    functions = task.metadata.get("functions") or ()
    return tuple(ToolSpec(f["name"], "", f["parameters"]) for f in functions) or task.tools


def argument_accuracy(item: Item) -> Value:
    """The share of right arguments, over the wanted calls; a call that is missing has none."""
    gold = item.task.gold
    if not gold.get("calls"):
        return None
    allowed, language = gold.get("match") == "allowed", gold.get("language", "python")
    judge = ToolCallEvaluator(checked_tools(item.task), allowed, language)
    pairs = judge.pairs(item.calls, item.wanted)
    rates = [1.0 if credit == 1 else (credit - 0.25) * 2 for *_, credit in pairs]
    return sum(rates) / len(item.wanted)


def parameter_extraction(item: Item) -> Value:
    """F1 of the values found, under their names, whichever tool they were given to."""
    gold = item.task.gold
    if not gold.get("calls") or gold.get("language"):  # of literals in a language, see arguments
        return None
    allowed = gold.get("match") == "allowed"
    made = {call_key(call): call for call in item.calls}.values()  # one tried again counts once
    given = [(n, value_key(v)) for call in made for n, v in call.arguments.items()]
    hits, count, left = 0, 0, list(given)
    for name, value in ((n, v) for call in item.wanted for n, v in call.arguments.items()):
        options = [example(v) for v in value] if allowed else [value]
        found = [pair for pair in left if pair in {(name, value_key(v)) for v in options}]
        if found:
            left.remove(found[0])
        elif "" in options and allowed:
            continue  # may be left out
        hits, count = hits + bool(found), count + 1
    return 2 * hits / (len(given) + count) if count else None


def plan_dag_validity(item: Item) -> Value:
    """Tools that are on offer and references that point back; of a written graph, no circle."""
    if "valid" in item.score.parts or item.task.kind != "planning":
        return part("valid")(item)
    steps = [{"tool": call.name, "arguments": call.arguments} for call in item.calls]
    return float(bool(steps) and PlanEvaluator().evaluate(steps, {}, item.task.tools)["valid"])


def hallucinated_tool_rate(item: Item) -> Value:
    """Of all calls, those of tools that are not on offer."""
    offered = {tool.name for tool in item.task.tools}
    invented = sum(call.name not in offered for call in item.calls)
    return (invented / max(len(item.calls), 1), float(len(item.calls))) if offered else None


def over_calling_rate(item: Item) -> Value:
    """Of the items that need no tool, those in which one was called."""
    if not item.task.tools or not item.due or item.due == "call":
        return None
    return float(item.decision == "call")


def tokens_per_task(item: Item) -> Value:
    """Sampled tokens; a server does not show them."""
    return float(sum(len(turn.ids) for turn in item.trajectory.turns)) or None


def latency_per_task(item: Item) -> Value:
    """Seconds of its batch divided by the items in it."""
    return item.trajectory.metadata.get("seconds")


METRICS: dict[str, Metric] = {
    "tool_selection_accuracy": tool_selection_accuracy,
    "plan_success_rate": part("plan_success", kinds=("planning",)),
    "step_efficiency": part("efficiency", kinds=("planning", "end_to_end")),
    "timing_precision": timing_precision,
    "end_to_end_success": part("task_completion", "success", kinds=("end_to_end", "tau")),
    "accuracy": part(*RIGHT),
    "reward": lambda item: item.score.value,
    "argument_accuracy": argument_accuracy,
    "parameter_extraction": parameter_extraction,
    "plan_dag_validity": plan_dag_validity,
    "mrr": ranking(reciprocal_rank),
    **{f"top@{k}": ranking(top_k, k) for k in CUTS},
    **{f"recall@{k}": ranking(recall_at, k) for k in CUTS},
    **{f"precision@{k}": ranking(precision_at, k) for k in CUTS},
    **{f"timing_{m}_{d}": of_class(d, m) for d in DECISIONS for m in ("precision", "recall", "f1")},
    **{name: part(name) for name in ("graph_f1", "node_f1", "edge_f1", "action_recall")},
    "hallucinated_tool_rate": hallucinated_tool_rate,
    "over_calling_rate": over_calling_rate,
    "tokens_per_task": tokens_per_task,
    "latency_per_task": latency_per_task,
}
FIVE = tuple(METRICS)[:5]  # the ones an agent is known by
ALIASES = {"tool_accuracy": "tool_selection_accuracy", "plan_success": "plan_success_rate"}
ALIASES |= {"efficiency": "step_efficiency", "timing": "timing_precision"}


def find_metrics(names: Iterable[str]) -> dict[str, str]:
    """The name that was asked for → the metric's own."""
    found = {name: ALIASES.get(name, name) for name in names}
    for asked, name in found.items():
        if name not in METRICS:
            raise SharpenError(f"metric {asked!r}: expected {', '.join([*METRICS, *ALIASES])}")
    return found


def measure(item: Item) -> dict[str, Any]:
    """Every metric that has something to say about the item."""
    found = {name: metric(item) for name, metric in METRICS.items()}
    return {name: value for name, value in found.items() if value is not None}


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Figure]:
    """Measured items → a figure a metric, for the metrics that any of them has. Where nothing has
    weight, such as the precision of a decision that was never taken, nothing is known."""
    figures = {}
    for name in METRICS:
        found = [row[name] for row in rows if name in row]
        pairs = [tuple(v) if isinstance(v, (tuple, list)) else (v, 1.0) for v in found]
        counted = [(value, weight) for value, weight in pairs if weight]
        if counted:
            figures[name] = bootstrapped(*map(list, zip(*counted, strict=True)))
        elif pairs:
            figures[name] = Figure(0.0, 0.0, 0, 0.0, 1.0)
    return figures
