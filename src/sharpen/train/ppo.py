"""PPO: a critic foretells what an episode will be worth from each token on, and a token is as good
as what came was better than foretold.

An episode is one chain of sampled tokens over all of its turns; what tools and users said lies
between them and is no action. The score comes with the last token, a penalty for leaving the
reference with each.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sharpen.models.load import attach_lora, load_model
from sharpen.train import grpo
from sharpen.train.advantages import FLAT, KLController, gae, token_weights, whiten
from sharpen.train.config.ppo import PPOConfig
from sharpen.train.learner import Learner, StepReport
from sharpen.train.losses import Surrogate, value_loss
from sharpen.train.practice import Evaluate, Practice
from sharpen.train.rl_data import Group, figures, rows_of, with_columns
from sharpen.train.run import TrainingRun
from sharpen.train.sft import open_folder
from sharpen.train.values import ValueModel
from sharpen.types import Datum, Json, Reward


class PPOTrainer:
    """`PPOTrainer(config, output).train()`. `reward` and `evaluate(policy, step)` may be given as
    objects instead of by name."""

    def __init__(
        self,
        config: PPOConfig,
        output: str | Path = "runs/ppo",
        reward: Reward | None = None,
        evaluate: Evaluate | None = None,
    ):
        self.config, self.output = config, Path(output)
        self.practice = Practice(config, reward, evaluate)
        clip, cap = config.clip_range, config.importance_cap
        self.how = Surrogate(clip, clip, truncation=cap)
        self.model: Any = None

    def train(self) -> dict[str, float]:
        """Run to the end, or on from where a killed run stopped. Returns the last figures."""
        config, practice = self.config, self.practice
        open_folder(self.output, config)
        self.start, self.learner = grpo.start_learner(config, practice, config.kl_coef > 0)
        self.model, learner = self.start.model, self.learner
        self.critic = make_critic(config, learner.total_steps)
        others = {"critic": self.critic}
        with TrainingRun(self.output, config, learner, config.updates, others) as run, practice:
            state = run.resume(practice.first_state() | {"kl_coef": config.kl_coef})
            if not learner.steps_done:
                practice.check_gate()
            while learner.steps_done < learner.total_steps:
                groups, row = practice.gather(state)
                row |= figures(groups) | self.update(groups, state)
                row = {"step": learner.steps_done // config.updates} | row
                row |= practice.evaluations(row["step"])
                row |= practice.watch(groups, row, state)
                grpo.keep_best(self, row, state)
                practice.show(self.output, groups, row, state)
                run.end_of_step(row, state, show="metric" in row)
                practice.check_flat(state)
        return grpo.finished(self, run)

    def update(self, groups: Sequence[Group], state: Json) -> Json:
        """Several optimiser steps of policy and critic on a step's episodes."""
        config, learner, started = self.config, self.learner, time.monotonic()
        behind = learner.steps_done + config.updates
        scores = np.concatenate([group.rewards for group in groups])
        reports, judged, sums = list[StepReport](), list[StepReport](), dict[str, Any]()
        row = grpo.NOTHING
        if np.ptp(scores) >= FLAT:  # else all that could be learnt is the critic's noise
            rows, owners, lengths = rows_of(groups)
            rows, row = self.with_advantages(rows, owners, scores, state)
            for number in range(config.updates):
                part = slice(number % config.minibatches, None, config.minibatches)
                weights = np.zeros(len(lengths))
                weights[part] = token_weights(lengths[part], "dapo")  # the mean over tokens
                taken = grpo.weighted(rows, owners, weights)
                if taken:
                    reports.append(learner.step(taken, grpo.surrogate_loss(self.how, sums)))
                    judged.append(self.critic.step(taken, self.critic_loss))
            row |= grpo.update_row(reports, sums, time.monotonic() - started)
            row |= {"value_loss": float(np.mean([report.loss for report in judged]))}
        learner.steps_done = self.critic.steps_done = behind
        return row

    def with_advantages(
        self, rows: list[Datum], owners: np.ndarray, scores: np.ndarray, state: Json
    ) -> tuple[list[Datum], Json]:
        """The rows with old log-probabilities, values, returns and advantages; and figures."""
        config = self.config
        old, values = self.learner.logprobs(rows), self.critic.values(rows)
        away = [np.zeros(len(found)) for found in old]
        if config.kl_coef:
            reference = self.start.reference.logprobs(self.learner, rows)
            away = [now - then for now, then in zip(old, reference, strict=True)]
        scores = whiten(scores, shift=False) if config.whiten_rewards else scores
        found, kls = [], []
        for number, score in enumerate(scores):
            own = np.flatnonzero(owners == number)
            kl_T = np.concatenate([away[i] for i in own])
            reward_T = -state["kl_coef"] * kl_T
            reward_T[-1] += score
            value_T = np.concatenate([values[i] for i in own]).astype(np.float64)
            found.append(gae(reward_T, value_T, config.gamma, config.lam))
            kls.append(kl_T.sum())
        advantages = whiten(np.concatenate([advantage for advantage, _ in found]))
        returns = np.concatenate([expected for _, expected in found])
        # rows lie by sample, so that one long array of tokens is cut row by row
        ends = np.cumsum([len(values_T) for values_T in values])[:-1]
        parts = {"advantage": np.split(advantages, ends), "return": np.split(returns, ends)}
        rows = with_columns(rows, old=old, value=values, **parts)
        controller = KLController(state["kl_coef"], config.kl_target, config.kl_horizon)
        controller.update(float(np.mean(kls)), len(kls))
        state["kl_coef"] = controller.value
        errors = returns - np.concatenate(values)
        explained = 1 - errors.var() / returns.var() if returns.var() > FLAT else 0.0
        told = {"kl": float(np.mean(kls)), "kl_coef": controller.value}
        return rows, told | {"explained_variance": float(explained)}

    def critic_loss(self, values_N: Any, batch: Any, _: float) -> Any:
        clip = self.config.value_clip
        return self.config.vf_coef * value_loss(values_N, batch.weight_N, batch.columns, clip)

    def save_model(self, path: str | Path) -> None:
        """The policy, in a folder that loads on its own."""
        self.start.save(self.learner, path)


def make_critic(config: PPOConfig, total_steps: int) -> Learner:
    """The policy's own weights below a head that says 0 at first."""
    model = load_model(config, "SequenceClassification")
    if hasattr(model, "peft_config"):
        model = model.merge_and_unload()
    torch.nn.init.zeros_(model.score.weight)
    torch.manual_seed(config.seed)
    model = model.requires_grad_(True) if config.full else attach_lora(model, config, "SEQ_CLS")
    own = config.model_copy(update={"learning_rate": config.critic_learning_rate})
    return Learner(model, own, total_steps, ValueModel(model, before=True))
