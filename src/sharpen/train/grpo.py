"""GRPO and its relatives: several samples per task; a sample's advantage is how much better it is
than its group.

The loop is `OnlineTrainer`'s. A group whose samples are all equally good teaches nothing: it is
refilled from further tasks or reported, never trained on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sharpen.scored_rollout import TrajectoryGroup
from sharpen.train.advantages import group_advantages, token_weights
from sharpen.train.async_sampler import AsyncGroupSource
from sharpen.train.callback import Callback
from sharpen.train.config.grpo import GRPOConfig
from sharpen.train.group_source import GroupSource
from sharpen.train.learner import StepReport
from sharpen.train.losses import Surrogate
from sharpen.train.online import ChangeTask, OnlineTrainer
from sharpen.train.policy_update import (
    NO_UPDATE,
    FigureSums,
    surrogate_loss,
    update_figures,
    weighted_rows,
)
from sharpen.train.rl_data import SampleRows, merge_equal_rows, rows_of_groups, with_column
from sharpen.types import Datum, Json, Reward

# over what the probability ratio is taken; variants that are not named have one per token
_RATIO = {"gspo": "mean", "rloo": "sum"}


class GRPOTrainer(OnlineTrainer):
    """`GRPOTrainer(config, output).train()`."""

    config: GRPOConfig

    def __init__(
        self,
        config: GRPOConfig,
        output: str | Path = "runs/grpo",
        reward: Reward | None = None,
        callback: Callback | None = None,
        change_task: ChangeTask | None = None,
    ):
        super().__init__(config, output, reward, callback, change_task)
        self.surrogate = surrogate_of(config)
        # the log-probabilities of the weights that sampled are the old ones
        self.trusts_sampler = bool(config.async_steps or config.trust_sampler)

    @property
    def needs_reference(self) -> bool:
        """Whether the KL to the reference has a weight."""
        return self.config.beta > 0

    def make_source(self) -> GroupSource:
        """Returns the sampler: in turns with the learner, or ahead of it."""
        config = self.config
        refill_rounds = config.refill_rounds or 0
        if not config.async_steps:
            return self.local_source(self.policy, refill_rounds)
        return AsyncGroupSource(
            self.learner,
            self.setup.renderer,
            lambda policy: self.local_source(policy, refill_rounds),
            config,
        )

    def sample_advantages(self, groups: Sequence[TrajectoryGroup]) -> list[np.ndarray | None]:
        """Returns the advantages of the groups that are trained on; None for flat ones."""
        lively_advantages = iter(self._advantages(_lively(groups)))
        return [None if group.flat else next(lively_advantages) for group in groups]

    def update(self, groups: Sequence[TrajectoryGroup], state: Json) -> Json:
        """One or several optimiser steps on the groups that are not flat."""
        lively = _lively(groups)
        steps_after = self.learner.steps_done + self.config.updates
        row: Json = {"flat_groups": len(groups) - len(lively)}
        row |= self._optimise(lively) if lively else NO_UPDATE
        self.learner.steps_done = steps_after
        return row

    def _optimise(self, groups: Sequence[TrajectoryGroup]) -> Json:
        """Train on the samples, mini-batch by mini-batch."""
        config = self.config
        started = time.monotonic()
        samples = rows_of_groups(groups)
        rows = self._add_columns(samples, np.concatenate(self._advantages(groups)))
        # neighbours stay together: the prompt of a task is computed once
        count = len(samples.tokens)
        minibatch_of_sample = np.arange(count) * config.minibatches // count
        sums: FigureSums = {}
        reports: list[StepReport] = []
        for number in range(config.updates):
            chosen = np.flatnonzero(minibatch_of_sample == number % config.minibatches)
            weights = np.zeros(count)
            weights[chosen] = token_weights(
                samples.tokens[chosen], config.variant, config.max_tokens
            )
            minibatch = merge_equal_rows(weighted_rows(rows, samples.sample_of_row, weights))
            if minibatch:  # there may be fewer samples than mini-batches
                reports.append(self.learner.step(minibatch, surrogate_loss(self.surrogate, sums)))
        if self.trusts_sampler:  # nothing was compared with the sampler
            sums.pop("mismatch")
        return update_figures(reports, sums, time.monotonic() - started)

    def _advantages(self, groups: Sequence[TrajectoryGroup]) -> list[np.ndarray]:
        rewards = [group.rewards for group in groups]
        if self.config.use_advantage and rewards:
            return group_advantages(rewards, self.config.variant)
        return rewards

    def _add_columns(self, samples: SampleRows, advantages: np.ndarray) -> list[Datum]:
        """The rows with advantages, old log-probabilities and those of the reference."""
        config = self.config
        rows = with_column(samples.rows, "advantage", advantages[samples.sample_of_row])
        if self.trusts_sampler:
            rows = with_column(rows, "old", [row.columns["sampler"] for row in rows])
        elif config.updates > 1:  # otherwise they are what the only update computes anyway
            rows = with_column(rows, "old", self.learner.logprobs(rows))
        if self.setup.reference:
            reference = self.setup.reference.logprobs(self.learner, rows)
            rows = with_column(rows, "reference", reference)
        return rows


def surrogate_of(config: GRPOConfig) -> Surrogate:
    """Returns the loss that a variant has."""
    clip_high = config.clip_high or config.clip
    ratio = _RATIO.get(config.variant, "token")
    return Surrogate(config.clip, clip_high, config.beta, ratio, config.importance_cap)


def _lively(groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """The groups that something can be learnt from."""
    return [group for group in groups if not group.flat]
