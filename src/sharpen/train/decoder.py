"""A model as one function of a batch: one number for each trained token.

The learner trains such a model; `LogprobModel` gives log-probabilities, `ValueModel` (values.py)
gives values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sharpen.models.attention import plain_head
from sharpen.train.batching import plan_micro_batches
from sharpen.train.collate import Batch, collate
from sharpen.train.losses import selected_logprobs
from sharpen.train.processes import SingleProcess
from sharpen.types import Datum


class Decoder(torch.nn.Module):
    """Base class: the model without its head. A subclass's `forward` turns the hidden states of a
    batch into one number per trained token."""

    def __init__(self, decoder: Any):
        super().__init__()
        self.decoder = decoder
        self.packed = False  # whether rows lie end to end instead of padded
        self.shares = False  # whether a prompt that several rows share is computed once
        self.compiled = False

    def batch(self, datums: Sequence[Datum]) -> Batch:
        """Collate rows in the layout that this model computes, on its device."""
        device = str(next(self.parameters()).device)
        return collate(datums, device, self.packed, self.shares)

    def hidden(self, batch: Batch) -> torch.Tensor:
        """Return the last hidden states of a batch, [B, T, D]."""
        output = self.decoder(input_ids=batch.tokens_B_T, use_cache=False, **batch.extra)
        return output.last_hidden_state

    @torch.no_grad()
    def score(
        self,
        datums: Sequence[Datum],
        token_budget: int,
        processes: SingleProcess | None = None,
        runner: Any = None,
    ) -> list[np.ndarray]:
        """Return the numbers of each datum's trained tokens, in the order of the datums.

        The micro-batches are shared out among `processes`. `runner` is called instead of this
        model if it is wrapped for several processes.
        """
        processes = processes or SingleProcess()
        runner = runner or self
        batches = plan_micro_batches(
            datums, token_budget, self.packed, processes.world, self.shares
        )
        values_by_datum: dict[int, np.ndarray] = {}
        for indices in processes.own_share(batches):
            # A process without rows runs one for nothing, because the others wait for it.
            batch = self.batch([datums[index] for index in indices] or datums[:1])
            values_N = runner(batch).cpu().numpy()
            row_N = batch.row_N.cpu().numpy()
            for row, index in enumerate(indices):
                values_by_datum[index] = values_N[row_N == row]
        values_by_datum = processes.gather(values_by_datum)
        return [values_by_datum[index] for index in range(len(datums))]

    def compile_layers(self, activation_share: float = 1.0) -> None:
        """Compile the layers; they are alike, so one graph serves all of them at any length.

        With a share below 1 the compiler keeps only that share of the activations and recomputes
        what is cheapest to compute again.
        """
        import torch._functorch.config as compiler

        compiler.activation_memory_budget = activation_share
        self.compiled = True
        for layer in self.decoder.layers:
            layer.compile(dynamic=True)


class LogprobModel(Decoder):
    """A causal model: log-probabilities of the trained tokens. Logits are computed for those
    positions only."""

    def __init__(self, model: Any):
        causal_model = model.get_base_model() if hasattr(model, "get_base_model") else model
        head = plain_head(causal_model)
        super().__init__(getattr(causal_model, causal_model.base_model_prefix))
        self.head = head
        self.temperature = 1.0

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return log p of each trained token, [N]."""
        hidden_N_D = self.hidden(batch).flatten(0, 1)[batch.predictor_place_N]
        if self.temperature != 1.0:  # the distribution that was sampled from
            hidden_N_D = hidden_N_D / self.temperature
        return selected_logprobs(hidden_N_D, self.head.weight, batch.targets_N, self.compiled)
