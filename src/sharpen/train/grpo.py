"""GRPO and its kin: several samples a task, each as good as it is better than its group.

One flat loop: tasks → samples → scores → advantages → rows of exactly the sampled ids → updates.
A group whose samples are all equally good teaches nothing: it is refilled from further tasks or
reported, never trained on.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from sharpen.policy.local import LocalPolicy
from sharpen.records import atomic_folder
from sharpen.train.advantages import group_advantages, token_weights
from sharpen.train.async_sampler import AsyncSampler
from sharpen.train.config.grpo import GRPOConfig
from sharpen.train.config.online import RLConfig
from sharpen.train.learner import Learner, Loss, StepReport
from sharpen.train.losses import Surrogate, policy_loss
from sharpen.train.policy_setup import PolicySetup, start_policy
from sharpen.train.practice import Evaluate, Practice
from sharpen.train.rl_data import Group, counted, figures, rows_of, with_columns
from sharpen.train.run import TrainingRun
from sharpen.train.sft import open_folder
from sharpen.types import Datum, Json, Reward, SharpenError

NOTHING: Json = {"loss": 0.0, "tokens": 0, "trained": 0, "skipped": True}
RATIO = {"gspo": "mean", "rloo": "sum"}  # of a row; the others have one a token


class GRPOTrainer:
    """`GRPOTrainer(config, output).train()`. `reward` and `evaluate(policy, step)` may be given as
    objects instead of by name."""

    def __init__(
        self,
        config: GRPOConfig,
        output: str | Path = "runs/grpo",
        reward: Reward | None = None,
        evaluate: Evaluate | None = None,
    ):
        self.config, self.output = config, Path(output)
        self.practice = Practice(config, reward, evaluate)
        self.how = surrogate_of(config)
        self.model: Any = None

    def train(self) -> dict[str, float]:
        """Run to the end, or on from where a killed run stopped. Returns the last figures."""
        config, practice = self.config, self.practice
        open_folder(self.output, config)
        learner = self.prepare()
        run = TrainingRun(self.output, config, learner, config.updates)
        with run, practice, contextlib.ExitStack() as stack:
            state = run.resume(practice.first_state())
            if not learner.steps_done:
                practice.check_gate()
            ahead = None
            if config.async_steps:
                ahead = stack.enter_context(AsyncSampler(practice, learner, config, state))
            while (done := learner.steps_done // config.updates) < run.total:
                if ahead:
                    groups, row = ahead.take(done, state)
                else:
                    groups, row = practice.gather(state, config.refill_rounds or 0)
                row = {"step": done + 1} | row | self.learn(groups)
                if ahead:
                    ahead.publish(done + 1)
                row |= practice.evaluations(row["step"])
                row |= practice.watch(groups, row, state)
                keep_best(self, row, state)
                practice.show(self.output, groups, row, state)
                run.end_of_step(row, state, show="metric" in row)
                practice.check_flat(state)
        return finished(self, run)

    def prepare(self) -> Learner:
        """Load what is trained."""
        config = self.config
        self.start, self.learner = start_learner(config, self.practice, config.beta > 0)
        self.model = self.start.model
        return self.learner

    def learn(self, groups: Sequence[Group]) -> Json:
        """An update on those groups that can teach something."""
        lively = [group for group in groups if not group.flat]
        return figures(groups) | {"flat_groups": len(groups) - len(lively)} | self.update(lively)

    def update(self, groups: Sequence[Group]) -> Json:
        """One or several optimiser steps on a step's samples."""
        config, learner, started = self.config, self.learner, time.monotonic()
        behind = learner.steps_done + config.updates
        if not groups:
            learner.steps_done = behind
            return NOTHING
        rows, owners, lengths = rows_of(groups)
        found = [group.rewards for group in groups]
        if config.use_advantage:
            found = group_advantages(found, config.variant)
        rows = with_columns(rows, advantage=np.concatenate(found)[owners])
        trusted = config.async_steps or config.trust_sampler
        if trusted:  # by the weights that they were sampled from
            rows = with_columns(rows, old=[row.columns["sampler"] for row in rows])
        elif config.updates > 1:  # else they are what the only update computes anyway
            rows = with_columns(rows, old=learner.logprobs(rows))
        if config.beta:
            rows = with_columns(rows, reference=self.start.reference.logprobs(learner, rows))
        sums, reports = dict[str, Any](), list[StepReport]()
        # neighbours stay together: the prompt of a task is computed once
        part_of = np.arange(len(lengths)) * config.minibatches // len(lengths)
        for number in range(config.updates):
            chosen = np.flatnonzero(part_of == number % config.minibatches)
            weights = np.zeros(len(lengths))
            weights[chosen] = token_weights(lengths[chosen], config.variant, config.max_tokens)
            taken = counted(weighted(rows, owners, weights))
            if taken:  # there may be fewer samples than mini-batches
                reports.append(learner.step(taken, surrogate_loss(self.how, sums)))
        learner.steps_done = behind
        if trusted:  # nothing was held against the sampler
            sums.pop("mismatch")
        return update_row(reports, sums, time.monotonic() - started)

    def save_model(self, path: str | Path) -> None:
        """A folder that loads on its own: an adapter, or a whole model."""
        self.start.save(self.learner, path)


def start_learner(config: RLConfig, practice: Practice, held: bool) -> tuple[PolicySetup, Learner]:
    """The policy, `held` against a reference or not, as a learner that also takes the turns."""
    if config.reference_model and not held:
        raise SharpenError("reference_model: the weight of the KL is 0, nothing asks for it")
    start = start_policy(config, reference=config.reference_model if held else None)
    learner = Learner(start.model, config, practice.total * config.updates)
    if learner.processes.world > 1:
        raise SharpenError("RL with its own samples runs in one process")
    learner.core.temperature = config.temperature  # type: ignore[assignment]
    practice.policy = LocalPolicy(start.model, start.renderer, config.rollout_rows)
    return start, learner


def surrogate_of(config: GRPOConfig) -> Surrogate:
    high, ratio = config.clip_high or config.clip, RATIO.get(config.variant, "token")
    return Surrogate(config.clip, high, config.beta, ratio, config.importance_cap)


def weighted(rows: Sequence[Datum], owners: np.ndarray, weights: np.ndarray) -> list[Datum]:
    """The rows of those samples that weigh something, each with its sample's weight."""
    pairs = zip(rows, weights[owners].tolist(), strict=True)
    return [replace(row, weight=weight) for row, weight in pairs if weight]


def surrogate_loss(how: Surrogate, sums: dict[str, Any]) -> Loss:
    """The loss for the learner, which adds figures of all micro-batches to `sums`."""

    def loss(logprobs_N: Any, batch: Any, _: float) -> Any:
        value, found = policy_loss(logprobs_N, batch.weight_N, batch.row_N, batch.columns, how)
        for name, part in found.items():
            sums[name] = sums.get(name, 0.0) + part
        return value

    return loss


def update_row(reports: Sequence[StepReport], sums: dict[str, Any], seconds: float) -> Json:
    """Mean loss and gradient norm of a step's updates, and figures of their tokens."""
    row = asdict(reports[-1])
    row |= {key: float(np.mean([asdict(r)[key] for r in reports])) for key in ("loss", "norm")}
    row |= {key: sum(asdict(r)[key] for r in reports) for key in ("tokens", "trained")}
    row["skipped"] = any(report.skipped for report in reports)
    count = float(sums.pop("count"))
    row |= {name: float(value) / count for name, value in sums.items()}
    return row | {"update_seconds": seconds, "update_tokens_per_s": row["tokens"] / seconds}


def keep_best(trainer: Any, row: Json, state: Json) -> None:
    if "metric" in row and (state["best"] is None or row["metric"] > state["best"]):
        state["best"] = row["metric"]
        trainer.save_model(trainer.output / "best")


def finished(trainer: Any, run: TrainingRun) -> dict[str, float]:
    """`final/`: the best weights where they were measured, else the last. Returns the last of each
    figure that a reader asks for first."""
    best, rows = trainer.output / "best", run.folder.metrics()
    if best.is_dir():
        with atomic_folder(trainer.output / "final") as work:
            shutil.copytree(best, work, dirs_exist_ok=True)
    else:
        trainer.save_model(trainer.output / "final")
    names = ("step", "loss", "reward", "kl", "metric")
    found = {name: row[name] for name in names for row in rows if name in row}
    measured = [row["metric"] for row in rows if "metric" in row]
    return found | ({"best_metric": max(measured)} if measured else {})
