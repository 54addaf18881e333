"""Supervised fine-tuning on dialogs: one flat loop over the learner.

Rows are rendered once, every step's rows follow from (seed, step), and a run killed anywhere
continues from its last good checkpoint with the same losses.
"""

from __future__ import annotations

import math
import shutil
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sharpen.data.sources import resolve
from sharpen.models.load import attach_lora, load_model, load_tokenizer
from sharpen.records import RunFolder, atomic_folder, read_jsonl, sha256_file, write_jsonl
from sharpen.render import Renderer, hermes_template
from sharpen.rows import dialog_from_row
from sharpen.train.batching import Batch, epoch_order
from sharpen.train.config import AgentSFTConfig
from sharpen.train.learner import Learner
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
    rows."""

    def __init__(self, config: AgentSFTConfig, output: str | Path = "runs/sft"):
        self.config, self.output = config, Path(output)
        self.model: Any = None
        self.train_rows: list[Datum] = []
        self.dev_rows: list[Datum] = []

    def prepare_datasets(self) -> None:
        """Read and render. Rows over max_length are counted and left out, never cut."""
        renderer = Renderer(load_tokenizer(self.config.base_model), self.config.template)
        self.renderer = renderer
        self.train_rows = self.rendered(renderer, self.config.train_data)
        if self.config.dev_data:
            self.dev_rows = self.rendered(renderer, self.config.dev_data)
        kinds = Counter(d.task_type or "untyped" for d in self.train_rows)
        tokens = sum(len(d.ids) for d in self.train_rows)
        shown = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
        print(f"{len(self.train_rows)} rows to train on, {tokens} tokens ({shown})")

    def rendered(self, renderer: Renderer, source: str) -> list[Datum]:
        rows = [
            dialog_from_row(row.value, row.where)
            for path in resolve(source)
            for row in read_jsonl(path)
        ]
        datums = list(renderer.render(rows))
        fitting = [d for d in datums if len(d.ids) <= self.config.max_length]
        left_out = len(datums) - len(fitting)
        if left_out:
            longest = max(len(d.ids) for d in datums)
            print(f"{source}: {left_out} of {len(datums)} rows left out, over max_length")
            print(f"  ({self.config.max_length} tokens; the longest has {longest})")
        if not fitting:
            limit = self.config.max_length
            raise SharpenError(
                f"{source}: no row to train on (of {len(datums)}; max_length {limit})"
            )
        return fitting

    def train(self) -> dict[str, float]:
        """Run to the end, or on from where a killed run stopped. Returns the last and best
        figures."""
        import torch

        if not self.train_rows:
            self.prepare_datasets()
        config = self.config
        run = RunFolder(
            self.output, config, {p.name: sha256_file(p) for p in resolve(config.train_data)}
        )
        check_disk(run.path, config)
        self.model = load_model(config)
        if config.full:
            self.model.requires_grad_(True)
        else:
            torch.manual_seed(config.seed)  # the adapter's first weights are random
            self.model = attach_lora(self.model, config)
        per_step = config.batch_size * config.gradient_accumulation
        steps_an_epoch = math.ceil(len(self.train_rows) / per_step)
        total = config.max_steps or steps_an_epoch * config.num_epochs
        learner = Learner(self.model, config, total)
        with SignalFlag() as stop:
            return self.loop(run, learner, per_step, total, stop)

    def loop(
        self, run: RunFolder, learner: Learner, per_step: int, total: int, stop: SignalFlag
    ) -> dict[str, float]:
        from sharpen.train.checkpoint import load_last_checkpoint, save_checkpoint

        config, folder = self.config, run.path / "checkpoints"
        state = load_last_checkpoint(folder, learner) or {"best": None, "since_best": 0}
        rewind(run, learner.steps_done)
        if learner.steps_done:
            print(f"continuing behind step {learner.steps_done} of {total}")
        shown = started = time.monotonic()
        seen = 0
        while learner.steps_done < total:
            rows = self.step_rows(learner.steps_done, per_step)
            report = learner.step(rows, token_mean)
            seen += report.tokens
            now = time.monotonic()
            row: Json = {"step": learner.steps_done, "loss": report.loss, "tokens": report.tokens}
            row |= {
                "trained": report.trained,
                "lr": report.lr,
                "norm": report.norm,
                "skipped": report.skipped,
            }
            last = learner.steps_done == total
            if self.dev_rows and (learner.steps_done % config.eval_steps == 0 or last):
                row["dev_loss"] = learner.mean_loss(self.dev_rows)
                self.keep_best(run, row["dev_loss"], state)
            run.log(row)  # before the checkpoint: a row too many is taken back, one too few is lost
            if learner.steps_done % config.save_steps == 0 or last or stop.number:
                save_checkpoint(folder, learner, state, config.keep_checkpoints)
            if now - shown > 5 or last or "dev_loss" in row:
                shown = now
                left = (now - started) / max(seen, 1) * report.tokens * (total - learner.steps_done)
                print(progress_line(row, total, seen / (now - started), left), flush=True)
            if stop.number:
                raise Interrupted(stop.number)
            if config.patience and state["since_best"] >= config.patience:
                print(f"stopping: no gain in the last {config.patience} evaluations")
                break
        self.finish(run)
        return {"loss": run.metrics()[-1]["loss"], "best_dev_loss": state["best"]}

    def step_rows(self, step: int, per_step: int) -> list[Datum]:
        """The rows of one step: epochs of weighted random order, laid end to end."""
        kinds = [d.task_type for d in self.train_rows]
        start, count = step * per_step, len(self.train_rows)
        chosen = []
        for position in range(start, start + per_step):
            epoch, offset = divmod(position, count)
            chosen.append(self.order(kinds, epoch)[offset])
        return [self.train_rows[i] for i in chosen]

    def order(self, kinds: Sequence[str], epoch: int) -> list[int]:
        if getattr(self, "_order", (None,))[0] != epoch:
            self._order = (
                epoch,
                epoch_order(kinds, self.config.seed, epoch, self.config.task_weights),
            )
        return self._order[1]

    def keep_best(self, run: RunFolder, dev_loss: float, state: Json) -> None:
        if state["best"] is None or dev_loss < state["best"]:
            state["best"], state["since_best"] = dev_loss, 0
            self.save_model(run.path / "best")
        else:
            state["since_best"] += 1

    def finish(self, run: RunFolder) -> None:
        """`final/`: the best weights on dev where there is a dev set, else the last."""
        if (run.path / "best").is_dir():
            with atomic_folder(run.path / "final") as work:
                shutil.copytree(run.path / "best", work, dirs_exist_ok=True)
        else:
            self.save_model(run.path / "final")

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


def progress_line(row: Json, total: int, rate: float, left: float) -> str:
    dev = f", dev {row['dev_loss']:.4f}" if "dev_loss" in row else ""
    head = f"  step {row['step']}/{total}: loss {row['loss']:.4f}{dev}"
    return f"{head}, {rate:.0f} tokens/s, about {left:.0f} s left"


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
