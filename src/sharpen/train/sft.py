"""Supervised fine-tuning on dialogs: one flat loop over the learner.

Every step's rows follow from (seed, step), and a run killed anywhere continues from its last good
checkpoint with the same losses.
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sharpen.data.sources import resolve
from sharpen.models.load import attach_lora, load_model, load_tokenizer
from sharpen.records import RunFolder, atomic_folder, sha256_file
from sharpen.render import Renderer, hermes_template
from sharpen.tools import load_object
from sharpen.train.batching import Batch
from sharpen.train.config.run import RunConfig
from sharpen.train.config.sft import AgentSFTConfig
from sharpen.train.dataset import TrainingRows
from sharpen.train.display import peak_memory
from sharpen.train.learner import Learner
from sharpen.train.run import TrainingRun, first_process
from sharpen.types import Datum, Json, SharpenError


class AgentSFTTrainer:
    """`AgentSFTTrainer(config).train()`; `prepare_datasets` may be called before it to look at the
    rows. `metric(model, renderer)`, higher is better, chooses the best weights instead of the dev
    loss."""

    def __init__(
        self,
        config: AgentSFTConfig,
        output: str | Path = "runs/sft",
        metric: Callable[[Any, Renderer], float] | None = None,
    ):
        self.config, self.output = config, Path(output)
        self.metric = metric or (load_object(config.metric) if config.metric else None)
        self.model: Any = None
        self.data: TrainingRows | None = None

    def prepare_datasets(self) -> TrainingRows:
        """Read, choose and render the rows."""
        self.renderer = Renderer(load_tokenizer(self.config.base_model), self.config.template)
        self.data = TrainingRows(self.config, self.renderer)
        print(self.data)
        return self.data

    def train(self) -> dict[str, float]:
        """Run to the end, or on from where a killed run stopped. Returns last and best figures."""
        data, config = self.data or self.prepare_datasets(), self.config
        open_folder(self.output, config)
        self.model = make_trainable(load_model(config), config)
        self.learner = learner = Learner(self.model, config, data.total)
        with TrainingRun(self.output, config, learner) as run:
            state = run.resume({"best": None, "since_best": 0})
            while learner.steps_done < data.total:
                report = learner.step(data.step_rows(learner.steps_done), token_mean)
                row: Json = {"step": learner.steps_done, **asdict(report)}
                if row["step"] % config.eval_steps == 0 or row["step"] == data.total:
                    row |= self.evaluate(data.dev, state)
                run.end_of_step(row, state, show="dev_loss" in row or "metric" in row)
                if config.patience and state["since_best"] >= config.patience:
                    print(f"stopping: no gain in the last {config.patience} evaluations")
                    break
        self.finish()
        figures = {"loss": run.folder.metrics()[-1]["loss"]} if run.first else {}
        figures |= {"rows": len(data.rows), "peak_gib": peak_memory(learner.device)}
        if state["best"] is not None:
            name, sign = ("best_metric", 1) if self.metric else ("best_dev_loss", -1)
            figures[name] = sign * state["best"]
        return figures

    def evaluate(self, dev: Sequence[Datum], state: Json) -> Json:
        """Dev loss and metric where there are any; the best weights so far are kept in `best/`."""
        row: Json = {}
        if dev:
            row["dev_loss"] = self.learner.mean_loss(dev)
        if self.metric:
            self.model.eval()
            row["metric"] = float(self.metric(self.model, self.renderer))
        if row:
            value = row["metric"] if self.metric else -row["dev_loss"]
            if not math.isfinite(value):
                raise SharpenError(f"step {self.learner.steps_done}: the metric is {value}")
            if state["best"] is None or value > state["best"]:
                state["best"], state["since_best"] = value, 0
                self.save_model(self.output / "best")
            else:
                state["since_best"] += 1
        return row

    def finish(self) -> None:
        """`final/`: the best weights where they were measured, else the last."""
        if not (self.output / "best").is_dir():
            self.save_model(self.output / "final")
        elif self.learner.processes.rank == 0:
            with atomic_folder(self.output / "final") as work:
                shutil.copytree(self.output / "best", work, dirs_exist_ok=True)
        if self.data and self.data.replay and self.learner.processes.rank == 0:
            self.data.replay.save(self.output / "replay.json")

    def save_model(self, path: str | Path) -> None:
        """A plain PEFT adapter or model folder, with the tokenizer and template of the training."""
        save_trained(self.learner, self.renderer, path)


def make_trainable(model: Any, config: RunConfig) -> Any:
    """All weights, or a fresh adapter."""
    import torch

    if config.full:
        return model.requires_grad_(True)
    torch.manual_seed(config.seed)  # the adapter's first weights are random
    return attach_lora(model, config)


def save_trained(
    learner: Learner, renderer: Renderer, path: str | Path, whole: bool = False
) -> None:
    """`whole`: with the adapter merged into a copy of its base, at the cost of a second model in
    the CPU's memory."""
    weights = learner.weights()  # of all processes, before the first one writes
    if learner.processes.rank:
        return
    tokenizer = renderer.tokenizer
    if renderer.template is None:
        tokenizer.chat_template = hermes_template()
    with atomic_folder(path) as work:
        if whole and hasattr(learner.model, "merge_and_unload"):
            copied = copy.deepcopy(learner.model.to("cpu"))
            learner.model.to(learner.device)
            copied.merge_and_unload().save_pretrained(work)
        else:
            learner.model.save_pretrained(work, state_dict=weights)
        tokenizer.save_pretrained(work)


class AgentLoRATrainer(AgentSFTTrainer):
    """The specification's name for the same trainer."""

    def prepare_data(self) -> None:
        self.prepare_datasets()


def token_mean(logprobs_N: Any, batch: Batch, step_tokens: float) -> Any:
    from sharpen.train.losses import sft_loss

    return sft_loss(logprobs_N, batch.weight_N, step_tokens)


def open_folder(folder: Path, config: RunConfig) -> None:
    """Refuse another run's folder, or a full disk, before anything is loaded."""
    if first_process():
        sources = [path for name in config.train_data.split(",") for path in resolve(name)]
        RunFolder(folder, config, {p.name: sha256_file(p) for p in sources})
        check_disk(folder, config)


def check_disk(folder: Path, config: RunConfig) -> None:
    """Refuse before the first step what would fill the disk at a later one."""
    from sharpen.models.estimate import shape_of
    from sharpen.models.find import find_model
    from sharpen.records import read_json

    base = find_model(config.base_model)
    if not (base / "config.json").is_file():
        return
    shape = shape_of(read_json(base / "config.json"), str(base))
    rank, targets = config.lora_r, config.lora_target_modules
    count = shape.parameters() if config.full else shape.lora_parameters(rank, targets)
    needed = count * (12 * (config.keep_checkpoints + 1) + 8)
    if needed > (free := shutil.disk_usage(folder).free):
        sizes = f"need about {needed >> 20} MiB, the disk has {free >> 20} MiB"
        raise SharpenError(f"{folder}: checkpoints {sizes}")
