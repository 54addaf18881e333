"""The frontier techniques document's class for rewards of whole trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sharpen.rewards.agent import AgentRewardModel
from sharpen.rewards.calls import call_key
from sharpen.rewards.trajectory import (
    discounted_returns,
    group_relative,
    turn_rewards,
    turns_from_steps,
    words,
)
from sharpen.rewards.verifiable import VerifiableRewardCalculator
from sharpen.types import SharpenError, Task, Trajectory, Turn

_WRONG_TEXT = -0.5  # outcome of an answer text that differs from the right one
_ECONOMY_WEIGHT = 0.2
_THOUGHT_WEIGHT = 0.3


class AgentTrajectoryRL:
    """Rewards for whole trajectories, and credit for their turns (section 2.3 of the document).

    Two bonuses differ from the document. Its efficiency bonus counts calls; ours counts repeated
    ones, so that a long task is not punished. Its thought bonus counts long thoughts and words
    such as "because"; ours counts new thoughts about the matter, which padding does not earn.
    """

    def __init__(self, reward_model: AgentRewardModel):
        self.reward_model = reward_model

    def compute_trajectory_reward(
        self, question: str, trajectory: Sequence[Any], final_answer: str, ground_truth: Any
    ) -> float:
        """Return the outcome, plus the bonuses where the outcome is positive.

        The outcome is the reward model's total if `ground_truth` is the gold of a task. If it is a
        text, the outcome is 1 for the same text and -0.5 for another. The bonuses are up to 0.2
        for not repeating calls and up to 0.3 for thoughts about the matter.
        """
        outcome = self._outcome(question, trajectory, final_answer, ground_truth)
        if outcome <= 0:
            return outcome
        turns = turns_from_steps(trajectory)
        keys = [call_key(call) for turn in turns for call in turn.message.tool_calls]
        economy = len(set(keys)) / len(keys) if keys else 1.0
        bonus = _ECONOMY_WEIGHT * economy + _THOUGHT_WEIGHT * _thought_quality(question, turns)
        return outcome + bonus

    def _outcome(
        self, question: str, steps: Sequence[Any], final_answer: str, ground_truth: Any
    ) -> float:
        if isinstance(ground_truth, Mapping):
            reward = self.reward_model.compute_reward(
                question, final_answer, dict(ground_truth), steps
            )
            return reward["total"]
        with VerifiableRewardCalculator("exact") as calculator:
            reward = calculator.calculate_reward(question, final_answer, ground_truth)
        return 1.0 if reward["components"]["correctness"] == 1 else _WRONG_TEXT

    def credit(
        self, task: Task, group: Sequence[Trajectory], mode: str = "group", gamma: float = 1.0
    ) -> list[Trajectory]:
        """Return all samples of a task with `Turn.reward` set.

        `mode` is `turn` (what the turn added), `return` (with what followed, discounted by
        `gamma`) or `group` (the same, normalized over the samples).
        """
        added = [turn_rewards(task, trajectory, self.reward_model) for trajectory in group]
        if mode == "turn":
            values = added
        elif mode == "return":
            values = [discounted_returns(rewards, gamma) for rewards in added]
        elif mode == "group":
            values = group_relative(added, gamma)
        else:
            raise SharpenError(f"credit: expected turn, return, group, found {mode!r}")
        credited = []
        for trajectory, turn_values in zip(group, values, strict=True):
            turns = []
            for turn, value in zip(trajectory.turns, turn_values, strict=True):
                turns.append(replace(turn, reward=value))
            credited.append(replace(trajectory, turns=tuple(turns)))
        return credited


def _thought_quality(question: str, turns: Sequence[Turn]) -> float:
    """Return the share of new thoughts about the question or an earlier result."""
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
