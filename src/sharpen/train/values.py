"""A model that gives values instead of words: reward models, and the critic of PPO."""

from __future__ import annotations

from typing import Any

import torch

from sharpen.train.collate import Batch
from sharpen.train.decoder import Decoder


class ValueModel(Decoder):
    """A sequence classifier with one label, read at each trained token.

    A reward model reads the hidden state of the token itself. A critic (`before`) reads the state
    in which the token was chosen: the hidden state of the token before it.
    """

    def __init__(self, model: Any, before: bool = False):
        classifier = model.get_base_model() if hasattr(model, "get_base_model") else model
        super().__init__(getattr(classifier, classifier.base_model_prefix))
        self.head = classifier.score
        self.before = before

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the value at each trained token, [N]."""
        place_N = batch.predictor_place_N if self.before else batch.trained_place_N
        hidden_N_D = self.hidden(batch).flatten(0, 1)[place_N]
        return self.head(hidden_N_D).squeeze(-1).float()
