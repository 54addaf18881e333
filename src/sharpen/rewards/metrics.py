"""What is measured of an answered task: each metric is one small function in `METRICS`, of the
task, what was done and the reward's verdict.

A metric returns a value, a value with its weight (a rate over calls or over a class, whose mean is
a ratio of sums), or None where the task says nothing about it. A kind of task names the metrics
that concern it (`sharpen.kinds`); `GENERAL_METRICS` concern all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from sharpen.rewards.calls import (
    ToolCallEvaluator,
    as_call,
    call_key,
    checked_tools,
    value_key,
)
from sharpen.rewards.decisions import DECISIONS, decision_of, gold_decision
from sharpen.rewards.plan_evaluator import PlanEvaluator
from sharpen.types import Score, SharpenError, Task, ToolCall, Trajectory
from sharpen.world.gold import example

_RANKS = (1, 3, 5)
MetricValue = float | tuple[float, float] | None


@dataclass(frozen=True)
class Item:
    """A task, what was done about it and how that was scored."""

    task: Task
    trajectory: Trajectory
    score: Score

    @cached_property
    def calls(self) -> list[ToolCall]:
        """All calls of the trajectory, in order."""
        return [call for turn in self.trajectory.turns for call in turn.message.tool_calls]

    @cached_property
    def gold_calls(self) -> list[ToolCall]:
        """Gold's calls; without arguments where only the tools are known."""
        gold = self.task.gold
        calls = [as_call(call) for call in gold.get("calls") or ()]
        known_calls = [call for call in calls if call]
        return known_calls or [ToolCall(name) for name in gold.get("tools") or ()]

    @cached_property
    def decision(self) -> str:
        """What the first answer decided."""
        return decision_of(self.trajectory)

    @cached_property
    def gold_decision(self) -> str:
        """What gold decides; empty where that is open."""
        return gold_decision(self.task)

    @cached_property
    def called_names(self) -> list[str]:
        """The names of the tools called, in order and each once."""
        return list(dict.fromkeys(call.name for call in self.calls))

    @cached_property
    def gold_names(self) -> set[str]:
        """The names of gold's tools."""
        return {call.name for call in self.gold_calls}


_Metric = Callable[[Item], MetricValue]


def top_k(ranked: Sequence[str], relevant: Collection[str], k: int) -> float:
    """1.0 if any of the top k is correct, else 0.0."""
    return float(any(name in relevant for name in ranked[:k]))


def recall_at(ranked: Sequence[str], relevant: Collection[str], k: int) -> float:
    """Returns the share of the correct names that are among the top k."""
    if not relevant:
        return 0.0
    return len(set(ranked[:k]) & set(relevant)) / len(set(relevant))


def precision_at(ranked: Sequence[str], relevant: Collection[str], k: int) -> float:
    """Returns the share of correct names among k places, also where fewer were filled."""
    return len(set(ranked[:k]) & set(relevant)) / k


def reciprocal_rank(ranked: Sequence[str], relevant: Collection[str]) -> float:
    """Returns 1 / the place of the first correct name, or 0."""
    for place, name in enumerate(ranked, 1):
        if name in relevant:
            return 1 / place
    return 0.0


def solved(item: Item) -> MetricValue:
    """Whether the task is done, as its reward says."""
    return float(item.score.is_solved)


def _reward(item: Item) -> MetricValue:
    return item.score.value


def _ranking(function: Callable[..., float], *arguments: int) -> _Metric:
    """A ranking metric over the tools called, in order."""

    def ranking_metric(item: Item) -> MetricValue:
        if not item.gold_names:
            return None
        return function(item.called_names, item.gold_names, *arguments)

    return ranking_metric


def _part(name: str) -> _Metric:
    """A part of the reward's score as a metric."""

    def part_metric(item: Item) -> MetricValue:
        parts = item.score.parts
        return float(parts[name]) if name in parts else None

    return part_metric


def tool_selection_accuracy(item: Item) -> MetricValue:
    """Exactly the right tools, whatever their arguments."""
    if not item.gold_names:
        return None
    return float(set(item.called_names) == item.gold_names)


def timing_precision(item: Item) -> MetricValue:
    """The right decision among calling, asking, answering and declining."""
    if not item.gold_decision:
        return None
    return float(item.decision == item.gold_decision)


def _decision_class(name: str, measure_name: str) -> _Metric:
    """Precision, recall or F1 of one decision. F1 weighs an item by how often it counts."""

    def class_metric(item: Item) -> MetricValue:
        is_decided = item.decision == name
        is_gold = item.gold_decision == name
        if not (is_decided or is_gold):
            return None
        weights = {
            "precision": float(is_decided),
            "recall": float(is_gold),
            "f1": float(is_decided) + float(is_gold),
        }
        return float(is_decided and is_gold), weights[measure_name]

    return class_metric


def argument_accuracy(item: Item) -> MetricValue:
    """The share of right arguments over gold's calls; a call that is missing has none."""
    gold = item.task.gold
    if not gold.get("calls"):
        return None
    is_allowed_list = gold.get("match") == "allowed"
    language = gold.get("language", "python")
    evaluator = ToolCallEvaluator(checked_tools(item.task), is_allowed_list, language)
    total = 0.0
    for _, _, credit in evaluator.pairs(item.calls, item.gold_calls):
        # the right tool with wrong arguments earns 0.25 to 0.75, by the share of right ones
        total += 1.0 if credit == 1 else (credit - 0.25) * 2
    return total / len(item.gold_calls)


def parameter_extraction(item: Item) -> MetricValue:
    """F1 of the values found under their names, whichever tool they were given to."""
    gold = item.task.gold
    if not gold.get("calls") or gold.get("language"):  # literals of a language: argument_accuracy
        return None
    is_allowed_list = gold.get("match") == "allowed"
    distinct_calls = {call_key(call): call for call in item.calls}.values()  # retries count once
    predicted = [(n, value_key(v)) for call in distinct_calls for n, v in call.arguments.items()]
    unmatched = list(predicted)
    hits = 0
    count = 0
    for call in item.gold_calls:
        for name, value in call.arguments.items():
            options = [example(option) for option in value] if is_allowed_list else [value]
            keys = {(name, value_key(option)) for option in options}
            match = next((pair for pair in unmatched if pair in keys), None)
            if match is not None:
                unmatched.remove(match)
                hits += 1
            elif is_allowed_list and "" in options:
                continue  # may be left out
            count += 1
    return 2 * hits / (len(predicted) + count) if count else None


def plan_dag_validity(item: Item) -> MetricValue:
    """Tools that are on offer and references that point back; of a written graph, no circle."""
    if "valid" in item.score.parts:
        return float(item.score.parts["valid"])
    steps = [{"tool": call.name, "arguments": call.arguments} for call in item.calls]
    if not steps:
        return 0.0
    return float(PlanEvaluator().evaluate(steps, {}, item.task.tools)["valid"])


def hallucinated_tool_rate(item: Item) -> MetricValue:
    """Of all calls, those of tools that are not on offer."""
    offered = {tool.name for tool in item.task.tools}
    if not offered:
        return None
    invented = sum(call.name not in offered for call in item.calls)
    return invented / max(len(item.calls), 1), float(len(item.calls))


def over_calling_rate(item: Item) -> MetricValue:
    """Of the items that need no tool, those in which one was called."""
    if not item.task.tools or item.gold_decision in ("", "call"):
        return None
    return float(item.decision == "call")


def tokens_per_task(item: Item) -> MetricValue:
    """Sampled tokens; a server does not show them."""
    return float(sum(len(turn.ids) for turn in item.trajectory.turns)) or None


def latency_per_task(item: Item) -> MetricValue:
    """Seconds of its batch divided by the items in it."""
    return item.trajectory.metadata.get("seconds")


METRICS: dict[str, _Metric] = {
    "tool_selection_accuracy": tool_selection_accuracy,
    "plan_success_rate": solved,
    "step_efficiency": _part("efficiency"),
    "timing_precision": timing_precision,
    "end_to_end_success": solved,
    "accuracy": solved,
    "reward": _reward,
    "valid_call": _part("valid_call"),
    "right_tool": _part("right_tool"),
    "exact_call": _part("exact_call"),
    "argument_accuracy": argument_accuracy,
    "parameter_extraction": parameter_extraction,
    "plan_match": _part("plan_success"),
    "plan_dag_validity": plan_dag_validity,
    "mrr": _ranking(reciprocal_rank),
    **{f"top@{k}": _ranking(top_k, k) for k in _RANKS},
    **{f"recall@{k}": _ranking(recall_at, k) for k in _RANKS},
    **{f"precision@{k}": _ranking(precision_at, k) for k in _RANKS},
    **{
        f"timing_{measure}_{decision}": _decision_class(decision, measure)
        for decision in DECISIONS
        for measure in ("precision", "recall", "f1")
    },
    **{name: _part(name) for name in ("graph_f1", "node_f1", "edge_f1", "action_recall")},
    "hallucinated_tool_rate": hallucinated_tool_rate,
    "over_calling_rate": over_calling_rate,
    "tokens_per_task": tokens_per_task,
    "latency_per_task": latency_per_task,
}
# of every kind of task
GENERAL_METRICS = (
    "accuracy", "reward", "argument_accuracy", "parameter_extraction",
    "hallucinated_tool_rate", "over_calling_rate", "tokens_per_task", "latency_per_task",
)  # fmt: skip
_RANKING_METRICS = (
    "mrr",
    *(f"{name}@{k}" for name in ("top", "recall", "precision") for k in _RANKS),
)
_DECISION_CLASSES = tuple(
    name for name in METRICS if name.startswith("timing_") and name.count("_") > 1
)
# the metrics that an agent is known by, in the order of reports
AGENT_METRICS = (
    "tool_selection_accuracy", "plan_success_rate", "step_efficiency", "timing_precision",
    "end_to_end_success",
)  # fmt: skip
SELECTION_METRICS = ("tool_selection_accuracy", *_RANKING_METRICS)
PLANNING_METRICS = ("plan_success_rate", "step_efficiency", "plan_match", "plan_dag_validity")
DECISION_METRICS = ("timing_precision", *_DECISION_CLASSES)
END_TO_END_METRICS = ("end_to_end_success", "step_efficiency")
CALL_METRICS = (
    "accuracy", "tool_selection_accuracy", "argument_accuracy", "parameter_extraction",
    "hallucinated_tool_rate", "over_calling_rate", "valid_call", "right_tool", "exact_call",
    *_RANKING_METRICS,
)  # fmt: skip
TOOL_CHOICE_METRICS = ("accuracy", "tool_selection_accuracy", *_RANKING_METRICS)
PLAN_GRAPH_METRICS = (
    "accuracy", "graph_f1", "node_f1", "edge_f1", "plan_dag_validity", "plan_success_rate",
)  # fmt: skip
SERVICE_METRICS = ("accuracy", "end_to_end_success", "action_recall")
ALIASES = {
    "tool_accuracy": "tool_selection_accuracy",
    "plan_success": "plan_success_rate",
    "efficiency": "step_efficiency",
    "timing": "timing_precision",
}


def find_metrics(names: Iterable[str]) -> dict[str, str]:
    """Returns the name that was asked for → the metric's own name."""
    metric_of = {}
    for name in names:
        metric_of[name] = ALIASES.get(name, name)
        if metric_of[name] not in METRICS:
            raise SharpenError(f"metric {name!r}: expected {', '.join([*METRICS, *ALIASES])}")
    return metric_of


def measure(item: Item, names: Iterable[str]) -> dict[str, MetricValue]:
    """Returns the named metrics, in the order of `METRICS`, that have something to say."""
    wanted = set(names)
    values = {}
    for name, metric in METRICS.items():
        if name not in wanted:
            continue
        value = metric(item)
        if value is not None:
            values[name] = value
    return values
