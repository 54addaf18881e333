"""LoRA on a model: PEFT's adapters, computed without wasted passes over the activations.

The learner and the sampling engine call `fuse_lora`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from peft.tuners.lora import Linear
from torch.nn import functional as F


class FusedLinear(Linear):
    """PEFT's LoRA layer with the same numbers and fewer passes.

    PEFT scales the full-width result and, with fp32 adapters on a bf16 base, casts the whole input
    up. Here the small factor is scaled, the product is added by the matrix multiplication itself,
    and adapters stay fp32 in memory but are computed in the input's type.
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        base: Any = self.base_layer
        down = cast(Any, self.lora_A)
        up = cast(Any, self.lora_B)
        names = [name for name in self.active_adapters if name in self.lora_A]
        not_fusable = self.disable_adapters or self.merged or len(names) != 1 or args or kwargs
        if not_fusable or names[0] in self.lora_variant:
            return super().forward(x, *args, **kwargs)
        name = names[0]
        down_R_D = down[name].weight.to(x.dtype)
        up_O_R = up[name].weight.to(x.dtype)
        small = F.linear(self.lora_dropout[name](x), down_R_D) * self.scaling[name]
        result = F.linear(x, base.weight, base.bias)
        flat = torch.addmm(result.flatten(0, -2), small.flatten(0, -2), up_O_R.T)
        return flat.view(result.shape)


def fuse_lora(model: torch.nn.Module) -> torch.nn.Module:
    """Let every plain LoRA layer over a plain matrix compute as `FusedLinear`; return the model."""
    for module in model.modules():
        if type(module) is Linear and type(module.base_layer) is torch.nn.Linear:
            module.__class__ = FusedLinear
    return model
