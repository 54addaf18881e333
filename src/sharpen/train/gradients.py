"""Gradients of single rows: which rows pull a model to where a target set pulls it, as in LESS."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from sharpen.data.features import normalised
from sharpen.render import Renderer
from sharpen.train.batching import collate, micro_batches
from sharpen.train.learner import LogprobModel
from sharpen.types import Datum, Dialog, SharpenError

Dialogs = Sequence[Dialog]


class GradientInfluence:
    """Dialogs → the cosine of each one's gradient with the target's; with several task types in the
    target, with the one it is closest to.

    A row's gradient of its mean loss, for a matrix, is the sum over tokens of (slope of the output)
    ⊗ (input). Both factors are projected on `rank` random orthogonal directions before they are
    multiplied: the gradient of a low-rank core between fixed random factors, as of a LoRA. One
    backward pass through the last `layers` layers gives every row of a micro-batch its own.
    """

    def __init__(
        self, model: Any, renderer: Renderer, target: Dialogs, layers: int = 1, rank: int = 16
    ):
        if not target:
            raise SharpenError("gradient influence: the target set has no rows")
        self.model, self.renderer, self.token_budget = model.eval(), renderer, 8192
        self.core, chance = LogprobModel(model), torch.Generator().manual_seed(0)
        device = self.core.head.weight.device
        self.matrices: dict[Any, list[torch.Tensor]] = {}  # and the directions of both its sides
        for layer in list(self.core.decoder.layers)[-layers:]:
            for name, module in layer.named_modules():
                inner = {"base_layer", "lora_A", "lora_B"} & set(name.split("."))
                if hasattr(module, "in_features") and not inner:
                    widths = (module.in_features, module.out_features)
                    drawn = [torch.randn(w, min(rank, w), generator=chance) for w in widths]
                    self.matrices[module] = [torch.linalg.qr(d)[0].to(device) for d in drawn]
        found, kinds = self.features(target), np.array([dialog.task_type for dialog in target])
        means = [normalised(found[kinds == kind]).mean(0) for kind in sorted(set(kinds))]
        self.target_K_F = normalised(np.array(means))

    def __call__(self, dialogs: Dialogs) -> np.ndarray:
        return (normalised(self.features(dialogs)) @ self.target_K_F.T).max(1)

    def features(self, dialogs: Dialogs) -> np.ndarray:
        """One projected gradient each. No weight asks for a gradient meanwhile, so that layers
        before the probed ones take no part in the backward pass."""
        datums = list(self.renderer.render(dialogs))
        batches = micro_batches([len(d.ids) for d in datums], self.token_budget)
        asking = [p for p in self.model.parameters() if p.requires_grad]
        self.model.requires_grad_(False)
        try:
            found = [self.measure([datums[i] for i in chosen]) for chosen in batches]
        finally:
            for parameter in asking:
                parameter.requires_grad_(True)
        return np.concatenate(found)[np.argsort(np.concatenate(batches))]

    def measure(self, datums: Sequence[Datum]) -> np.ndarray:
        batch = collate(datums, str(self.core.head.weight.device))
        inputs: dict[Any, torch.Tensor] = {}
        slopes: dict[Any, torch.Tensor] = {}

        def probe(module: Any, given: Any, output: torch.Tensor) -> torch.Tensor:
            inputs[module] = given[0].detach()
            slopes[module] = torch.zeros_like(output, requires_grad=True)
            return output + slopes[module]

        with ExitStack() as hooks:
            for module in self.matrices:
                hooks.callback(module.register_forward_hook(probe).remove)
            logprobs_N = self.core(batch)
        counts_B = torch.bincount(batch.row_N, minlength=len(datums))
        total = -(logprobs_N / counts_B[batch.row_N]).sum()
        grads = torch.autograd.grad(total, list(slopes.values()))
        parts = []
        for module, grad_B_T_O in zip(slopes, grads, strict=True):
            left_I_R, right_O_R = self.matrices[module]
            left, right = inputs[module].float() @ left_I_R, grad_B_T_O.float() @ right_O_R
            parts.append(torch.einsum("btr,bts->brs", left, right).flatten(1))
        return torch.cat(parts, 1).cpu().numpy()
