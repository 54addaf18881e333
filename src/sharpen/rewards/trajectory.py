"""Give credit along a trajectory, so that a late reward is not spread over all turns alike.

What each turn added, discounted returns, and turns against the other samples of a group. The
result is stored in `Turn.reward`. Users call these, or `AgentTrajectoryRL`, which puts them
together; the agent reward reads execution traces with `turns_from_steps`.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from sharpen.calls import CLOSE_CALL, OPEN_CALL, parse_message
from sharpen.rewards.calls import as_call
from sharpen.types import Message, Reward, StopReason, Task, Trajectory, Turn

_WORD = re.compile(r"[\u3400-\u9fff]|\w++(?:[.\-:]\w++)*+")
_STOP_WORDS = frozenset(
    ("a", "an", "and", "are", "id", "in", "is", "it", "of", "that", "the", "to")
)
_MAX_TEXT_CHARS = 20_000
_MAX_STEP_CHARS = 200  # of a malformed step that is quoted


def words(text: str) -> set[str]:
    """Returns the words of a text without stop words; each Chinese character is a word."""
    return set(_WORD.findall(text[:_MAX_TEXT_CHARS].casefold())) - _STOP_WORDS


def turns_from_steps(steps: Sequence[Any]) -> list[Turn]:
    """Read executed steps as turns.

    A step has `name`/`tool`/`action`, `arguments`/`action_input`, `result`/`observation` and
    `thought`. One that only says something becomes a turn without a call."""
    turns = []
    for step in steps:
        row = step if isinstance(step, Mapping) else {"action": step}
        result = row.get("result", row.get("observation"))
        results = (Message("tool", str(result)),) if result else ()
        turns.append(Turn(_message_from_step(row), results=results))
    return turns


def _message_from_step(step: Mapping[str, Any]) -> Message:
    text = str(step.get("thought") or step.get("final_answer") or "")
    call = as_call(step)
    if call:
        return Message("assistant", text, tool_calls=(call,))
    if any(step.get(key) for key in ("name", "tool", "action")):
        # a step that names a tool and is no call counts as a broken call
        return parse_message(f"{text}{OPEN_CALL}{str(step)[:_MAX_STEP_CHARS]}{CLOSE_CALL}")
    return Message("assistant", text)


def turn_rewards(task: Task, trajectory: Trajectory, reward: Reward) -> list[float]:
    """Returns what each turn added to the value of the trajectory; their sum is its value."""
    turns = trajectory.turns
    values = [0.0]
    for end in range(1, len(turns) + 1):
        stop = trajectory.stop if end == len(turns) else StopReason.ANSWERED
        beginning = replace(trajectory, turns=turns[:end], stop=stop)
        values.append(reward.score(task, beginning).value)
    return [after - before for before, after in pairwise(values)]


def discounted_returns(rewards: Sequence[float], gamma: float = 1.0) -> list[float]:
    """Returns for each turn its reward plus the discounted rewards of the turns that follow."""
    returns = []
    total = 0.0
    for reward in reversed(rewards):
        total = reward + gamma * total
        returns.append(total)
    return returns[::-1]


def group_relative(group: Sequence[Sequence[float]], gamma: float = 1.0) -> list[list[float]]:
    """Normalize the turn rewards of several samples of one task, and return their returns.

    Rewards are centred and scaled by those of all turns of the group; a flat group gives zeros."""
    all_rewards = [reward for rewards in group for reward in rewards] or [0.0]
    mean = statistics.fmean(all_rewards)
    spread = statistics.pstdev(all_rewards)
    scale = 1 / spread if spread > 1e-8 else 0.0
    returns = []
    for rewards in group:
        normalized_rewards = [(reward - mean) * scale for reward in rewards]
        returns.append(discounted_returns(normalized_rewards, gamma))
    return returns
