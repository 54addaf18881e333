"""The agent reward: how well a trajectory did its task, as a weighted sum of verified parts.

Only what can be verified is scored. Where a tool was needed, a response that calls none gets the
lowest score, below every attempt. Training (GRPO, preference pairs) and evaluation both use it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from sharpen.calls import parse_message
from sharpen.config import Config, parse_config, read_yaml
from sharpen.rewards.calls import ToolVerifier, call_key
from sharpen.rewards.plan_evaluator import PlanEvaluator
from sharpen.rewards.trajectory import turns_from_steps, words
from sharpen.rewards.trajectory_facts import MAX_TEXT_CHARS, TrajectoryFacts, collect_facts
from sharpen.rows import number_field, tools_from_wire
from sharpen.types import Json, Score, StopReason, Task, ToolCall, ToolSpec, Trajectory, Turn
from sharpen.world.episode import World
from sharpen.world.gold import MAX_CALLS

_SETTINGS = read_yaml(Path(__file__).with_suffix(".yaml"))
WEIGHTS: dict[str, float] = _SETTINGS["weights"]
PENALTIES: dict[str, float] = _SETTINGS["penalties"]
ASKS = re.compile(_SETTINGS["asks"], re.I)
REFUSES = re.compile(_SETTINGS["refuses"], re.I)
LOOKED_AT = MAX_TEXT_CHARS  # the name that evals/metrics.py reads
_MAX_FEEDBACK_CHARS = 1000


class AgentRewardConfig(Config):
    """Names that are not given keep their defaults; 0 switches one off."""

    weights: dict[str, float] = WEIGHTS
    penalties: dict[str, float] = PENALTIES
    clip: tuple[float, float] = (-1.0, 1.0)
    max_repeats: int = Field(3, ge=1)  # calls for which one penalty counts at most
    max_penalty: float = Field(0.9, ge=0)  # of all penalties together, without no_call
    max_calls: int = Field(MAX_CALLS, ge=1)

    @field_validator("weights")
    @classmethod
    def fill_weights(cls, weights: dict[str, float]) -> dict[str, float]:
        """Check the given weights and add the default ones."""
        for name, weight in weights.items():
            if name not in WEIGHTS or not 0 <= weight < 1e6:
                names = ", ".join(WEIGHTS)
                raise ValueError(f"{name}: expected 0 or more for one of {names}")
        return WEIGHTS | weights

    @field_validator("penalties")
    @classmethod
    def fill_penalties(cls, penalties: dict[str, float]) -> dict[str, float]:
        """Check the given penalties and add the default ones."""
        for name, penalty in penalties.items():
            if name not in PENALTIES or not 0 <= -penalty < 1e6:
                names = ", ".join(PENALTIES)
                raise ValueError(f"{name}: expected 0 or less for one of {names}")
        return PENALTIES | penalties


class AgentRewardModel:
    """Scores a trajectory; 1 for a task done as its gold does it.

    `score` takes a task and a trajectory, `compute_reward` texts and plain data; both give the
    same value."""

    def __init__(self, config: AgentRewardConfig | Json | None = None, world: World | None = None):
        if not isinstance(config, AgentRewardConfig):
            config = parse_config(AgentRewardConfig, config or {}, "reward")
        self.config = config
        self.world = world
        self.tool_verifier = ToolVerifier()
        self.plan_evaluator = PlanEvaluator()

    def compute_reward(
        self, query: str, response: str, ground_truth: Json | None = None, execution_trace: Any = ()
    ) -> Json:
        """Score a response and the steps that were executed before it.

        `ground_truth` is a task's gold, or `target_tools` and `optimal_steps`; `available_tools`
        in it are those on offer. A call that stands in the response and in the trace counts
        once. Returns `total`, `breakdown` and `feedback`."""
        gold = dict(ground_truth or {})
        tools = tools_from_wire(gold.pop("available_tools", None), "ground_truth")
        steps = execution_trace or ()
        executed_turns = turns_from_steps(steps)
        message = parse_message(response or "")
        new_calls = _calls_not_executed(message.tool_calls, executed_turns)
        last_turn = Turn(replace(message, tool_calls=tuple(new_calls)))
        timed_out = any(isinstance(step, dict) and step.get("timeout") is True for step in steps)
        stop = StopReason.TIMEOUT if timed_out else StopReason.ANSWERED
        trajectory = Trajectory("", (*executed_turns, last_turn), stop)
        score = self.score(Task("", query, tools, gold), trajectory)
        return {"total": score.value, "breakdown": dict(score.parts), "feedback": score.feedback}

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        """Collect the facts, score the parts, add the penalties, clip."""
        facts = collect_facts(
            task,
            trajectory,
            world=self.world,
            max_calls=self.config.max_calls,
            tool_verifier=self.tool_verifier,
            plan_evaluator=self.plan_evaluator,
        )
        parts = _score_parts(facts)
        penalty_counts = _count_penalties(facts)
        penalties = self._weigh_penalties(penalty_counts)
        low, high = self.config.clip
        value = self._average_parts(parts) + self._total_penalty(penalties)
        value = min(max(value, low), high)
        breakdown = dict(parts)
        if facts.plan_success is not None:
            breakdown["plan_success"] = float(facts.plan_success)
        breakdown |= penalties
        return Score(value, breakdown, _write_feedback(facts, parts, penalty_counts))

    def _average_parts(self, parts: Mapping[str, float]) -> float:
        """Returns the weighted mean of the parts that were scored."""
        weights = self.config.weights
        total_weight = sum(weights[name] for name in parts)
        weighted_sum = sum(weights[name] * part for name, part in parts.items())
        return weighted_sum / (total_weight or 1.0)

    def _weigh_penalties(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Each penalty times its count; adding 0.0 turns -0.0 into 0.0."""
        penalties = {}
        for name, count in counts.items():
            penalties[name] = (
                self.config.penalties[name] * min(count, self.config.max_repeats) + 0.0
            )
        return penalties

    def _total_penalty(self, penalties: Mapping[str, float]) -> float:
        """All penalties together: those but `no_call` take away `max_penalty` at most."""
        others = sum(penalties.values()) - penalties["no_call"]
        return penalties["no_call"] + max(-self.config.max_penalty, others)


# Parts: each from 0 to 1, or None where it cannot be verified -------------------------------------


def _score_parts(facts: TrajectoryFacts) -> dict[str, float]:
    """Score every part that can be verified. Silence where something was needed has 0 in all."""
    if facts.silent:
        verifiable = ["format_compliance"] if facts.decision == "unknown" else list(_PARTS)
        return dict.fromkeys(verifiable, 0.0)
    parts = {}
    for name, score_part in _PARTS.items():
        value = score_part(facts)
        if value is not None:
            parts[name] = value
    return parts


def _task_completion(facts: TrajectoryFacts) -> float | None:
    """1 if the task is done: by execution, by exactly gold's calls, or by the right words."""
    if facts.decision == "unknown":
        return None
    if facts.decision != "call":
        return 1.0 if _timing_quality(facts) == 1.0 else 0.0
    if facts.wanted_calls is None or not facts.wants_arguments:
        return None
    return float(facts.completed)


def _tool_accuracy(facts: TrajectoryFacts) -> float | None:
    """F1 of the calls; where none is wanted, 1 if none was tried."""
    if facts.decision == "unknown":
        return None
    if facts.decision != "call":
        return 0.0 if facts.attempts else 1.0
    if facts.wanted_calls is None:
        return None
    return facts.match["f1"]


def _efficiency(facts: TrajectoryFacts) -> float | None:
    """Gold's number of steps divided by those used, less while the task is not completed."""
    if facts.decision == "unknown":
        return _share_of_distinct_calls(facts)
    if facts.decision != "call":
        return 0.0 if facts.attempts else 1.0
    if facts.wanted_calls is None:
        return None
    gold_steps = number_field(facts.task.gold, "optimal_steps", facts.task.id)
    gold_steps = gold_steps or len(facts.wanted_calls)
    used_steps = len(facts.calls) + len(facts.broken_calls)
    economy = min(1.0, gold_steps / max(used_steps, 1))
    progress = 1.0 if facts.completed else facts.match["recall"]
    return progress * economy


def _share_of_distinct_calls(facts: TrajectoryFacts) -> float | None:
    """What can be said of efficiency without ground truth."""
    if not facts.calls:
        return None
    distinct_keys = {call_key(call) for call in facts.calls}
    return len(distinct_keys) / len(facts.calls)


def _timing_quality(facts: TrajectoryFacts) -> float | None:
    """1 for gold's decision, 0.5 for other words, 0 for a call where none is wanted."""
    if facts.decision == "unknown":
        return None
    if facts.decision == "call":
        return 1.0
    if facts.attempts:
        return 0.0
    return 1.0 if _says_the_decision(facts) else 0.5


def _format_compliance(facts: TrajectoryFacts) -> float:
    """The share of calls that can be read and fit their schema."""
    return 1 - facts.format_errors / max(facts.attempts, 1)


_PARTS: dict[str, Callable[[TrajectoryFacts], float | None]] = {
    "task_completion": _task_completion,
    "tool_accuracy": _tool_accuracy,
    "efficiency": _efficiency,
    "timing_quality": _timing_quality,
    "format_compliance": _format_compliance,
}


# The words of a decision not to call --------------------------------------------------------------


def _says_the_decision(facts: TrajectoryFacts) -> bool:
    """Whether the final text asks, answers or declines as gold does."""
    if facts.decision == "ask":
        return _asks_for_what_is_missing(facts)
    if facts.decision == "answer" and facts.task.gold.get("answer"):
        return _gives_the_gold_answer(facts)
    if facts.decision == "none":
        return True
    refuses = bool(REFUSES.search(facts.final_text))
    return refuses == (facts.decision == "decline")


def _asks_for_what_is_missing(facts: TrajectoryFacts) -> bool:
    """Whether a question shares a word with the name or description of each missing parameter."""
    gold = facts.task.gold
    tool_names = gold.get("tools") or [""]
    tool = facts.offered.get(tool_names[0], ToolSpec(""))
    fields = tool.parameters.get("properties") or {}
    said_words = words(facts.final_text)
    for name in gold.get("missing") or ():
        field = fields.get(name) or {}
        about = f"{name} {field.get('description')}"
        if not words(about.replace("_", " ")) & said_words:
            return False
    return bool(ASKS.search(facts.final_text))


def _gives_the_gold_answer(facts: TrajectoryFacts) -> bool:
    """Whether the text has all words of the gold answer that are not in the question already."""
    new_words = words(str(facts.task.gold["answer"])) - words(facts.task.instruction)
    return new_words <= words(facts.final_text)


# Penalties: how often each one counts -------------------------------------------------------------


def _count_penalties(facts: TrajectoryFacts) -> dict[str, int]:
    """How often each penalty applies, before any limit."""
    return {name: count(facts) for name, count in _PENALTY_COUNTS.items()}


def _count_wrong_tools(facts: TrajectoryFacts) -> int:
    """Calls of offered tools that gold does not use. Another way to gold's end state has none."""
    if facts.wanted_calls is None or facts.differences == ():
        return 0
    expected_names = {call.name for call in facts.wanted_calls} | set(facts.invented_tools)
    return sum(call.name not in expected_names for call in facts.calls)


def _count_redundant_calls(facts: TrajectoryFacts) -> int:
    """Calls made more often than gold makes them; once is never too often."""

    def count_calls(calls: tuple[ToolCall, ...]) -> Counter[str]:
        return Counter(call_key(call, facts.offered.get(call.name)) for call in calls)

    wanted_counts = count_calls(facts.wanted_calls or ())
    redundant = 0
    for key, count in count_calls(facts.calls).items():
        redundant += max(0, count - max(1, wanted_counts[key]))
    return redundant


def _count_format_errors(facts: TrajectoryFacts) -> int:
    return facts.format_errors


def _count_timeouts(facts: TrajectoryFacts) -> int:
    return int(facts.out_of_time)


def _count_hallucinated_tools(facts: TrajectoryFacts) -> int:
    return len(facts.invented_tools)


def _count_no_call(facts: TrajectoryFacts) -> int:
    return int(facts.decision == "call" and not facts.attempts)


_PENALTY_COUNTS: dict[str, Callable[[TrajectoryFacts], int]] = {
    "wrong_tool": _count_wrong_tools,
    "redundant_call": _count_redundant_calls,
    "format_error": _count_format_errors,
    "timeout": _count_timeouts,
    "hallucinated_tool": _count_hallucinated_tools,
    "no_call": _count_no_call,
}


# Feedback and input -------------------------------------------------------------------------------


def _write_feedback(
    facts: TrajectoryFacts, parts: Mapping[str, float], penalty_counts: Mapping[str, int]
) -> str:
    """What went wrong in words, and which parts could not be scored."""
    notes = [*(facts.differences or ())[:3], *facts.broken_calls[:2], *facts.invalid_calls[:2]]
    if facts.silent:
        notes.append("a tool was needed" if facts.final_text else "empty response")
    elif facts.decision == "unknown":
        notes.append("no ground truth")
    elif parts.get("timing_quality", 1.0) < 1:
        notes.append(f"expected: {facts.decision}")
    notes += [f"{name}: {count}" for name, count in penalty_counts.items() if count]
    left_out = [name for name in _PARTS if name not in parts]
    if left_out:
        notes.append(f"not verifiable and left out: {', '.join(left_out)}")
    return "; ".join(notes)[:_MAX_FEEDBACK_CHARS]


def _calls_not_executed(calls: tuple[ToolCall, ...], turns: list[Turn]) -> list[ToolCall]:
    """The calls of a response without those that the executed turns have already made."""
    executed = Counter(call_key(call) for turn in turns for call in turn.message.tool_calls)
    new_calls = []
    for call in calls:
        key = call_key(call)
        if executed[key] > 0:
            executed[key] -= 1
        else:
            new_calls.append(call)
    return new_calls
