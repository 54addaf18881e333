"""Give credit along a trajectory, so that a late reward is not spread over all turns alike.

What each turn added, discounted returns, and turns against the other samples of a group. The
result is stored in `Turn.reward`. Users call `AgentTrajectoryRL`; the agent reward reads execution
traces with `turns_from_steps`.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from sharpen.calls import CLOSE_CALL, OPEN_CALL, parse_message
from sharpen.rewards.calls import as_call, call_key
from sharpen.types import Message, Reward, SharpenError, StopReason, Task, Trajectory, Turn

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


class AgentTrajectoryRL:
    """Rewards for whole trajectories, and credit for their turns."""

    def __init__(self, reward_model: Any):
        self.reward_model = reward_model

    def compute_trajectory_reward(
        self, question: str, trajectory: Sequence[Any], final_answer: str, ground_truth: Any
    ) -> float:
        """Returns the outcome, and a bonus where it is positive.

        The outcome is the reward model's total for a task's gold, and 1 or -0.5 for a text. The
        bonus is up to 0.2 for not repeating calls and up to 0.3 for thoughts about the matter."""
        outcome = self._outcome(question, trajectory, final_answer, ground_truth)
        turns = turns_from_steps(trajectory)
        keys = [call_key(call) for turn in turns for call in turn.message.tool_calls]
        economy = len(set(keys)) / len(keys) if keys else 1.0
        bonus = 0.2 * economy + 0.3 * _thought_quality(question, turns)
        return outcome + (bonus if outcome > 0 else 0.0)

    def _outcome(
        self, question: str, steps: Sequence[Any], final_answer: str, ground_truth: Any
    ) -> float:
        if isinstance(ground_truth, Mapping):
            reward = self.reward_model.compute_reward(question, final_answer, ground_truth, steps)
            return reward["total"]
        from sharpen.rewards.verifiable import VerifiableRewardCalculator

        calculator = VerifiableRewardCalculator("exact")
        reward = calculator.calculate_reward(question, final_answer, ground_truth)
        return 1.0 if reward["components"]["correctness"] == 1 else -0.5

    def credit(
        self, task: Task, group: Sequence[Trajectory], mode: str = "group", gamma: float = 1.0
    ) -> list[Trajectory]:
        """Set `Turn.reward` of all samples of a task.

        `mode` is `turn` (what the turn added), `return` (with what follows), or `group` (returns
        against the other samples)."""
        rewards = [turn_rewards(task, trajectory, self.reward_model) for trajectory in group]
        credits_by_mode = {
            "turn": rewards,
            "return": [discounted_returns(turn_values, gamma) for turn_values in rewards],
            "group": group_relative(rewards, gamma),
        }
        if mode not in credits_by_mode:
            raise SharpenError(f"credit: expected {', '.join(credits_by_mode)}, found {mode!r}")
        credited = []
        for trajectory, values in zip(group, credits_by_mode[mode], strict=True):
            turns = [
                replace(turn, reward=value)
                for turn, value in zip(trajectory.turns, values, strict=True)
            ]
            credited.append(replace(trajectory, turns=tuple(turns)))
        return credited


def _thought_quality(question: str, turns: Sequence[Turn]) -> float:
    """Returns the share of new thoughts about the question or a result so far.

    Length earns nothing."""
    if not turns:
        return 0.0
    known_words = words(question)
    earlier_thoughts: set[frozenset[str]] = set()
    good_thoughts = 0
    for turn in turns:
        thought = frozenset(words(turn.message.content))
        if thought & known_words and thought not in earlier_thoughts:
            good_thoughts += 1
        earlier_thoughts.add(thought)
        for result in turn.results:
            known_words |= words(result.content)
    return good_thoughts / len(turns)
