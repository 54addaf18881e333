"""Compare a plan, a list of steps that may refer to earlier results, with the gold plan.

The agent reward reports its success for planning tasks; metrics use it on its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sharpen.rewards.calls import ToolCallEvaluator, as_call, references
from sharpen.types import Json, ToolCall, ToolSpec


class PlanEvaluator:
    """A plan as a graph: steps `{"id", "tool", "arguments"}` that may refer to earlier results."""

    def evaluate(self, plan: Sequence[Json], gold: Json, tools: Sequence[ToolSpec] = ()) -> Json:
        """Compare a plan with `gold["steps"]` or `gold["calls"]`, and with `gold["edges"]`.

        Returns `valid` (tools on offer, unique ids, references to earlier steps only), `step_f1`,
        `edges` (the share of gold's dependencies that the order keeps), `success` (all three are
        perfect) and `problems`. Steps of the same `turn` count as taken at the same time."""
        step_references = [references(step.get("arguments")) for step in plan]
        problems = _find_plan_problems(plan, step_references, tools)
        # Gold calls have concrete values. A plan that refers to results is compared with gold's
        # steps, which refer to results too.
        compares_steps = any(step_references) or "calls" not in gold
        gold_rows = gold.get("steps" if compares_steps else "calls") or []
        planned_calls = _steps_as_calls(plan)
        gold_calls = _steps_as_calls(gold_rows)
        evaluator = ToolCallEvaluator(tools)
        pairs = evaluator.pairs(planned_calls, gold_calls)
        edge_share = _share_of_kept_edges(plan, gold, pairs)
        step_f1 = evaluator.evaluate_calls(planned_calls, gold_calls)["f1"]
        valid = not problems
        return {
            "valid": valid,
            "step_f1": step_f1,
            "edges": edge_share,
            "success": valid and step_f1 == 1 and edge_share == 1,
            "problems": problems,
        }


def _find_plan_problems(
    plan: Sequence[Json], step_references: Sequence[list[str]], tools: Sequence[ToolSpec]
) -> list[str]:
    """Repeated ids, unknown tools, and references to steps that are not earlier ones."""
    labels = [str(step.get("id") or f"s{i + 1}") for i, step in enumerate(plan)]
    tool_names = {tool.name for tool in tools}
    problems = []
    for label, count in Counter(labels).items():
        if count > 1:
            problems.append(f"{label}: the id is used by {count} steps")
    for i, step in enumerate(plan):
        if tools and step.get("tool") not in tool_names:
            problems.append(f"{labels[i]}: there is no tool {step.get('tool')!r}")
        for reference in step_references[i]:
            if reference not in labels[:i]:
                problems.append(f"{labels[i]}: {reference} is no earlier step")
    return problems


def _steps_as_calls(steps: Sequence[Json]) -> list[ToolCall]:
    """Each step as a call; a step that is no call becomes one of a tool without a name."""
    return [as_call(step) or ToolCall("") for step in steps]


def _share_of_kept_edges(
    plan: Sequence[Json], gold: Json, pairs: Sequence[tuple[int, int, float]]
) -> float:
    """The share of gold's dependencies whose two steps the plan takes in this order."""
    turn_of_gold_step = {}
    for plan_index, gold_index, credit in pairs:
        if credit == 1:
            turn_of_gold_step[gold_index] = plan[plan_index].get("turn", plan_index)
    index_of_id = {step["id"]: index for index, step in enumerate(gold.get("steps") or ())}
    edges = gold.get("edges") or ()
    if not edges:
        return 1.0
    kept_edges = 0
    for first_id, second_id in edges:
        first_turn = turn_of_gold_step.get(index_of_id[first_id])
        second_turn = turn_of_gold_step.get(index_of_id[second_id])
        if first_turn is not None and second_turn is not None and first_turn < second_turn:
            kept_edges += 1
    return kept_edges / len(edges)
