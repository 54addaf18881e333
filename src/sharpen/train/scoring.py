"""A model as a `Scorer`: its loss on dialogs, one number per dialog, without training anything.

Coresets, replay, the comparison of methods and the search for merges score with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sharpen.models.load import ModelConfig, load_model, load_tokenizer
from sharpen.records import read_jsonl
from sharpen.render import Renderer
from sharpen.rows import dialog_from_row
from sharpen.train.decoder import LogprobModel
from sharpen.types import Datum, Dialog, SharpenError


class ModelScorer:
    """Scores dialogs with a model, in micro-batches of `token_budget` tokens."""

    def __init__(self, model: Any, renderer: Renderer, token_budget: int = 8192):
        self.model = model.eval()
        self.renderer = renderer
        self.token_budget = token_budget

    @classmethod
    def load(cls, name: str, device: str = "auto") -> ModelScorer:
        """Load a model by name or folder."""
        model = load_model(ModelConfig(base_model=name, device=device))
        return cls(model, Renderer(load_tokenizer(name)))

    def logprobs(self, dialogs: Sequence[Dialog]) -> list[np.ndarray]:
        """Return the log-probabilities of each dialog's assistant tokens."""
        return self._datum_logprobs(list(self.renderer.render(dialogs)))

    def losses(self, dialogs: Sequence[Dialog]) -> list[float]:
        """Return the mean negative log-likelihood of each dialog's assistant tokens."""
        return self.datum_losses(list(self.renderer.render(dialogs)))

    def datum_losses(self, datums: Sequence[Datum]) -> list[float]:
        """Return the mean negative log-likelihood of each datum's trained tokens."""
        return [-float(values.mean()) for values in self._datum_logprobs(datums)]

    def _datum_logprobs(self, datums: Sequence[Datum]) -> list[np.ndarray]:
        return LogprobModel(self.model).score(datums, self.token_budget)


def dev_loss(model: str | Path, data: str | Path, device: str = "auto") -> float:
    """Return a model's mean loss over all assistant tokens of a file of dialogs."""
    dialogs = [dialog_from_row(row.value, row.where) for row in read_jsonl(data)]
    if not dialogs:
        raise SharpenError(f"{data}: no rows; expected one dialog per line")
    scorer = ModelScorer.load(str(model), device)
    return -float(np.concatenate(scorer.logprobs(dialogs)).mean())
