"""Collect what a trajectory did, beside what its task needed, as plain facts.

The calls are executed again in the tool world, so that the end state decides whether a task is
done, not the wording. `rewards/agent.py` turns the facts into a score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sharpen.rewards.calls import ToolCallEvaluator, ToolVerifier
from sharpen.rewards.decisions import MAX_TEXT_CHARS, decision_of, gold_decision
from sharpen.rewards.plan_evaluator import PlanEvaluator
from sharpen.types import Json, StopReason, Task, ToolCall, ToolSpec, Trajectory
from sharpen.world.episode import Episode, World, shipped_world
from sharpen.world.gold import CallExecutor, gold_calls, gold_outcome, start_episode


@dataclass(frozen=True, slots=True)
class TrajectoryFacts:
    """What a trajectory did about its task. Calls that an injected fault hit are left out."""

    task: Task
    final_text: str
    attempts: int  # calls tried, with broken ones and with those that a fault hit
    calls: tuple[ToolCall, ...]
    broken_calls: tuple[str, ...]  # why each could not be read
    out_of_time: bool  # the episode ended by its time or turn limit
    offered: Mapping[str, ToolSpec]
    invented_tools: tuple[str, ...]  # a name for each call of a tool that is not on offer
    invalid_calls: tuple[str, ...]  # a complaint for each call that does not fit its schema
    differences: tuple[str, ...] | None  # from gold's end state; None: it cannot be executed
    first_decision: str  # that the first turn takes: call, ask, answer, decline or ""
    decision: str  # that gold takes: call, ask, answer, decline, none (no call) or unknown
    wanted_calls: tuple[ToolCall, ...] | None  # None: not known
    wants_arguments: bool  # gold has whole calls, not only the names of tools
    match: Json  # calls against the wanted ones: `ToolCallEvaluator.evaluate_calls`
    plan_success: bool | None  # None: gold has no plan

    @property
    def completed(self) -> bool:
        """Whether gold's end state was reached; without one, whether the calls equal gold's."""
        if self.differences is None:
            return self.match["overall_correct"]
        return not self.differences

    @property
    def gold_decision(self) -> str:
        """Gold's decision in the words of `DECISIONS`; "" where any may be right."""
        return gold_decision(self.task)

    @property
    def silent(self) -> bool:
        """Whether no call was tried although one was needed, or nothing was said either."""
        return not self.attempts and (self.decision == "call" or not self.final_text)

    @property
    def format_errors(self) -> int:
        """The number of calls that cannot be read or do not fit their schema."""
        return len(self.broken_calls) + len(self.invalid_calls)


@dataclass(frozen=True, slots=True)
class _Execution:
    """What came of running a trajectory's calls in the tool world."""

    differences: tuple[str, ...]
    faulted: frozenset[int]  # places of the calls that an injected fault hit
    episode: Episode


def collect_facts(
    task: Task,
    trajectory: Trajectory,
    *,
    world: World | None,
    max_calls: int,
    tool_verifier: ToolVerifier,
    plan_evaluator: PlanEvaluator,
) -> TrajectoryFacts:
    """Read and execute a trajectory's calls, and compare them with what the task needs."""
    gold = task.gold
    messages = [turn.message for turn in trajectory.turns]
    turns_and_calls = [(i, call) for i, m in enumerate(messages) for call in m.tool_calls]
    broken_calls = [f"broken call: {b.reason}" for m in messages for b in m.unparsed]
    attempts = len(turns_and_calls) + len(broken_calls)
    offered: Mapping[str, ToolSpec] = {tool.name: tool for tool in task.tools}
    differences = None
    if "categories" in gold and gold.get("calls"):
        execution = _execute_calls(task, trajectory, world or shipped_world(), max_calls)
        differences = execution.differences
        if not offered:
            offered = {tool.name: tool.spec for tool in execution.episode.tools()}
        turns_and_calls = [
            pair for place, pair in enumerate(turns_and_calls) if place not in execution.faulted
        ]
    calls = [call for _, call in turns_and_calls]
    wants_arguments = isinstance(gold.get("calls"), list)
    decision, wanted_calls = _read_gold(task, wants_arguments)
    match = _match_calls(task, calls, len(broken_calls), wanted_calls or (), wants_arguments)
    # Gold may break its own schema or use a tool that is not offered: its calls are never at fault.
    faultless = match["exact"] if wants_arguments else []
    other_calls = [call for place, call in enumerate(calls) if place not in faultless]
    invented_tools, invalid_calls = tool_verifier.verify(other_calls, offered)
    plan_success = None
    if gold.get("steps") and wants_arguments:
        plan = [{"tool": c.name, "arguments": c.arguments, "turn": t} for t, c in turns_and_calls]
        plan_success = plan_evaluator.evaluate(plan, gold)["success"]
    return TrajectoryFacts(
        task=task,
        final_text=messages[-1].content[:MAX_TEXT_CHARS].strip() if messages else "",
        attempts=attempts,
        calls=tuple(calls),
        broken_calls=tuple(broken_calls),
        out_of_time=trajectory.stop in (StopReason.TIMEOUT, StopReason.TURNS),
        offered=offered,
        invented_tools=tuple(invented_tools),
        invalid_calls=tuple(invalid_calls),
        differences=differences,
        first_decision=decision_of(trajectory),
        decision=decision,
        wanted_calls=None if wanted_calls is None else tuple(wanted_calls),
        wants_arguments=wants_arguments,
        match=match,
        plan_success=plan_success,
    )


def _execute_calls(task: Task, trajectory: Trajectory, world: World, max_calls: int) -> _Execution:
    """Run the trajectory's messages in a fresh episode of the task."""
    episode = start_episode(world, task.id, task.gold)
    offered_names = {tool.name for tool in task.tools}
    executor = CallExecutor(episode, offered_names or None, max_calls)
    for turn in trajectory.turns:
        executor.step(turn.message)
    differences = gold_outcome(world, task).missing(executor)
    faulted = {place for place, done in enumerate(executor.executed) if done.faulted}
    return _Execution(tuple(differences), frozenset(faulted), episode)


def _read_gold(task: Task, wants_arguments: bool) -> tuple[str, list[ToolCall] | None]:
    """Gold's decision, and the calls that it wants (None: not known).

    The calls have no arguments where gold only names tools, and there are none where the decision
    is not to call."""
    tool_names = task.gold.get("target_tools", task.gold.get("tools"))
    if isinstance(tool_names, str):
        tool_names = [tool_names]
    calls: list[ToolCall] | None = None
    if wants_arguments:
        calls = gold_calls(task)
    elif tool_names is not None:
        calls = [ToolCall(str(name)) for name in tool_names]
    if calls:
        implied_decision = "call"
    elif calls is not None:
        implied_decision = "none"
    else:
        implied_decision = "unknown"
    decision = str(task.gold.get("decision") or implied_decision)
    if decision not in ("call", "unknown"):
        return decision, []
    return decision, calls


def _match_calls(
    task: Task,
    calls: Sequence[ToolCall],
    broken_count: int,
    wanted_calls: Sequence[ToolCall],
    wants_arguments: bool,
) -> Json:
    """Compare the calls with the wanted ones, by name alone where gold only names tools."""
    if not wants_arguments:
        calls = [ToolCall(call.name) for call in calls]
    evaluator = ToolCallEvaluator(task.tools, task.gold.get("match") == "allowed")
    broken_calls = [None] * broken_count  # each counts as a wrong call
    return evaluator.evaluate_calls([*calls, *broken_calls], wanted_calls)
