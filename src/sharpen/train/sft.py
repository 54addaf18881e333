"""Supervised fine-tuning on dialogs: one flat loop over the learner.

Every step's rows follow from (seed, step), and a run killed anywhere continues from its last good
checkpoint with the same losses. Called by `sharpen train sft`; the other trainers share its
functions for opening run folders and saving models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sharpen.models.load import load_model, load_tokenizer
from sharpen.policy.local import LocalPolicy
from sharpen.render import Renderer
from sharpen.tools import load_object
from sharpen.train.callback import Callback, EvaluationContext, call_back
from sharpen.train.collate import Batch
from sharpen.train.config.sft import AgentSFTConfig
from sharpen.train.dataset import TrainingRows
from sharpen.train.display import peak_memory
from sharpen.train.learner import Learner
from sharpen.train.losses import sft_loss
from sharpen.train.run import TrainingRun
from sharpen.train.run_setup import (
    finish_with_best,
    keep_best,
    make_trainable,
    open_folder,
    save_trained,
)
from sharpen.types import Datum, Json, SharpenError


class AgentSFTTrainer:
    """`AgentSFTTrainer(config).train()`; `prepare_datasets` may be called before it to look at the
    rows. With a `callback` its `metric` (higher is better) chooses the best weights instead of the
    dev loss."""

    renderer: Renderer
    learner: Learner

    def __init__(
        self,
        config: AgentSFTConfig,
        output: str | Path = "runs/sft",
        callback: Callback | None = None,
    ):
        self.config = config
        self.output = Path(output)
        if callback is None and config.metric:
            callback = load_object(config.metric)
        self.callback = callback
        self.model: Any = None
        self.data: TrainingRows | None = None
        self._policy: LocalPolicy | None = None

    def prepare_datasets(self) -> TrainingRows:
        """Read, select and render the rows."""
        self.renderer = Renderer(load_tokenizer(self.config.base_model), self.config.template)
        self.data = TrainingRows(self.config, self.renderer)
        print(self.data)
        return self.data

    def train(self) -> dict[str, float]:
        """Run to the end, or continue where a killed run stopped. Returns the last and best
        figures."""
        config = self.config
        data = self.data or self.prepare_datasets()
        open_folder(self.output, config)
        self.model = make_trainable(load_model(config), config)
        self.learner = learner = Learner(self.model, config, data.total)
        with TrainingRun(self.output, config, learner) as run:
            state = run.resume({"best": None, "since_best": 0})
            while learner.steps_done < data.total:
                report = learner.step(data.step_rows(learner.steps_done), token_mean)
                step = learner.steps_done
                row: Json = {"step": step, **asdict(report)}
                if step % config.eval_steps == 0 or step == data.total:
                    row |= self._evaluate(data.dev, state)
                run.end_of_step(row, state, show="dev_loss" in row or "metric" in row)
                if config.patience and state["since_best"] >= config.patience:
                    print(f"stopping: no gain in the last {config.patience} evaluations")
                    break
        self._write_final()
        figures = {"loss": run.folder.metrics()[-1]["loss"]} if run.first else {}
        figures["rows"] = len(data.rows)
        figures["peak_gib"] = peak_memory(learner.device)
        if state["best"] is not None:
            if self.callback:
                figures["best_metric"] = state["best"]
            else:
                figures["best_dev_loss"] = -state["best"]
        return figures

    def _evaluate(self, dev_rows: Sequence[Datum], state: Json) -> Json:
        """Measure the dev loss and the callback's figures, where there are any, and keep the best
        weights so far in `best/`."""
        row: Json = {}
        if dev_rows:
            row["dev_loss"] = self.learner.mean_loss(dev_rows)
        if self.callback:
            row |= call_back(self.callback, self._callback_context())
        if "metric" in row:
            value = row["metric"]
        elif "dev_loss" in row:
            value = -row["dev_loss"]
        else:
            return row
        if not math.isfinite(value):
            raise SharpenError(
                f"step {self.learner.steps_done}: the evaluation gave {row}, expected finite "
                "numbers; look at the metric and the dev rows, or lower the learning rate"
            )
        if keep_best(value, state, self.output, self.save_model):
            state["since_best"] = 0
        else:
            state["since_best"] += 1
        return row

    def _callback_context(self) -> EvaluationContext:
        if self._policy is None:  # one engine for all evaluations: its cache is large
            self._policy = LocalPolicy(self.model, self.renderer)
        return EvaluationContext(self.model, self.renderer, self._policy, self.learner.steps_done)

    def _write_final(self) -> None:
        """Write `final/`: the best weights if they were measured, otherwise the last."""
        finish_with_best(self.output, self.save_model)
        if self.data and self.data.replay and self.learner.processes.rank == 0:
            self.data.replay.save(self.output / "replay.json")

    def save_model(self, path: str | Path) -> None:
        """Write a plain PEFT adapter or model folder, with the tokenizer and template that were
        trained with."""
        save_trained(self.learner, self.renderer, path)


def token_mean(logprobs_N: torch.Tensor, batch: Batch, step_tokens: float) -> torch.Tensor:
    """The learner's loss for SFT: the weighted mean over all trained tokens of a step."""
    return sft_loss(logprobs_N, batch.weight_N, step_tokens)
