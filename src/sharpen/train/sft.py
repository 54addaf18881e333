"""Supervised fine-tuning on dialogs: one flat loop over the learner.

Every step's rows follow from (seed, step), and a run killed anywhere continues from its last good
checkpoint with the same losses.
"""

from __future__ import annotations

import math
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sharpen.data.sources import resolve
from sharpen.models.load import attach_lora, load_model, load_tokenizer
from sharpen.records import RunFolder, atomic_folder, sha256_file, write_jsonl
from sharpen.render import Renderer, hermes_template
from sharpen.tools import load_object
from sharpen.train.batching import Batch
from sharpen.train.config import AgentSFTConfig
from sharpen.train.dataset import TrainingRows
from sharpen.train.display import Display, flops_per_token
from sharpen.train.learner import Learner
from sharpen.train.trackers import Trackers
from sharpen.types import Datum, Json, SharpenError


class Interrupted(SharpenError):
    """SIGINT or SIGTERM came; the state is saved."""

    def __init__(self, number: int):
        super().__init__(
            f"stopped by {signal.Signals(number).name}, saved; the same command continues"
        )
        self.exit_code = 128 + number


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
        """Run to the end, or on from where a killed run stopped. Returns the last and best
        figures."""
        import torch

        data, config = self.data or self.prepare_datasets(), self.config
        sources = [path for name in config.train_data.split(",") for path in resolve(name)]
        run = RunFolder(self.output, config, {p.name: sha256_file(p) for p in sources})
        check_disk(run.path, config)
        self.model = load_model(config)
        if config.full:
            self.model.requires_grad_(True)
        else:
            torch.manual_seed(config.seed)  # the adapter's first weights are random
            self.model = attach_lora(self.model, config)
        learner = Learner(self.model, config, data.total)
        with (
            SignalFlag() as stop,
            Trackers(config.report_to, run.path, config.model_dump(mode="json")) as trackers,
        ):
            return self.loop(run, learner, data, stop, trackers)

    def loop(
        self,
        run: RunFolder,
        learner: Learner,
        data: TrainingRows,
        stop: SignalFlag,
        trackers: Trackers,
    ) -> dict[str, float]:
        from sharpen.train.checkpoint import load_last_checkpoint, save_checkpoint

        config, folder, total = self.config, run.path / "checkpoints", data.total
        state = load_last_checkpoint(folder, learner) or {"best": None, "since_best": 0}
        rewind(run, learner.steps_done)
        if learner.steps_done:
            print(f"continuing behind step {learner.steps_done} of {total}")
        flops = flops_per_token(self.model)
        with Display(total, learner.steps_done, flops, learner.device) as display:
            while learner.steps_done < total:
                report = learner.step(data.step_rows(learner.steps_done), token_mean)
                step, last = learner.steps_done, learner.steps_done == total
                row: Json = {"step": step, **asdict(report)}
                if step % config.eval_steps == 0 or last:
                    row |= self.evaluate(run, learner, data.dev, state)
                # before the checkpoint: a row too many is taken back, one too few is lost
                run.log(row)
                trackers.log(row)
                if step % config.save_steps == 0 or last or stop.number:
                    save_checkpoint(folder, learner, state, config.keep_checkpoints)
                display.show(row, always=last or "dev_loss" in row or "metric" in row)
                if stop.number:
                    raise Interrupted(stop.number)
                if config.patience and state["since_best"] >= config.patience:
                    print(f"stopping: no gain in the last {config.patience} evaluations")
                    break
        self.finish(run)
        figures = {"loss": run.metrics()[-1]["loss"]}
        if state["best"] is not None:
            named = ("best_metric", 1) if self.metric else ("best_dev_loss", -1)
            figures[named[0]] = named[1] * state["best"]
        return figures

    def evaluate(self, run: RunFolder, learner: Learner, dev: Sequence[Datum], state: Json) -> Json:
        """Dev loss and metric where there are any; the best weights so far are kept in `best/`."""
        row: Json = {}
        if dev:
            row["dev_loss"] = learner.mean_loss(dev)
        if self.metric:
            self.model.eval()
            row["metric"] = float(self.metric(self.model, self.renderer))
        if row:
            value = row["metric"] if self.metric else -row["dev_loss"]
            if not math.isfinite(value):
                raise SharpenError(f"step {learner.steps_done}: the metric is {value}")
            if state["best"] is None or value > state["best"]:
                state["best"], state["since_best"] = value, 0
                self.save_model(run.path / "best")
            else:
                state["since_best"] += 1
        return row

    def finish(self, run: RunFolder) -> None:
        """`final/`: the best weights where they were measured, else the last."""
        if (run.path / "best").is_dir():
            with atomic_folder(run.path / "final") as work:
                shutil.copytree(run.path / "best", work, dirs_exist_ok=True)
        else:
            self.save_model(run.path / "final")
        if self.data and self.data.replay:
            self.data.replay.save(run.path / "replay.json")

    def save_model(self, path: str | Path) -> None:
        """A plain PEFT adapter or model folder, with the tokenizer and the template it was trained
        with."""
        tokenizer = self.renderer.tokenizer
        if self.renderer.template is None:
            tokenizer.chat_template = hermes_template()
        with atomic_folder(path) as work:
            self.model.save_pretrained(work)
            tokenizer.save_pretrained(work)


class AgentLoRATrainer(AgentSFTTrainer):
    """The specification's name for the same trainer."""

    def prepare_data(self) -> None:
        self.prepare_datasets()


class SignalFlag:
    """Remembers SIGINT and SIGTERM until the step is done and saved; a second one ends at once.

    Outside the `with` block signals mean what they meant before.
    """

    def __enter__(self) -> SignalFlag:
        self.number = 0
        self.before = {n: signal.signal(n, self.remember) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *failure: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def remember(self, number: int, frame: Any) -> None:
        self.number = number
        signal.signal(number, signal.SIG_DFL)


def token_mean(logprobs_N: Any, batch: Batch, step_tokens: float) -> Any:
    from sharpen.train.losses import sft_loss

    return sft_loss(logprobs_N, batch.weight_N, step_tokens)


def rewind(run: RunFolder, step: int) -> None:
    """Drop metrics of steps that the checkpoint does not hold: they are about to be made again."""
    rows = run.metrics()
    kept = [row for row in rows if row["step"] <= step]
    if len(kept) < len(rows):
        write_jsonl(run.metrics_file, kept)


def check_disk(folder: Path, config: AgentSFTConfig) -> None:
    """Refuse before the first step what would fill the disk at a later one."""
    from sharpen.models.estimate import shape_of
    from sharpen.models.find import find_model
    from sharpen.records import read_json

    base = find_model(config.base_model)
    if not (base / "config.json").is_file():
        return
    shape = shape_of(read_json(base / "config.json"), str(base))
    count = (
        shape.parameters()
        if config.full
        else shape.lora_parameters(config.lora_r, config.lora_target_modules)
    )
    needed = count * (12 * (config.keep_checkpoints + 1) + 8)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise SharpenError(
            f"{folder}: checkpoints need about {needed >> 20} MiB, the disk has {free >> 20} MiB"
        )
