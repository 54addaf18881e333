"""Reward models: Bradley–Terry on preferences, or a label for each assistant turn.

Called by `sharpen train reward`. A value is read at the last token of a turn. `final/` is a plain
sequence classifier with one label (or a PEFT adapter of one), which transformers, PEFT and TRL load
too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from sharpen.data.sources import read_rows
from sharpen.models.load import attach_lora, load_model, load_tokenizer
from sharpen.records import Row, write_json
from sharpen.render import Renderer
from sharpen.report.plots import draw_calibration
from sharpen.rewards.learned import KIND_FILE, calibration, turn_ends
from sharpen.rows import dialog_from_row, preference_from_row
from sharpen.train.collate import Batch
from sharpen.train.config.reward_model import RewardModelConfig
from sharpen.train.dataset import Phase, drop_long_rows
from sharpen.train.learner import Learner
from sharpen.train.losses import reward_loss
from sharpen.train.run import TrainingRun
from sharpen.train.sft import open_folder, save_trained
from sharpen.train.values import ValueModel
from sharpen.types import Datum, Dialog, Json, RowError, SharpenError

_Example = list[Datum]  # chosen and rejected; or one dialog whose weights are its turns' labels


@dataclass(frozen=True, slots=True)
class _Measurement:
    """What a model makes of some examples."""

    figures: dict[str, float]  # accuracy, mean margin and loss
    slopes: list[np.ndarray]  # of the loss by each value, one array per datum
    margins: np.ndarray  # of each judgement: above zero where it is right


class RewardModelTrainer:
    """`RewardModelTrainer(config, output).train()`."""

    learner: Learner

    def __init__(self, config: RewardModelConfig, output: str | Path = "runs/reward"):
        self.config = config
        self.output = Path(output)
        self._learns_pairs = config.kind == "outcome"
        self.renderer = Renderer(load_tokenizer(config.base_model), config.template)
        _reserve_padding_token(self.renderer)

    def read(self, source: str) -> list[_Example]:
        """Read and render the examples of a source that fit max_length."""
        dialogs: list[Dialog] = []
        for row in read_rows(source):
            dialogs += _dialogs_of_pair(row) if self._learns_pairs else [_labelled_dialog(row)]
        datums = []
        for datum, dialog in zip(self.renderer.render(dialogs), dialogs, strict=True):
            datums.append(_mark_turn_ends(datum, dialog.metadata.get("step_labels")))
        size = 2 if self._learns_pairs else 1
        examples = [datums[start : start + size] for start in range(0, len(datums), size)]
        if self._learns_pairs:
            for chosen, rejected in examples:
                if np.array_equal(chosen.ids, rejected.ids):
                    raise RowError(chosen.id, "chosen and rejected are the same; remove the row")
        with_length = []
        for example in examples:
            longest = max(len(datum.ids) for datum in example)
            with_length.append((longest, example))
        fitting = drop_long_rows(self.config.max_length, with_length, source)
        if not fitting:
            raise SharpenError(f"{source}: no row to train on (of {len(examples)})")
        return fitting

    def train(self) -> dict[str, float]:
        """Run to the end, or continue where a killed run stopped. Returns the last figures."""
        config = self.config
        examples = self.read(config.train_data)
        dev_examples = self.read(config.dev_data) if config.dev_data else []
        print(f"{len(examples)} rows to train on, {len(dev_examples)} dev rows")
        open_folder(self.output, config)
        per_step = config.batch_size * config.gradient_accumulation
        steps_per_epoch = -(-len(examples) // per_step)  # rounded up
        total = config.max_steps or steps_per_epoch * config.num_epochs
        phase = Phase([example[0] for example in examples], total)
        self.learner = learner = self.make_learner(total)
        with TrainingRun(self.output, config, learner) as run:
            run.resume({})
            while learner.steps_done < total:
                numbers = phase.step_indices(learner.steps_done, per_step, config.seed, {})
                row = self.step([examples[number] for number in numbers])
                is_eval_step = row["step"] % config.eval_steps == 0 or row["step"] == total
                if dev_examples and is_eval_step:
                    for name, value in self._measure(dev_examples).figures.items():
                        row[f"dev_{name}"] = value
                run.end_of_step(row, {}, show="dev_loss" in row)
        return self._finish(dev_examples or examples)

    def _finish(self, examples: Sequence[_Example]) -> dict[str, float]:
        """Write the model and its calibration on these examples, and return the last figures."""
        measurement = self._measure(examples)
        confidence = calibration(measurement.margins)
        final = self.output / "final"
        save_trained(self.learner, self.renderer, final)
        if self.learner.processes.rank == 0:
            write_json(final / KIND_FILE, {"kind": self.config.kind})
            write_json(self.output / "calibration.json", confidence)
            draw_calibration(confidence, self.output / "calibration.png")
        return {
            "steps": self.learner.steps_done,
            **measurement.figures,
            "ece": confidence["ece"],
        }

    def make_learner(self, total: int) -> Learner:
        """Load the base model with a fresh head, ready to be trained for `total` steps."""
        config = self.config
        torch.manual_seed(config.seed)  # the head's and the adapter's first weights are random
        model = load_model(config, "SequenceClassification")
        if hasattr(model, "peft_config"):
            raise SharpenError(f"{config.base_model}: an adapter; merge it into its base first")
        model.config.get_text_config().pad_token_id = self.renderer.tokenizer.pad_token_id
        model = model.requires_grad_(True) if config.full else attach_lora(model, config, "SEQ_CLS")
        return Learner(model, config, total, ValueModel(model))

    def step(self, examples: Sequence[_Example]) -> Json:
        """Make one step in two passes and return its metrics row.

        The sides of a pair may lie in different micro-batches, where no loss sees both. By the
        chain rule the gradient is Σ d loss/d value · d value/d weights. So all values are computed
        first, without gradients; then each is weighted by its own slope. That is exact, however the
        step is split.
        """
        measurement = self._measure(examples)
        datums = [datum for example in examples for datum in example]
        weighted = []
        for datum, slope in zip(datums, measurement.slopes, strict=True):
            weighted.append(replace(datum, weight=slope))
        report = self.learner.step(weighted, _weighted_sum)
        return {"step": self.learner.steps_done, **asdict(report), **measurement.figures}

    def _measure(self, examples: Sequence[_Example]) -> _Measurement:
        """Compute loss, accuracy and margins, and the slope of the loss by each value."""
        datums = [datum for example in examples for datum in example]
        values_by_datum = self.learner.values(datums)
        values = torch.tensor(np.concatenate(values_by_datum), requires_grad=True)
        # one label per example or turn: of a pair, the chosen side has it
        labels = np.concatenate([datum.weight for datum in datums])[:: len(examples[0])]
        labels_M = torch.tensor(labels)
        loss, logits_M = reward_loss(
            values.view(len(labels_M), -1), labels_M, self.config.center_rewards_coefficient
        )
        (slopes,) = torch.autograd.grad(loss, values)
        margins = torch.where(labels_M > 0.5, logits_M, -logits_M).detach().numpy()
        figures = {
            "accuracy": (margins > 0).mean().item(),
            "margin": margins.mean().item(),
            "loss": loss.item(),
        }
        datum_ends = np.cumsum([len(datum_values) for datum_values in values_by_datum])
        slopes_by_datum = np.split(slopes.numpy(), datum_ends[:-1])
        return _Measurement(figures, slopes_by_datum, margins)


def _weighted_sum(values_N: torch.Tensor, batch: Batch, step_tokens: float) -> torch.Tensor:
    """The learner's loss: each value times the slope of the real loss by it."""
    return (values_N * batch.weight_N).sum()


def _dialogs_of_pair(row: Row) -> list[Dialog]:
    """Return a preference as two dialogs, the chosen one first."""
    pair = preference_from_row(row.value, row.where)
    chosen = Dialog((*pair.prompt, *pair.chosen), pair.tools, row.where)
    rejected = Dialog((*pair.prompt, *pair.rejected), pair.tools, row.where)
    return [chosen, rejected]


def _labelled_dialog(row: Row) -> Dialog:
    """Return a dialog that has a label from 0 to 1 for each trained assistant turn."""
    dialog = dialog_from_row(row.value, row.where)
    turns = 0
    for message in dialog.messages:
        if message.role == "assistant" and message.trained:
            turns += 1
    labels: object = dialog.metadata.get("step_labels")
    if not _are_labels(labels, turns):
        raise RowError(
            row.where, f"step_labels: expected {turns} numbers from 0 to 1, one per assistant turn"
        )
    return replace(dialog, id=row.where)


def _are_labels(labels: object, count: int) -> bool:
    """Whether this is a list of `count` numbers from 0 to 1."""
    if not isinstance(labels, list) or len(labels) != count:
        return False
    return all(type(label) in (bool, int, float) and 0 <= label <= 1 for label in labels)


def _mark_turn_ends(datum: Datum, labels: list[float] | None) -> Datum:
    """Return the datum with the ends of its turns trained, weighted by their labels, instead of all
    that was said. Without labels it is the last end, with label 1."""
    ends = turn_ends(datum)
    mask = np.zeros(len(datum.ids), bool)
    if labels:
        mask[ends] = True
    else:
        mask[ends[-1:]] = True
    return replace(datum, mask=mask, weight=np.array(labels or [1.0], np.float32))


def _reserve_padding_token(renderer: Renderer) -> None:
    """Make sure that the padding token is not one that ends a turn.

    transformers reads a row's score at the last token that is not padding.
    """
    tokenizer = renderer.tokenizer
    candidates = [
        text for text, token_id in renderer.special.items() if token_id not in renderer.stop_ids
    ]
    if not candidates:
        raise SharpenError(
            f"{tokenizer.name_or_path}: has no special token for padding besides those that end a "
            "turn; add one to the tokenizer"
        )
    padding = tokenizer.pad_token if tokenizer.pad_token in candidates else candidates[0]
    tokenizer.pad_token = padding
