"""Preference optimisation: DPO and its relatives on pairs, read or sampled from the policy itself.

A run over tasks has rounds. Each samples its pairs from the policy as it is then, writes them down,
asks the reference once for all of them, and trains. What a round begins with lies in the run
folder, so that a run killed anywhere continues with the same losses.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from sharpen.data.sources import read_rows
from sharpen.kinds import KindReward, environment_by_name
from sharpen.models.load import load_tokenizer
from sharpen.policy.local import LocalPolicy
from sharpen.records import read_json, write_json, write_jsonl
from sharpen.render import Renderer
from sharpen.rewards.compose import build_reward
from sharpen.rows import preference_from_row, preference_to_row, task_from_row
from sharpen.scored_rollout import PlaySettings, play_and_score
from sharpen.tools import load_object
from sharpen.train import preferences
from sharpen.train.batching import trained_tokens
from sharpen.train.callback import Callback, EvaluationContext, call_back
from sharpen.train.collate import Batch
from sharpen.train.config.dpo import DPOConfig
from sharpen.train.dataset import Phase
from sharpen.train.learner import Learner
from sharpen.train.policy_setup import PolicySetup, prepare_policy
from sharpen.train.preference_losses import LOSSES, rewards, sft
from sharpen.train.preference_rows import (
    PairRow,
    add_answers_of_other_pairs,
    fitting_rows,
    pair_rows,
)
from sharpen.train.preferences import NoPairs
from sharpen.train.rl_data import sample_figures
from sharpen.train.run import TrainingRun
from sharpen.train.run_setup import finish_with_best, keep_best, open_folder
from sharpen.types import Datum, Json, Preference, Reward, Sampling, SharpenError, Task

_KEPT_FIGURES = ("loss", "accuracy", "margin")


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    """Chosen and rejected (for KTO also another pair's answers), and the reference's
    log-probability of each."""

    sides: list[Datum]
    reference: list[float]


@dataclass(frozen=True, slots=True)
class _Source:
    """What a file holds: tasks or pairs."""

    tasks: list[Task]
    rows: list[PairRow]


class DPOTrainer:
    """`DPOTrainer(config, output).train()`. `reward` scores samples instead of the config's;
    `callback` measures the model every `eval_steps`."""

    def __init__(
        self,
        config: DPOConfig,
        output: str | Path = "runs/dpo",
        reward: Reward | None = None,
        callback: Callback | None = None,
    ):
        self.config = config
        self.output = Path(output)
        self.owns_reward = reward is None
        self.reward = reward or (build_reward(config.reward) if config.reward else KindReward())
        self.make_environment = environment_by_name(config.env)
        self.callback = callback or (load_object(config.metric) if config.metric else None)
        tokenizer = load_tokenizer(config.base_model, config.trust_remote_code)
        self.renderer = Renderer(tokenizer, config.template)
        self.pairs_per_step = config.batch_size * config.gradient_accumulation
        self.tasks: list[Task] = []
        self.dev_tasks: list[Task] = []
        self.dev_pairs: list[_Pair] = []
        self.setup: PolicySetup
        self.learner: Learner
        self._policy: LocalPolicy | None = None

    # Rows ------------------------------------------------------------------------------------

    def read_rows(self, source: str) -> _Source:
        """Returns the tasks or pairs of a file: what the first row is, all are."""
        rows = list(read_rows(source)) if source else []
        if not source or (rows and "instruction" in rows[0].value):
            return _Source([task_from_row(row.value, row.where) for row in rows], [])
        pairs = []
        for row in rows:
            pairs.append(replace(preference_from_row(row.value, row.where), id=row.where))
        fitting = fitting_rows(pair_rows(pairs, self.renderer), self.config.max_length, source)
        if self.config.loss_type == "kto":
            fitting = add_answers_of_other_pairs(fitting, source)
        return _Source([], fitting)

    def _sampled_rows(self, number: int, begin: int) -> list[PairRow]:
        """The pairs of a round that begins at step `begin`: from its file, otherwise sampled."""
        processes = self.learner.processes
        name = f"pairs-{number + 1}.jsonl" if self.config.rounds > 1 else "pairs.jsonl"
        path = self.output / name
        if not self._is_written(path, begin):
            problem = ""
            if processes.rank == 0:
                try:
                    write_jsonl(path, map(preference_to_row, self._sample_pairs(number)))
                except NoPairs as error:
                    problem = str(error)
            problem = processes.gather({0: problem} if processes.rank == 0 else {})[0]
            if problem:
                raise NoPairs(problem)
        return self.read_rows(str(path)).rows

    def _sample_pairs(self, number: int) -> list[Preference]:
        """Pairs of a round, from the policy as it is now."""
        config = self.config
        count = min(config.tasks_per_round or len(self.tasks), len(self.tasks))
        tasks = random.Random(f"{config.seed}:{number}").sample(self.tasks, count)
        seed = config.seed * 1009 + number
        return preferences.generate_preference_pairs(
            LocalPolicy(self.learner.model, self.renderer),
            tasks,
            self.reward,
            self.make_environment,
            config.num_samples,
            Sampling(config.max_tokens, config.temperature, config.top_p, seed),
            config.max_turns,
        )

    def add_reference(self, rows: list[PairRow], name: str, begin: int = 0) -> list[_Pair]:
        """Returns the rows with the log-probabilities of the reference, which is asked once and
        whose answers lie in the file `name`."""
        if not rows or not self.config.needs_reference:
            return [_Pair(row, [0.0] * len(row)) for row in rows]
        path = self.output / f"{name}.json"
        sides = [side for row in rows for side in row]
        rows_hash = hashlib.sha256(b"".join(side.ids.tobytes() for side in sides)).hexdigest()
        if self._is_written(path, begin):
            stored = read_json(path)
            if stored["rows"] != rows_hash:
                raise SharpenError(f"{path}: of other rows; start in another folder")
        else:
            logprobs = _sums(self._reference_logprobs(sides, begin)).reshape(len(rows), -1)
            if not np.isfinite(logprobs).all():
                raise SharpenError(
                    f"{name}: a log-probability of the reference is not finite; look at its weights"
                )
            stored = {"rows": rows_hash, "logps": logprobs.tolist()}
            if self.learner.processes.rank == 0:
                write_json(path, stored)
        return [_Pair(row, logps) for row, logps in zip(rows, stored["logps"], strict=True)]

    def _reference_logprobs(self, sides: Sequence[Datum], begin: int) -> list[np.ndarray]:
        """From the policy that the round starts with, or the one that the run started with."""
        if self.config.update_reference and begin:
            return self.learner.logprobs(sides)
        assert self.setup.reference is not None
        return self.setup.reference.logprobs(self.learner, sides)

    def _is_written(self, path: Path, begin: int) -> bool:
        """Whether all processes find a file of a round that begins at step `begin`."""
        missing = self.learner.processes.agreed(int(not path.is_file()))
        if missing and self.learner.steps_done > begin:
            raise SharpenError(f"{path}: gone, and the run is past it; start in another folder")
        return not missing

    # The loop --------------------------------------------------------------------------------

    def train(self) -> dict[str, float]:
        """Run to the end, or on from where a stopped run was saved. Returns the last figures."""
        config = self.config
        source = self.read_rows(config.train_data)
        dev = self.read_rows(config.dev_data)
        self._check_source(source)
        open_folder(self.output, config)
        self.tasks = source.tasks
        self.dev_tasks = dev.tasks
        self.prepare()
        try:
            run = self._run(source.rows, dev.rows)
        finally:
            self._close_reward()
        finish_with_best(self.output, self.save_model)
        figures: dict[str, float] = {"steps": self.learner.steps_done}
        last_row = run.folder.metrics()[-1] if run.first else {}
        for key, value in last_row.items():
            if key in _KEPT_FIGURES or key.startswith("dev_"):
                figures[key] = value
        return figures

    def prepare(self) -> Learner:
        """Load the policy that is trained, and its reference."""
        self.setup = prepare_policy(self.config, self.config.needs_reference, self.renderer)
        self.learner = Learner(self.setup.model, self.config, 1)
        return self.learner

    def _run(self, rows: list[PairRow], dev_rows: list[PairRow]) -> TrainingRun:
        """All steps that are not done yet. Without rows the first round samples its own."""
        self.dev_pairs = self.add_reference(dev_rows, "dev-reference")
        pairs = self.add_reference(rows or self._sampled_rows(0, 0), "reference")
        self.learner.total_steps = self._plan_round(0, 0, len(pairs))[1]
        with TrainingRun(self.output, self.config, self.learner) as run:
            state = run.resume({"best": None})
            self._run_rounds(run, state, pairs)
        return run

    def _run_rounds(self, run: TrainingRun, state: Json, pairs: list[_Pair]) -> None:
        """All rounds; `pairs` are those of the first."""
        begin = 0
        for number in range(self.config.rounds):
            if number:
                try:
                    rows = self._sampled_rows(number, begin)
                except NoPairs as error:  # perhaps because the tasks are learnt
                    print(f"stopping before round {number + 1}: {error}")
                    self._keep_best(self.evaluate(), state)
                    return
                pairs = self.add_reference(rows, f"reference-{number + 1}", begin)
            end, total = self._plan_round(number, begin, len(pairs))
            self.learner.total_steps = total
            run.total = total
            if run.first:
                run.display.total = total
            self._train_round(run, state, pairs, number, begin, end)
            begin = end

    def _train_round(
        self, run: TrainingRun, state: Json, pairs: list[_Pair], number: int, begin: int, end: int
    ) -> None:
        """The steps of a round that are not done yet."""
        config = self.config
        phase = Phase([pair.sides[0] for pair in pairs], end - begin)
        while self.learner.steps_done < end:
            place = self.learner.steps_done - begin
            chosen = phase.chosen(place, self.pairs_per_step, config.seed + number, {})
            row = self.step([pairs[index] for index in chosen])
            if row["step"] % config.eval_steps == 0 or row["step"] == run.total:
                figures = self.evaluate()
                self._keep_best(figures, state)
                row |= figures
            run.end_of_step({**row, "round": number + 1}, state)

    def _check_source(self, source: _Source) -> None:
        config = self.config
        if config.rounds > 1 and source.rows:
            raise SharpenError(f"rounds={config.rounds}: needs tasks, {config.train_data} is pairs")
        if source.tasks and config.parallel not in ("auto", "ddp"):
            raise SharpenError(
                f"parallel={config.parallel}: cannot sample pairs; sample them first"
            )

    def _plan_round(self, number: int, begin: int, count: int) -> tuple[int, int]:
        """The step that a round of `count` pairs ends with, and the run's last one if the rounds
        to come are as long."""
        rounds = self.config.rounds
        max_steps = self.config.max_steps
        if max_steps:
            return max_steps * (number + 1) // rounds, max_steps
        steps = -(-count // self.pairs_per_step) * self.config.num_epochs
        return begin + steps, begin + steps * (rounds - number)

    def step(self, pairs: Sequence[_Pair]) -> Json:
        """Make one optimiser step, in two passes: all log-probabilities first, then each side's
        tokens weighted by the slope of the loss at their sum. That is exact however the step is
        split."""
        figures, slopes = self.measure(pairs)
        weighted = []
        for pair, pair_slopes in zip(pairs, slopes, strict=True):
            for side, slope in zip(pair.sides[:2], pair_slopes[:2], strict=True):
                weighted.append(replace(side, weight=slope))
        report = asdict(self.learner.step(weighted, _weighted_sum))
        return {"step": self.learner.steps_done, **report, **figures}

    def measure(self, pairs: Sequence[_Pair]) -> tuple[dict[str, float], list[list[float]]]:
        """Returns figures, and the slope of the loss by the log-probability of each side."""
        sides = [side for pair in pairs for side in pair.sides]
        logps_P_K = torch.tensor(_sums(self.learner.logprobs(sides))).view(len(pairs), -1)
        logps_P_K.requires_grad_(True)
        lengths = [float(trained_tokens(side)) for side in sides]
        lengths_P_K = torch.tensor(lengths).view_as(logps_P_K)
        reference_P_K = torch.tensor(np.array([pair.reference for pair in pairs]))
        ratio_P_K = logps_P_K - reference_P_K
        loss = LOSSES[self.config.loss_type](ratio_P_K, lengths_P_K, self.config)
        loss = loss + self.config.sft_weight * sft(logps_P_K, lengths_P_K)
        (slopes_P_K,) = torch.autograd.grad(loss, logps_P_K)
        reward_P_K = rewards(ratio_P_K, lengths_P_K, self.config).detach()
        margin_P = reward_P_K[:, 0] - reward_P_K[:, 1]
        figures = {
            "loss": loss,
            "accuracy": (margin_P > 0).double().mean(),
            "margin": margin_P.mean(),
            "chosen_reward": reward_P_K[:, 0].mean(),
            "chosen_logp": logps_P_K[:, 0].mean(),
            "rejected_reward": reward_P_K[:, 1].mean(),
            "rejected_logp": logps_P_K[:, 1].mean(),
        }
        return {name: value.item() for name, value in figures.items()}, slopes_P_K.tolist()

    # What is measured -------------------------------------------------------------------------

    def evaluate(self) -> Json:
        """Returns figures of the dev pairs, the reward of greedy answers to dev tasks, and what
        the callback measures; of several processes the first has all of them."""
        row: Json = {}
        if self.dev_pairs:
            figures, _ = self.measure(self.dev_pairs)
            row |= {f"dev_{name}": value for name, value in figures.items()}
        if self.learner.processes.rank:
            return row
        if self.dev_tasks:
            figures = self._measure_dev_tasks()
            row |= {f"dev_{name}": value for name, value in figures.items()}
        if self.callback:
            step = self.learner.steps_done
            context = EvaluationContext(self.setup.model, self.renderer, self._sampler(), step)
            row |= call_back(self.callback, context)
        return row

    def _measure_dev_tasks(self) -> Json:
        how = PlaySettings(
            self.reward,
            Sampling(self.config.max_tokens),
            self.make_environment,
            self.config.max_turns,
        )
        return sample_figures(play_and_score(self._sampler(), self.dev_tasks, how))

    def _sampler(self) -> LocalPolicy:
        """The policy that evaluations sample from; it reads the learner's own weights."""
        if self._policy is None:
            self._policy = LocalPolicy(self.setup.model, self.renderer)
        return self._policy

    def _keep_best(self, figures: Json, state: Json) -> None:
        """Save the weights if they are the best so far by the callback's `metric`, otherwise by
        the dev tasks' reward, otherwise by the dev pairs' loss."""
        processes = self.learner.processes
        value = _value_of(figures)
        value = processes.gather({0: value} if processes.rank == 0 else {})[0]  # the first decides
        if value is None:
            return
        if not math.isfinite(value):
            raise SharpenError(
                f"step {self.learner.steps_done}: the dev figure is {value}; look at the dev rows "
                "and at the callback"
            )
        keep_best(value, state, self.output, self.save_model)

    def save_model(self, path: str | Path) -> None:
        """Save the policy as a folder that loads on its own: an adapter, or a whole model."""
        self.setup.save(self.learner, path)

    def _close_reward(self) -> None:
        """End the processes of a reward that this trainer has made."""
        close = getattr(self.reward, "close", None)
        if self.owns_reward and close:
            close()


def _value_of(figures: Json) -> float | None:
    """What weights are compared by, higher is better; None if nothing was measured."""
    if "metric" in figures:
        return figures["metric"]
    if "dev_reward" in figures:
        return figures["dev_reward"]
    if "dev_loss" in figures:
        return -figures["dev_loss"]
    return None


def _weighted_sum(logprobs_N: torch.Tensor, batch: Batch, _: float) -> torch.Tensor:
    return (logprobs_N * batch.weight_N).sum()


def _sums(logprobs: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([values.sum(dtype=np.float64) for values in logprobs])
