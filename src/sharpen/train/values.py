"""A model that gives values instead of words: reward models, and the critic of PPO."""

from __future__ import annotations

from typing import Any

import torch

from sharpen.train.batching import Batch
from sharpen.train.learner import Decoder


class ValueModel(Decoder):
    """A sequence classifier with one label: the value at each marked token, from the hidden state
    of that very token."""

    def __init__(self, model: Any):
        classifier = model.get_base_model() if hasattr(model, "get_base_model") else model
        super().__init__(getattr(classifier, classifier.base_model_prefix))
        self.head = classifier.score

    def forward(self, batch: Batch) -> torch.Tensor:
        # at_N is the place before the marked token, where a language model would foretell it
        return self.head(self.hidden(batch).flatten(0, 1)[batch.at_N + 1]).squeeze(-1).float()
