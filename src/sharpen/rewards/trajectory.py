"""Credit along a trajectory: what each turn added, discounted returns, and steps against the other
samples of a group, so that a late reward is not spread over all turns alike. `Turn.reward` holds
the result."""

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

WORD = re.compile(r"[\u3400-\u9fff]|\w++(?:[.\-:]\w++)*+")
DULL = frozenset(("a", "an", "and", "are", "id", "in", "is", "it", "of", "that", "the", "to"))


def words(text: str) -> set[str]:
    """What a text speaks of; a Chinese character is a word of its own."""
    return set(WORD.findall(text[:20_000].casefold())) - DULL


def turns_from_steps(steps: Sequence[Any]) -> list[Turn]:
    """Executed steps (`name`/`tool`/`action`, `arguments`/`action_input`, `result`/`observation`,
    `thought`) → turns; a step that only says something has no call."""
    turns = []
    for step in steps:
        step = step if isinstance(step, Mapping) else {"action": step}
        said = str(step.get("thought") or step.get("final_answer") or "")
        result = step.get("result", step.get("observation"))
        message = Message("assistant", said)
        if call := as_call(step):
            message = replace(message, tool_calls=(call,))
        elif any(step.get(key) for key in ("name", "tool", "action")):
            message = parse_message(f"{said}{OPEN_CALL}{str(step)[:200]}{CLOSE_CALL}")
        turns.append(Turn(message, results=(Message("tool", str(result)),) if result else ()))
    return turns


def turn_rewards(task: Task, trajectory: Trajectory, reward: Reward) -> list[float]:
    """What each turn added to the value of the trajectory; their sum is its value."""
    turns, values = trajectory.turns, [0.0]
    for end in range(1, len(turns) + 1):
        stop = trajectory.stop if end == len(turns) else StopReason.ANSWERED
        values.append(reward.score(task, replace(trajectory, turns=turns[:end], stop=stop)).value)
    return [after - before for before, after in pairwise(values)]


def discounted_returns(rewards: Sequence[float], gamma: float = 1.0) -> list[float]:
    """Each turn's reward with what followed it."""
    returns, total = [], 0.0
    for reward in reversed(rewards):
        total = reward + gamma * total
        returns.append(total)
    return returns[::-1]


def group_relative(group: Sequence[Sequence[float]], gamma: float = 1.0) -> list[list[float]]:
    """Turn rewards of several samples of one task → returns over rewards that were centred and
    scaled by those of all turns of the group; a flat group gives zeros."""
    flat = [reward for rewards in group for reward in rewards] or [0.0]
    mean, spread = statistics.fmean(flat), statistics.pstdev(flat)
    scale = 1 / spread if spread > 1e-8 else 0.0
    return [discounted_returns([(r - mean) * scale for r in rewards], gamma) for rewards in group]


class AgentTrajectoryRL:
    """Rewards for whole trajectories, and credit for their turns."""

    def __init__(self, reward_model: Any):
        self.reward_model = reward_model

    def compute_trajectory_reward(
        self, question: str, trajectory: Sequence[Any], final_answer: str, ground_truth: Any
    ) -> float:
        """The outcome (the reward model's total for a task's gold; 1 or -0.5 for a text), and where
        it is right up to 0.2 for not repeating calls and 0.3 for thoughts about the matter."""
        if isinstance(ground_truth, Mapping):
            judge = self.reward_model.compute_reward
            outcome = judge(question, final_answer, ground_truth, trajectory)["total"]
        else:
            from sharpen.rewards.verifiable import VerifiableRewardCalculator

            judge = VerifiableRewardCalculator("exact")
            found = judge.calculate_reward(question, final_answer, ground_truth)["components"]
            outcome = 1.0 if found["correctness"] == 1 else -0.5
        turns = turns_from_steps(trajectory)
        keys = [call_key(call) for turn in turns for call in turn.message.tool_calls]
        economy = len(set(keys)) / len(keys) if keys else 1.0
        bonus = 0.2 * economy + 0.3 * thought_quality(question, turns)
        return outcome + (bonus if outcome > 0 else 0.0)

    def credit(
        self, task: Task, group: Sequence[Trajectory], mode: str = "group", gamma: float = 1.0
    ) -> list[Trajectory]:
        """`Turn.reward` set to a `turn`'s own reward, its `return`, or that within the `group`."""
        own = [turn_rewards(task, trajectory, self.reward_model) for trajectory in group]
        kinds = {"turn": own, "return": [discounted_returns(one, gamma) for one in own]}
        kinds["group"] = group_relative(own, gamma)
        if mode not in kinds:
            raise SharpenError(f"credit: expected {', '.join(kinds)}, found {mode!r}")
        return [
            replace(one, turns=tuple(map(lambda turn, r: replace(turn, reward=r), one.turns, due)))
            for one, due in zip(group, kinds[mode], strict=True)
        ]


def thought_quality(question: str, turns: Sequence[Turn]) -> float:
    """The share of new thoughts about the question or an answer so far; length earns nothing."""
    known, before, good = words(question), set[frozenset[str]](), 0
    for turn in turns:
        thought = frozenset(words(turn.message.content))
        good += bool(thought & known) and thought not in before
        before.add(thought)
        known |= {word for result in turn.results for word in words(result.content)}
    return good / len(turns) if turns else 0.0
