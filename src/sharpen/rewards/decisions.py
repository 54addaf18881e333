"""The decision that an assistant takes before anything else: call a tool, ask for what is missing,
answer in words, or decline. Rewards and metrics of decisions all ask `decision_of`.
"""

from __future__ import annotations

import re
from pathlib import Path

from sharpen.config import read_yaml
from sharpen.types import Message, Score, StopReason, Task, Trajectory, Turn

_PATTERNS = read_yaml(Path(__file__).with_name("agent.yaml"))
ASKS_PATTERN = re.compile(_PATTERNS["asks"], re.I)
REFUSES_PATTERN = re.compile(_PATTERNS["refuses"], re.I)
MAX_TEXT_CHARS = 20_000  # of a text; the rest is not read
DECISIONS = ("call", "ask", "answer", "decline")
# other words for a decision, in the data sets that use them
_SYNONYMS = {"act": "call", "direct": "answer", "none": "answer"}


def decision_of(trajectory: Trajectory) -> str:
    """Returns the decision of the first turn; "" for silence and for words without an end."""
    if not trajectory.turns:
        return ""
    return _decision_of_turn(trajectory.turns[0])


def _decision_of_turn(turn: Turn) -> str:
    """Returns what one turn decides. A call that cannot be parsed is the decision to call."""
    if turn.message.tool_calls or turn.message.unparsed:
        return "call"
    text = turn.message.content[:MAX_TEXT_CHARS]
    if not text.strip() or turn.stop is not StopReason.ANSWERED:
        return ""
    if ASKS_PATTERN.search(text):
        return "ask"
    if REFUSES_PATTERN.search(text):
        return "decline"
    return "answer"


def gold_decision(task: Task) -> str:
    """Returns the right decision of a task, or "" where any may be right."""
    gold = task.gold
    decision = gold.get("decision")
    if not decision:
        if gold.get("calls") or gold.get("tools"):
            decision = "call"
        elif "calls" in gold:
            decision = "decline"  # no call is right
        else:
            return ""
    return _normal_decision(str(decision))


def _normal_decision(name: str) -> str:
    """Returns one of `DECISIONS` for a data set's own word."""
    return _SYNONYMS.get(name, name)


def _first_message(trajectory: Trajectory) -> Message:
    return trajectory.turns[0].message if trajectory.turns else Message("assistant")


def _right_or_wrong(right: bool, feedback: str) -> Score:
    """1 or 0, under the part `right`."""
    value = float(right)
    return Score(value, {"right": value}, "" if right else feedback, solved=right)


class DecisionReward:
    """1 if the first answer takes gold's decision."""

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        decision = decision_of(trajectory)
        right = decision == gold_decision(task)
        return _right_or_wrong(right, f"decided: {decision or 'nothing'}")


class NoCallReward:
    """1 for words without any call: no tool on offer fits. An empty answer earns nothing."""

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        message = _first_message(trajectory)
        if message.tool_calls or message.unparsed:
            return _right_or_wrong(False, "a tool was called, and none fits")
        return _right_or_wrong(bool(message.content.strip()), "empty response")


class AnyCallReward:
    """1 for any well-formed call: some tool on offer fits, and gold does not say which."""

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        message = _first_message(trajectory)
        right = bool(message.tool_calls) and not message.unparsed
        return _right_or_wrong(right, "no well-formed call")
