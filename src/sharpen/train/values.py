"""A model that gives values instead of words: reward models, and the critic of PPO."""

from __future__ import annotations

from typing import Any

import torch

from sharpen.train.batching import Batch
from sharpen.train.learner import Decoder


class ValueModel(Decoder):
    """A sequence classifier with one label: the value at each marked token, from the hidden state
    of that very token, or (a critic) of the state `before` it was chosen."""

    def __init__(self, model: Any, before: bool = False):
        classifier = model.get_base_model() if hasattr(model, "get_base_model") else model
        super().__init__(getattr(classifier, classifier.base_model_prefix))
        self.head, self.before = classifier.score, before

    def forward(self, batch: Batch) -> torch.Tensor:
        place_N = batch.at_N if self.before else batch.own_N
        return self.head(self.hidden(batch).flatten(0, 1)[place_N]).squeeze(-1).float()
