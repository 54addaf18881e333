"""Preference optimisation: DPO and its relatives on pairs, read or sampled from the policy itself.

A run over tasks has rounds. Each samples its pairs from the policy as it is then, writes them down,
asks the reference once for all of them, and trains. What a round begins with lies in the run
folder, so that a run killed anywhere continues with the same losses.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sharpen.data.sources import read_rows
from sharpen.models.load import load_tokenizer
from sharpen.policy.local import LocalPolicy
from sharpen.records import read_json, write_json, write_jsonl
from sharpen.render import Renderer
from sharpen.rewards.compose import build_reward
from sharpen.rollout import find_environment, rollout
from sharpen.rows import preference_from_row, preference_to_row, task_from_row
from sharpen.tools import load_object
from sharpen.train import preferences
from sharpen.train.batching import trained_tokens
from sharpen.train.config.dpo import DPOConfig
from sharpen.train.dataset import Phase
from sharpen.train.learner import Learner
from sharpen.train.policy_setup import start_policy
from sharpen.train.preference_losses import LOSSES, rewards, sft
from sharpen.train.preferences import NoPairs, fitting, pair_rows, with_strangers
from sharpen.train.rl_data import GroupScorer, TaskReward, as_figures, figures
from sharpen.train.run import TrainingRun
from sharpen.train.sft import open_folder
from sharpen.types import Datum, Json, Preference, Reward, Sampling, SharpenError, Task


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Chosen and rejected (for kto also another pair's answers), and what the reference makes of
    each."""

    sides: list[Datum]
    reference: list[float]


class DPOTrainer:
    """`DPOTrainer(config, output).train()`. `reward` scores samples instead of the config's;
    `metric(model, renderer)` is measured every `eval_steps`."""

    def __init__(
        self,
        config: DPOConfig,
        output: str | Path = "runs/dpo",
        reward: Reward | None = None,
        metric: Callable[[Any, Renderer], Any] | None = None,
    ):
        self.config, self.output = config, Path(output)
        found = build_reward(config.reward) if config.reward else TaskReward()
        self.reward, self.make = reward or found, find_environment(config.env)
        self.metric = metric or (load_object(config.metric) if config.metric else None)
        tokenizer = load_tokenizer(config.base_model, config.trust_remote_code)
        self.renderer = Renderer(tokenizer, config.template)
        self.per_step = config.batch_size * config.gradient_accumulation

    # Rows ------------------------------------------------------------------------------------

    def read(self, source: str) -> tuple[list[Task], list[list[Datum]]]:
        """Tasks or pairs: what the first row is, all are."""
        rows = list(read_rows(source)) if source else []
        if not source or (rows and "instruction" in rows[0].value):
            return [task_from_row(row.value, row.where) for row in rows], []
        pairs = [replace(preference_from_row(r.value, r.where), id=r.where) for r in rows]
        found = fitting(pair_rows(pairs, self.renderer), self.config.max_length, source)
        return [], with_strangers(found, source) if self.config.loss_type == "kto" else found

    def sampled(self, number: int, begin: int) -> list[list[Datum]]:
        """The pairs of a round, from its file or else from the policy."""
        group, path = self.learner.processes, self.output / f"pairs-{number + 1}.jsonl"
        path = path if self.config.rounds > 1 else self.output / "pairs.jsonl"
        if not self.written(path, begin):
            trouble = ""
            if group.rank == 0:
                try:
                    write_jsonl(path, map(preference_to_row, self.sample(number)))
                except NoPairs as error:
                    trouble = str(error)
            if trouble := group.gather({0: trouble} if group.rank == 0 else {})[0]:
                raise NoPairs(trouble)
        return self.read(str(path))[1]

    def sample(self, number: int) -> list[Preference]:
        config, tasks = self.config, self.tasks
        count = min(config.tasks_per_round or len(tasks), len(tasks))
        tasks = random.Random(f"{config.seed}:{number}").sample(tasks, count)
        seed = config.seed * 1009 + number
        sampling = Sampling(config.max_tokens, config.temperature, config.top_p, seed)
        policy, turns = LocalPolicy(self.learner.model, self.renderer), config.max_turns
        return preferences.generate_preference_pairs(
            policy, tasks, self.reward, self.make, config.num_samples, sampling, turns
        )

    def referred(self, rows: list[list[Datum]], name: str, begin: int = 0) -> list[Pair]:
        """The rows with what the reference makes of them, asked once."""
        path, learner = self.output / f"{name}.json", self.learner
        if not rows or not self.config.needs_reference:
            return [Pair(row, [0.0] * len(row)) for row in rows]
        sides = [side for row in rows for side in row]
        ids = b"".join(side.ids.tobytes() for side in sides)
        told: Json = {"rows": hashlib.sha256(ids).hexdigest()}
        if self.written(path, begin):
            found = read_json(path)
            if found["rows"] != told["rows"]:
                raise SharpenError(f"{path}: of other rows; start in another folder")
        else:
            own = self.config.update_reference and begin
            values = learner.logprobs if own else partial(self.start.reference.logprobs, learner)
            found = told | {"logps": sums(values(sides)).reshape(len(rows), -1).tolist()}
            if not np.isfinite(found["logps"]).all():
                raise SharpenError(f"{name}: a log-probability of the reference is not finite")
            if learner.processes.rank == 0:
                write_json(path, found)
        return [Pair(row, logps) for row, logps in zip(rows, found["logps"], strict=True)]

    def written(self, path: Path, begin: int) -> bool:
        """Whether all processes find a file of a round that begins at step `begin`."""
        missing = self.learner.processes.agreed(int(not path.is_file()))
        if missing and self.learner.steps_done > begin:
            raise SharpenError(f"{path}: gone, and the run is behind it; start in another folder")
        return not missing

    # The loop --------------------------------------------------------------------------------

    def train(self) -> dict[str, float]:
        """Run to the end, or on from where a killed run stopped. Returns the last figures."""
        config, begin = self.config, 0
        (self.tasks, rows), dev = self.read(config.train_data), self.read(config.dev_data)
        self.check(rows)
        open_folder(self.output, config)
        asked = config.reference_model if config.needs_reference else None
        self.start = start_policy(config, self.renderer, asked)
        self.learner = learner = Learner(self.start.model, config, 1)
        self.dev_tasks, self.dev = dev[0], self.referred(dev[1], "dev-reference")
        pairs = self.referred(rows or self.sampled(0, 0), "reference")
        learner.total_steps = self.plan(0, 0, len(pairs))[1]
        with TrainingRun(self.output, config, learner) as run:
            run.resume({})
            for number in range(config.rounds):
                if number:
                    try:
                        rows = self.sampled(number, begin)
                    except NoPairs as error:  # perhaps because the tasks are learnt
                        print(f"stopping before round {number + 1}: {error}")
                        break
                    pairs = self.referred(rows, f"reference-{number + 1}", begin)
                end, total = self.plan(number, begin, len(pairs))
                learner.total_steps = run.total = total
                if run.first:
                    run.display.total = total
                phase = Phase([pair.sides[0] for pair in pairs], end - begin)
                while (step := learner.steps_done) < end:
                    chosen = phase.chosen(step - begin, self.per_step, config.seed + number, {})
                    row = self.step([pairs[index] for index in chosen])
                    if row["step"] % config.eval_steps == 0 or row["step"] == total:
                        row |= self.evaluate()
                    run.end_of_step({**row, "round": number + 1}, {})
                begin = end
        if isinstance(self.reward, TaskReward):
            self.reward.close()
        self.start.save(learner, self.output / "final")
        last = run.folder.metrics()[-1] if run.first else {}
        kept = {"loss", "accuracy", "margin"} | {key for key in last if key.startswith("dev_")}
        return {"steps": learner.steps_done, **{key: last[key] for key in last if key in kept}}

    def check(self, rows: Sequence[Any]) -> None:
        config = self.config
        if config.rounds > 1 and rows:
            raise SharpenError(f"rounds={config.rounds}: needs tasks, {config.train_data} is pairs")
        if self.tasks and config.parallel not in ("auto", "ddp"):
            how = f"parallel={config.parallel}"
            raise SharpenError(f"{how}: cannot sample pairs; sample them first")

    def plan(self, number: int, begin: int, count: int) -> tuple[int, int]:
        """The step that a round of `count` pairs ends with, and the run's last one if the rounds
        to come are as long."""
        rounds, steps = self.config.rounds, -(-count // self.per_step) * self.config.num_epochs
        if most := self.config.max_steps:
            return most * (number + 1) // rounds, most
        return begin + steps, begin + steps * (rounds - number)

    def step(self, pairs: Sequence[Pair]) -> Json:
        """One step in two passes, as for reward models: all log-probabilities first, then each
        side's tokens weighted by the slope of the loss at their sum, which is exact however the
        step is split."""
        told, slopes = self.measure(pairs)
        weighted = [
            replace(side, weight=slope)
            for pair, found in zip(pairs, slopes, strict=True)
            for side, slope in zip(pair.sides[:2], found[:2], strict=True)
        ]
        report = asdict(self.learner.step(weighted, lambda v, b, _: (v * b.weight_N).sum()))
        return {"step": self.learner.steps_done, **report, **told}

    def measure(self, pairs: Sequence[Pair]) -> tuple[dict[str, float], list[list[float]]]:
        """Figures, and the slope of the loss by the log-probability of each side."""
        sides = [side for pair in pairs for side in pair.sides]
        logps_P_K = torch.tensor(sums(self.learner.logprobs(sides))).view(len(pairs), -1)
        logps_P_K.requires_grad_(True)
        lengths_P_K = torch.tensor([float(trained_tokens(d)) for d in sides]).view_as(logps_P_K)
        ratio_P_K = logps_P_K - torch.tensor(np.array([pair.reference for pair in pairs]))
        loss = LOSSES[self.config.loss_type](ratio_P_K, lengths_P_K, self.config)
        loss = loss + self.config.sft_weight * sft(logps_P_K, lengths_P_K)
        (slopes_P_K,) = torch.autograd.grad(loss, logps_P_K)
        reward_P_K = rewards(ratio_P_K, lengths_P_K, self.config).detach()
        margin_P = reward_P_K[:, 0] - reward_P_K[:, 1]
        told = {"loss": loss, "accuracy": (margin_P > 0).double().mean(), "margin": margin_P.mean()}
        for at, name in enumerate(("chosen", "rejected")):
            told |= {f"{name}_reward": reward_P_K[:, at].mean()}
            told |= {f"{name}_logp": logps_P_K[:, at].mean()}
        return {name: value.item() for name, value in told.items()}, slopes_P_K.tolist()

    def evaluate(self) -> Json:
        """Figures of the dev pairs, the reward of greedy answers to dev tasks, and the metric."""
        config, row = self.config, dict[str, Any]()
        if self.dev:
            row = {f"dev_{name}": value for name, value in self.measure(self.dev)[0].items()}
        if self.learner.processes.rank:
            return row
        self.learner.model.eval()
        if self.dev_tasks:
            policy, greedy = LocalPolicy(self.learner.model, self.renderer), config.max_tokens
            done = rollout(policy, self.dev_tasks, self.make, Sampling(greedy), config.max_turns)
            told = figures(GroupScorer(self.reward).groups(self.dev_tasks, done))
            row |= {f"dev_{name}": value for name, value in told.items()}
        return row | (
            as_figures(self.metric(self.learner.model, self.renderer)) if self.metric else {}
        )


def sums(logprobs: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([values.sum(dtype=np.float64) for values in logprobs])
