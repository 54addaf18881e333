"""A model as a `Scorer`: the loss that it has on dialogs, one figure each, without training
anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sharpen.models.load import ModelConfig, load_model, load_tokenizer
from sharpen.records import read_jsonl
from sharpen.render import Renderer
from sharpen.rows import dialog_from_row
from sharpen.train.learner import LogprobModel
from sharpen.types import Datum, Dialog, SharpenError


class ModelScorer:
    def __init__(self, model: Any, renderer: Renderer, token_budget: int = 8192):
        self.model, self.renderer, self.token_budget = model.eval(), renderer, token_budget

    @classmethod
    def load(cls, name: str, device: str = "auto") -> ModelScorer:
        model = load_model(ModelConfig(base_model=name, device=device))
        return cls(model, Renderer(load_tokenizer(name)))

    def logprobs(self, dialogs: Sequence[Dialog]) -> list[np.ndarray]:
        data = list(self.renderer.render(dialogs))
        return LogprobModel(self.model).score(data, self.token_budget)

    def datum_losses(self, data: Sequence[Datum]) -> list[float]:
        found = LogprobModel(self.model).score(data, self.token_budget)
        return [-float(values.mean()) for values in found]

    def losses(self, dialogs: Sequence[Dialog]) -> list[float]:
        """Mean negative log-likelihood of each dialog's assistant tokens."""
        return self.datum_losses(list(self.renderer.render(dialogs)))


def dev_loss(model: str | Path, data: str | Path, device: str = "auto") -> float:
    """A model's loss over all assistant tokens of a file of dialogs."""
    dialogs = [dialog_from_row(row.value, row.where) for row in read_jsonl(data)]
    if not dialogs:
        raise SharpenError(f"{data}: no rows")
    return -float(np.concatenate(ModelScorer.load(str(model), device).logprobs(dialogs)).mean())
