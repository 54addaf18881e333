"""Reward models: Bradley–Terry on preferences, or a label for each assistant turn.

A value is read at the last token of a turn. `final/` is a plain sequence classifier with one label
(or a PEFT adapter of one), which transformers, PEFT and TRL load too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sharpen.data.sources import read_rows
from sharpen.models.load import attach_lora, load_model, load_tokenizer
from sharpen.records import Row, write_json
from sharpen.render import Renderer
from sharpen.report.plots import draw_calibration
from sharpen.rewards.learned import KIND_FILE, calibration, turn_ends
from sharpen.rows import dialog_from_row, preference_from_row
from sharpen.train.config.reward_model import RewardModelConfig
from sharpen.train.dataset import Phase, within
from sharpen.train.learner import Learner
from sharpen.train.losses import reward_loss
from sharpen.train.run import TrainingRun
from sharpen.train.sft import open_folder, save_trained
from sharpen.train.values import ValueModel
from sharpen.types import Datum, Dialog, Json, RowError, SharpenError

Example = list[Datum]  # chosen and rejected; or one dialog whose weights are its turns' labels


class RewardModelTrainer:
    """`RewardModelTrainer(config, output).train()`."""

    def __init__(self, config: RewardModelConfig, output: str | Path = "runs/reward"):
        self.config, self.output, self.pairs = config, Path(output), config.kind == "outcome"
        self.renderer = Renderer(load_tokenizer(config.base_model), config.template)
        keep_padding_apart(self.renderer)

    def read(self, source: str) -> list[Example]:
        sides = pair_of if self.pairs else steps_of
        dialogs = [dialog for row in read_rows(source) for dialog in sides(row)]
        rendered = zip(self.renderer.render(dialogs), dialogs, strict=True)
        datums = [marked(datum, dialog.metadata.get("step_labels")) for datum, dialog in rendered]
        size = 2 if self.pairs else 1
        rows = [datums[at : at + size] for at in range(0, len(datums), size)]
        for row in rows:
            if self.pairs and np.array_equal(row[0].ids, row[1].ids):
                raise RowError(row[0].id, "chosen and rejected are the same")
        longest = [(max(len(d.ids) for d in row), row) for row in rows]
        fitting = within(self.config.max_length, longest, source)
        if not fitting:
            raise SharpenError(f"{source}: no row to train on (of {len(rows)})")
        return fitting

    def train(self) -> dict[str, float]:
        """Run to the end, or on from where a killed run stopped. Returns the last figures."""
        config = self.config
        rows = self.read(config.train_data)
        dev = self.read(config.dev_data) if config.dev_data else []
        print(f"{len(rows)} rows to train on, {len(dev)} to measure on")
        open_folder(self.output, config)
        per_step = config.batch_size * config.gradient_accumulation
        total = config.max_steps or -(-len(rows) // per_step) * config.num_epochs
        phase = Phase([row[0] for row in rows], total)
        self.learner = learner = self.make_learner(total)
        with TrainingRun(self.output, config, learner) as run:
            run.resume({})
            while learner.steps_done < total:
                chosen = phase.chosen(learner.steps_done, per_step, config.seed, {})
                row = self.step([rows[index] for index in chosen])
                if dev and (row["step"] % config.eval_steps == 0 or row["step"] == total):
                    row |= {f"dev_{key}": value for key, value in self.measure(dev)[0].items()}
                run.end_of_step(row, {}, show="dev_loss" in row)
        figures, _, margins = self.measure(dev or rows)
        sure = calibration(margins)
        save_trained(learner, self.renderer, self.output / "final")
        if learner.processes.rank == 0:
            write_json(self.output / "final" / KIND_FILE, {"kind": config.kind})
            write_json(self.output / "calibration.json", sure)
            draw_calibration(sure, self.output / "calibration.png")
        return {"steps": learner.steps_done, **figures, "ece": sure["ece"]}

    def make_learner(self, total: int) -> Learner:
        config = self.config
        torch.manual_seed(config.seed)  # the head's and the adapter's first weights are random
        model = load_model(config, "SequenceClassification")
        if hasattr(model, "peft_config"):
            raise SharpenError(f"{config.base_model}: an adapter; merge it into its base first")
        model.config.get_text_config().pad_token_id = self.renderer.tokenizer.pad_token_id
        model = model.requires_grad_(True) if config.full else attach_lora(model, config, "SEQ_CLS")
        return Learner(model, config, total, ValueModel(model))

    def step(self, rows: Sequence[Example]) -> Json:
        """One step in two passes: the sides of a pair may lie in different micro-batches, where no
        loss sees both. By the chain rule the gradient is Σ d loss/d value · d value/d weights: all
        values are read first, without gradients, then each is weighted by its own slope. That is
        exact, however the step is split."""
        figures, slopes, _ = self.measure(rows)
        sides = [side for row in rows for side in row]
        weighted = [replace(d, weight=slope) for d, slope in zip(sides, slopes, strict=True)]
        report = asdict(self.learner.step(weighted, lambda v, b, _: (v * b.weight_N).sum()))
        return {"step": self.learner.steps_done, **report, **figures}

    def measure(self, rows: Sequence[Example]) -> tuple[dict[str, float], list[np.ndarray], Any]:
        """Loss, accuracy and mean margin; the loss's slope by each value of each side; and each
        judgement's margin, which is above zero where it is right."""
        sides = [side for row in rows for side in row]
        found = self.learner.values(sides)
        values = torch.tensor(np.concatenate(found), requires_grad=True)
        labels = torch.tensor(np.concatenate([d.weight for d in sides])[:: len(rows[0])])
        center = self.config.center_rewards_coefficient
        loss, logits = reward_loss(values.view(len(labels), -1), labels, center)
        (slopes,) = torch.autograd.grad(loss, values)
        margins = torch.where(labels > 0.5, logits, -logits).detach().numpy()
        figures = {"accuracy": (margins > 0).mean().item(), "margin": margins.mean().item()}
        figures["loss"] = loss.item()
        return figures, np.split(slopes.numpy(), np.cumsum([len(v) for v in found])[:-1]), margins


def pair_of(row: Row) -> list[Dialog]:
    pair = preference_from_row(row.value, row.where)
    about = pair.tools, row.where
    return [Dialog((*pair.prompt, *side), *about) for side in (pair.chosen, pair.rejected)]


def steps_of(row: Row) -> list[Dialog]:
    dialog = dialog_from_row(row.value, row.where)
    turns = sum(message.role == "assistant" and message.trained for message in dialog.messages)
    labels: Any = dialog.metadata.get("step_labels")
    fit = isinstance(labels, list) and len(labels) == turns
    if not fit or not all(type(x) in (bool, int, float) and 0 <= x <= 1 for x in labels):
        raise RowError(row.where, f"step_labels: expected {turns} from 0 to 1, one a turn")
    return [replace(dialog, id=row.where)]


def marked(datum: Datum, labels: list[float] | None) -> Datum:
    """The ends of turns marked (without labels the last) instead of what was said."""
    ends, mask = turn_ends(datum), np.zeros(len(datum.ids), bool)
    mask[ends if labels else ends[-1:]] = True
    return replace(datum, mask=mask, weight=np.array(labels or [1.0], np.float32))


def keep_padding_apart(renderer: Renderer) -> None:
    """transformers reads a row's score at the last token that is not padding: the token that ends a
    turn must not be it."""
    tokenizer = renderer.tokenizer
    free = [text for text, index in renderer.special.items() if index not in renderer.stop_ids]
    if not free:
        raise SharpenError(f"{tokenizer.name_or_path}: has no token free for padding")
    tokenizer.pad_token = tokenizer.pad_token if tokenizer.pad_token in free else free[0]
