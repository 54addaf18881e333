"""PPO: a critic predicts the return of an episode from each of its tokens on; advantage = return −
predicted value, smoothed by GAE.

The loop is `OnlineTrainer`'s. An episode is one chain of sampled tokens over all of its turns; what
tools and users said lies between them and is no action. The score comes with the last token, a
penalty for leaving the reference with each.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sharpen.models.find import find_model
from sharpen.models.load import attach_lora, base_of_adapter, load_model
from sharpen.scored_rollout import TrajectoryGroup
from sharpen.train.advantages import FLAT, KLController, gae, token_weights, whiten
from sharpen.train.callback import Callback
from sharpen.train.collate import Batch
from sharpen.train.config.ppo import PPOConfig
from sharpen.train.learner import Learner, StepReport
from sharpen.train.losses import Surrogate, value_loss
from sharpen.train.online import ChangeTask, OnlineTrainer
from sharpen.train.policy_update import (
    NO_UPDATE,
    FigureSums,
    surrogate_loss,
    update_figures,
    weighted_rows,
)
from sharpen.train.rl_data import SampleRows, rows_of_groups, with_column
from sharpen.train.values import ValueModel
from sharpen.types import Datum, Json, Reward, SharpenError


@dataclass(frozen=True, slots=True, eq=False)
class _Credit:
    """Advantages and returns of all tokens of a step, sample after sample, and the KL of each
    sample to the reference."""

    advantages: np.ndarray
    returns: np.ndarray
    kl_of_sample: list[float]


class PPOTrainer(OnlineTrainer):
    """`PPOTrainer(config, output).train()`."""

    config: PPOConfig
    critic: Learner

    def __init__(
        self,
        config: PPOConfig,
        output: str | Path = "runs/ppo",
        reward: Reward | None = None,
        callback: Callback | None = None,
        change_task: ChangeTask | None = None,
    ):
        super().__init__(config, output, reward, callback, change_task)
        clip = config.clip_range
        self.surrogate = Surrogate(clip, clip, truncation=config.importance_cap)

    @property
    def needs_reference(self) -> bool:
        """Whether the KL to the reference has a weight."""
        return self.config.kl_coef > 0

    def prepare(self) -> Learner:
        """Load the policy and the critic."""
        learner = super().prepare()
        self.critic = _make_critic(self.config, learner.total_steps)
        return learner

    def other_learners(self) -> Mapping[str, Learner]:
        """Returns the critic, which is saved with the run."""
        return {"critic": self.critic}

    def first_state(self) -> Json:
        """Returns the state before the first step; the KL coefficient may follow the KL."""
        return super().first_state() | {"kl_coef": self.config.kl_coef}

    def update(self, groups: Sequence[TrajectoryGroup], state: Json) -> Json:
        """Several optimiser steps of policy and critic on a step's episodes."""
        steps_after = self.learner.steps_done + self.config.updates
        scores = np.concatenate([group.rewards for group in groups])
        row = dict(NO_UPDATE)
        if np.ptp(scores) >= FLAT:  # otherwise all that could be learnt is the critic's noise
            row = self._optimise(groups, scores, state)
        self.learner.steps_done = steps_after
        self.critic.steps_done = steps_after
        return row

    def _optimise(self, groups: Sequence[TrajectoryGroup], scores: np.ndarray, state: Json) -> Json:
        config = self.config
        started = time.monotonic()
        samples = rows_of_groups(groups)
        rows, row = self.add_credit(samples, scores, state)
        sums: FigureSums = {}
        policy_reports: list[StepReport] = []
        critic_reports: list[StepReport] = []
        for number in range(config.updates):
            chosen = slice(number % config.minibatches, None, config.minibatches)
            weights = np.zeros(len(samples.tokens))
            weights[chosen] = token_weights(samples.tokens[chosen], "dapo")  # mean over tokens
            minibatch = weighted_rows(rows, samples.sample_of_row, weights)
            if not minibatch:  # there may be fewer samples than mini-batches
                continue
            loss = surrogate_loss(self.surrogate, sums)
            policy_reports.append(self.learner.step(minibatch, loss))
            critic_reports.append(self.critic.step(minibatch, self._critic_loss))
        row |= update_figures(policy_reports, sums, time.monotonic() - started)
        row["value_loss"] = float(np.mean([report.loss for report in critic_reports]))
        return row

    def add_credit(
        self, samples: SampleRows, scores: np.ndarray, state: Json
    ) -> tuple[list[Datum], Json]:
        """Returns the rows with old log-probabilities, values, returns and advantages, and figures
        of them. The KL coefficient in `state` follows the measured KL."""
        config = self.config
        rows = samples.rows
        old = self.learner.logprobs(rows)
        values = self.critic.values(rows)
        kl_of_row = [np.zeros(len(logprobs_T)) for logprobs_T in old]
        if self.setup.reference:
            reference = self.setup.reference.logprobs(self.learner, rows)
            kl_of_row = [now_T - then_T for now_T, then_T in zip(old, reference, strict=True)]
        if config.whiten_rewards:
            scores = whiten(scores, shift=False)
        credit = self._assign_credit(samples, scores, values, kl_of_row, state["kl_coef"])
        # rows lie by sample, so that one long array of tokens is cut row by row
        ends = np.cumsum([len(values_T) for values_T in values])[:-1]
        rows = with_column(rows, "old", old)
        rows = with_column(rows, "value", values)
        rows = with_column(rows, "advantage", np.split(credit.advantages, ends))
        rows = with_column(rows, "return", np.split(credit.returns, ends))
        kl = float(np.mean(credit.kl_of_sample))
        controller = KLController(state["kl_coef"], config.kl_target, config.kl_horizon)
        controller.update(kl, len(credit.kl_of_sample))
        state["kl_coef"] = controller.value
        explained = _explained_variance(credit.returns, np.concatenate(values))
        return rows, {"kl": kl, "kl_coef": controller.value, "explained_variance": explained}

    def _assign_credit(
        self,
        samples: SampleRows,
        scores: np.ndarray,
        values: Sequence[np.ndarray],
        kl_of_row: Sequence[np.ndarray],
        kl_coef: float,
    ) -> _Credit:
        """Generalised advantage estimation over each episode; advantages are whitened over the
        step."""
        config = self.config
        advantages = []
        returns = []
        kl_of_sample = []
        for number, score in enumerate(scores):
            own_rows = np.flatnonzero(samples.sample_of_row == number).tolist()
            kl_T = np.concatenate([kl_of_row[index] for index in own_rows])
            value_T = np.concatenate([values[index] for index in own_rows]).astype(np.float64)
            reward_T = -kl_coef * kl_T
            reward_T[-1] += score
            advantage_T, return_T = gae(reward_T, value_T, config.gamma, config.lam)
            advantages.append(advantage_T)
            returns.append(return_T)
            kl_of_sample.append(kl_T.sum())
        return _Credit(whiten(np.concatenate(advantages)), np.concatenate(returns), kl_of_sample)

    def _critic_loss(self, values_N: torch.Tensor, batch: Batch, _: float) -> torch.Tensor:
        clip = self.config.value_clip
        return self.config.vf_coef * value_loss(values_N, batch.weight_N, batch.columns, clip)


def _explained_variance(returns: np.ndarray, values: np.ndarray) -> float:
    """The share of the variance of returns that the critic predicts."""
    errors = returns - values
    if returns.var() <= FLAT:
        return 0.0
    return float(1 - errors.var() / returns.var())


def _load_classifier(config: PPOConfig) -> Any:
    """The policy's first weights with a head that gives one value. An adapter is merged: PEFT puts
    an adapter of a language model on nothing else."""
    folder = find_model(config.base_model)
    if not (folder / "adapter_config.json").is_file():
        return load_model(config, "SequenceClassification")
    if config.load_in_4bit or config.load_in_8bit:
        raise SharpenError(
            f"{config.base_model}: an adapter on a quantised base; the critic of PPO starts "
            "from merged weights: merge the adapter first, or train with GRPO"
        )
    merged = load_model(config).merge_and_unload()
    base = config.model_copy(update={"base_model": base_of_adapter(folder)})
    classifier = _load_classifier(base)
    decoder = getattr(classifier, classifier.base_model_prefix)
    decoder.load_state_dict(getattr(merged, merged.base_model_prefix).state_dict())
    return classifier


def _make_critic(config: PPOConfig, total_steps: int) -> Learner:
    """The policy's first weights below a head that says 0 at first."""
    model = _load_classifier(config)
    torch.nn.init.zeros_(model.score.weight)
    torch.manual_seed(config.seed)
    model = model.requires_grad_(True) if config.full else attach_lora(model, config, "SEQ_CLS")
    own = config.model_copy(update={"learning_rate": config.critic_learning_rate})
    return Learner(model, own, total_steps, ValueModel(model, before=True))
