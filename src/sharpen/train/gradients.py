"""Gradients of single rows: which rows move a model to where a target set moves it, as in LESS.

The coreset strategy `gradient` ranks rows with `GradientInfluence`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from sharpen.data.features import normalize_rows
from sharpen.render import Renderer
from sharpen.train.batching import micro_batches
from sharpen.train.collate import collate
from sharpen.train.decoder import LogprobModel
from sharpen.types import Datum, Dialog, SharpenError

_LORA_PARTS = {"base_layer", "lora_A", "lora_B"}


class GradientInfluence:
    """Dialogs → the cosine of each one's gradient with the target's. If the target has several task
    types, it is the cosine with the closest type.

    A row's gradient of its mean loss, for a matrix, is the sum over tokens of (slope of the output)
    ⊗ (input). Both factors are projected on `rank` random orthogonal directions before they are
    multiplied. The result is the gradient of a low-rank core between fixed random factors, as in
    LoRA. One backward pass through the last `layers` layers gives every row of a micro-batch its
    own gradient.
    """

    def __init__(
        self,
        model: Any,
        renderer: Renderer,
        target: Sequence[Dialog],
        layers: int = 1,
        rank: int = 16,
    ):
        if not target:
            raise SharpenError("gradient influence: the target set has no rows")
        self.model = model.eval()
        self.renderer = renderer
        self.token_budget = 8192
        self._core = LogprobModel(model)
        # of each probed matrix the random directions of its input and of its output
        self._directions: dict[Any, list[torch.Tensor]] = {}
        generator = torch.Generator().manual_seed(0)
        for layer in list(self._core.decoder.layers)[-layers:]:
            for name, module in layer.named_modules():
                is_inside_lora = _LORA_PARTS & set(name.split("."))
                if hasattr(module, "in_features") and not is_inside_lora:
                    self._directions[module] = self._draw_directions(module, rank, generator)
        target_features = self.features(target)
        task_types = np.array([dialog.task_type for dialog in target])
        means = []
        for task_type in sorted(set(task_types)):
            of_this_type = target_features[task_types == task_type]
            means.append(normalize_rows(of_this_type).mean(0))
        self._target_K_F = normalize_rows(np.array(means))

    def _draw_directions(
        self, module: Any, rank: int, generator: torch.Generator
    ) -> list[torch.Tensor]:
        """Draw orthogonal directions for the input and the output of a matrix."""
        device = self._core.head.weight.device
        directions = []
        for width in (module.in_features, module.out_features):
            random_matrix = torch.randn(width, min(rank, width), generator=generator)
            orthogonal, _ = torch.linalg.qr(random_matrix)
            directions.append(orthogonal.to(device))
        return directions

    def __call__(self, dialogs: Sequence[Dialog]) -> np.ndarray:
        cosines_N_K = normalize_rows(self.features(dialogs)) @ self._target_K_F.T
        return cosines_N_K.max(1)

    def features(self, dialogs: Sequence[Dialog]) -> np.ndarray:
        """Return one projected gradient per dialog.

        Meanwhile no weight requires a gradient, so that layers before the probed ones take no part
        in the backward pass.
        """
        datums = list(self.renderer.render(dialogs))
        batches = micro_batches([len(datum.ids) for datum in datums], self.token_budget)
        trainable = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.model.requires_grad_(False)
        try:
            features = []
            for indices in batches:
                features.append(self._batch_features([datums[index] for index in indices]))
        finally:
            for weight in trainable:
                weight.requires_grad_(True)
        original_order = np.argsort(np.concatenate(batches))
        return np.concatenate(features)[original_order]

    def _batch_features(self, datums: Sequence[Datum]) -> np.ndarray:
        """Return the projected gradients of one micro-batch."""
        batch = collate(datums, str(self._core.head.weight.device))
        inputs: dict[Any, torch.Tensor] = {}
        # zeros added to each matrix's output; the gradient by them is the slope of the output
        offsets: dict[Any, torch.Tensor] = {}

        def probe(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
            inputs[module] = arguments[0].detach()
            offsets[module] = torch.zeros_like(output, requires_grad=True)
            return output + offsets[module]

        with ExitStack() as hooks:
            for module in self._directions:
                hooks.callback(module.register_forward_hook(probe).remove)
            logprobs_N = self._core(batch)
        counts_B = torch.bincount(batch.row_N, minlength=len(datums))
        sum_of_mean_losses = -(logprobs_N / counts_B[batch.row_N]).sum()
        slopes = torch.autograd.grad(sum_of_mean_losses, list(offsets.values()))
        parts = []
        for module, slope_B_T_O in zip(offsets, slopes, strict=True):
            input_directions_I_R, output_directions_O_R = self._directions[module]
            input_B_T_R = inputs[module].float() @ input_directions_I_R
            output_B_T_R = slope_B_T_O.float() @ output_directions_O_R
            core_B_R_R = torch.einsum("btr,bts->brs", input_B_T_R, output_B_T_R)
            parts.append(core_B_R_R.flatten(1))
        return torch.cat(parts, 1).cpu().numpy()
