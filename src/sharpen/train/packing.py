"""Rows laid end to end in one line of tokens, and attention that does not cross their borders.

Nothing is spent on padding, and every micro-batch has nearly the same shape, so that compiled
layers are compiled once. The kernel needs a GPU and half precision; elsewhere rows are padded.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters  # since torch 2.12
NAME = "sharpen_packed"
LONGEST = 4096  # upper bounds of a row's length given to the kernel: this, doubled as needed


def enable_packing(model: Any) -> bool:
    """Give the model our attention, if its weights lie where the kernel runs."""
    weight = next(model.parameters())
    if not weight.is_cuda or weight.dtype not in (torch.bfloat16, torch.float16):
        return False
    register()
    model.set_attn_implementation(NAME)
    return True


@lru_cache(maxsize=1)
def register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def packed_arguments(lengths: list[int], width: int, device: str) -> dict[str, Any]:
    """What the decoder needs to know of rows of these lengths; tokens behind them, up to `width`,
    are a row of their own."""
    rows = [*lengths, width - sum(lengths)] if width > sum(lengths) else lengths
    ends = torch.tensor([0, *rows]).cumsum(0)
    positions_T = torch.arange(width) - torch.repeat_interleave(ends[:-1], torch.tensor(rows))
    longest = LONGEST
    while longest < max(rows):
        longest *= 2
    return {
        "position_ids": positions_T[None].to(device),
        "row_ends": ends.int().to(device),
        "longest_row": longest,
        # four dimensions: transformers hands it through instead of making a mask of T × T
        "attention_mask": torch.empty(1, 1, 1, 1, device=device),
    }


def packed_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> tuple[Any, None]:
    """transformers' attention interface: heads first, batch of one when packed."""
    ends = kwargs.pop("row_ends", None)
    longest = kwargs.pop("longest_row", 0)
    if ends is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if kwargs.get("sliding_window") is not None:
        raise NotImplementedError("packing with a sliding window; set packing=off")
    groups = query.shape[1] // key.shape[1]
    more: dict[str, Any] = {"scale": kwargs.get("scaling"), "window_size": (-1, 0)}  # causal
    if groups > 1 and HAS_GQA:  # before the flag existed, fewer heads were just taken
        more["enable_gqa"] = True
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    return varlen_attn(q, k, v, ends, ends, longest, longest, **more)[None], None  # type: ignore[index]
