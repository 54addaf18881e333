"""Our attention: one function that transformers calls in every layer, for three ways of laying out
tokens.

Packed rows lie end to end in one line and do not see each other, but for a prompt that they share
(`shared_prompt.py`, which has a kernel on a CPU too): nothing is spent on padding. Tokens of
a `SlotStep` are written into a cache of keys and values that keeps a row for each sequence, and see
what their row holds. Anything else is ordinary causal attention. The kernel of
the first two needs a GPU and half precision; elsewhere rows are padded, and slots are computed by
plain torch.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from sharpen.models.shared_prompt import shared_attention
from sharpen.types import SharpenError

HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters  # since torch 2.12
NAME = "sharpen"
FEW_HEADS = 4  # of keys
LONGEST = 4096  # upper bounds of a row's length given to the kernel: this, doubled as needed


def use_our_attention(model: Any) -> bool:
    """Give the model our attention; true if its weights lie where the kernel runs."""
    register()
    if model.config._attn_implementation != NAME:
        model.set_attn_implementation(NAME)
    weight = next(model.parameters())
    return weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16)


@lru_cache(maxsize=1)
def register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def plain_head(causal: Any) -> Any:
    """The output head, where logits are nothing but its product with the hidden states."""
    kind = causal.config.model_type
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(causal.config, name, None) not in (None, 1, 1.0):
            raise SharpenError(f"{kind}: {name} changes its logits, which is not supported yet")
    head = causal.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise SharpenError(f"{kind}: its output head is not a plain matrix")
    return head


def check_layers(causal: Any) -> Any:
    """The decoder, if a cache of keys and values is all that its layers remember."""
    config, decoder = causal.config.get_text_config(), getattr(causal, causal.base_model_prefix)
    known = {"full_attention", "sliding_attention"}
    kinds = set(getattr(config, "layer_types", None) or ()) - known
    if kinds or not all(hasattr(layer, "self_attn") for layer in getattr(decoder, "layers", [0])):
        what = ", ".join(sorted(kinds)) or "of another build"
        raise SharpenError(f"{config.model_type}: layers ({what}) that cannot be sampled from here")
    if getattr(config, "attn_logit_softcapping", None):
        raise SharpenError(f"{config.model_type}: attn_logit_softcapping is not supported yet")
    return decoder


def no_mask(device: Any) -> torch.Tensor:
    """Four dimensions: transformers hands it through instead of making a mask of T x T."""
    return torch.empty(1, 1, 1, 1, device=device)


def packed_arguments(
    lengths: Sequence[int], positions_T: Any, device: str, trees: Sequence[int] = ()
) -> dict[str, Any]:
    """What the decoder needs to know of rows of these lengths and of the positions of their tokens.
    Before other rows lie prompts, then those that go on from them, as many from each as `trees`
    says. Tokens behind all rows are a row of their own."""
    behind = len(positions_T) - sum(lengths)
    ends = np.cumsum([0, *lengths, behind] if behind else [0, *lengths])
    rest_ends = ends[len(trees) + np.cumsum([0, *trees])]
    longest = LONGEST
    while longest < max(*np.diff(ends), *np.diff(rest_ends)):
        longest *= 2
    extra: dict[str, Any] = {"longest_row": longest, "attention_mask": no_mask(device)}
    if trees:
        sizes = torch.tensor([rest_ends[0], rest_ends[-1] - rest_ends[0], longest])
        extra["shared"] = torch.from_numpy(rest_ends - rest_ends[0]).int().to(device), sizes
    extra["row_ends"] = torch.from_numpy(ends).int().to(device)
    return extra | {"position_ids": torch.from_numpy(positions_T)[None].to(device)}


def attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> tuple[Any, None]:
    """transformers' attention interface: heads first, batch of one when packed or in slots."""
    ends, slots = kwargs.pop("row_ends", None), kwargs.pop("slots", False)
    longest, shared = kwargs.pop("longest_row", 0), kwargs.pop("shared", None)
    if ends is None and not slots:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    window = kwargs.get("sliding_window")  # how many places back a token sees, itself included
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    if slots:
        # compiled, it is one operation that nobody looks into
        run: Any = compiled_slots if torch.compiler.is_compiling() else slot_attention
        return run(q, k, v, module.layer_idx, kwargs.get("scaling"), window)[None], None
    if window is not None:
        raise SharpenError("packing with a sliding window is not supported; set packing=off")
    if shared is not None:
        scale = kwargs.get("scaling") or q.shape[-1] ** -0.5
        return shared_attention(q, k, v, ends, *shared, scale)[0][None], None
    more: dict[str, Any] = {"scale": kwargs.get("scaling"), "window_size": (-1, 0)}  # causal
    if q.shape[1] > k.shape[1] and HAS_GQA:  # before the flag existed, fewer heads were just taken
        more["enable_gqa"] = True
    return varlen_attn(q, k, v, ends, ends, longest, longest, **more)[None], None  # type: ignore[index]


@dataclass(frozen=True, slots=True)
class SlotStep:
    """New tokens of some rows of a cache: row i of the step has the tokens between `ends[i]` and
    `ends[i + 1]`, and they are the last ones of its `used[i]`."""

    cache: torch.Tensor  # layers, keys and values, rows, places, heads, width of a head
    at_N: torch.Tensor  # where each new token lies: row * places + place
    ends: torch.Tensor  # int32
    starts: torch.Tensor  # int32, the first place of each row, and one more
    used: torch.Tensor  # int32
    longest: int  # new tokens of one row
    kernel: bool
    plain: Any = None  # without it: (rows, places to read, masks), or [(row, new tokens, used)]


under_way = threading.local()  # its `step` is the SlotStep that layers called with `slots` are in


def slot_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: int,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    step: SlotStep = under_way.step
    cache = step.cache[layer]
    if step.kernel and step.longest == 1:
        from sharpen.models import slot_kernel

        if slot_kernel.fits(q, k):
            return slot_kernel.attend(q, k, v, cache, step.at_N, step.used, scale, window)
    keys, values = (part.flatten(0, 1) for part in cache.unbind())
    keys.index_copy_(0, step.at_N, k)
    values.index_copy_(0, step.at_N, v)
    if not step.kernel:
        keys, values = cache.unbind()
        run = decoded if isinstance(step.plain, tuple) else prefilled
        return run(q, keys, values, step, scale, window or step.cache.shape[3])
    # a query sees the keys up to its own place: the mask is aligned to the end of each row
    places, flash = step.cache.shape[3], torch.ops.aten._flash_attention_forward
    found = flash(
        q, keys, values, step.ends, step.starts, step.longest, places, 0.0, True, False,
        scale=scale, seqused_k=step.used,
        window_size_left=window and window - 1, window_size_right=window and 0,
    )  # fmt: skip
    return found[0]


# The cache that it writes into is not among its arguments: the compiler might copy it.
compiled_slots: Any = torch.library.custom_op(
    "sharpen::slot_attention", slot_attention, mutates_args=()
)


@compiled_slots.register_fake
def like_queries(q: Any, *others: Any) -> Any:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def decoded(q_N_H_D: Any, keys: Any, values: Any, step: SlotStep, scale: Any, window: int) -> Any:
    """One new token a row, rows side by side; the heads that share a key are its queries."""
    rows, read, masks = step.plain
    k, v = keys[:rows, :read], values[:rows, :read]
    heads, width = k.shape[2:]
    q = q_N_H_D.view(rows, heads, -1, width)
    if window not in masks:  # the first layer makes it for all
        back = step.used[:rows, None] - 1 - torch.arange(read, device=k.device)
        unseen = (back < 0) | (back >= window)
        masks[window] = q.new_zeros(rows, 1, read).masked_fill_(unseen[:, None], float("-inf"))
    if heads > FEW_HEADS:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        found = F.scaled_dot_product_attention(q, k, v, masks[window][:, None], scale=scale)
        return found.reshape(q_N_H_D.shape)
    # one product for all heads, queries being 0 where the keys are another head's: twice as fast
    spread = q.new_zeros(rows, heads, q.shape[2], heads, width)
    spread.diagonal(dim1=1, dim2=3).copy_(q.permute(0, 2, 3, 1))
    alpha = width**-0.5 if scale is None else scale
    given = spread.view(rows, -1, heads * width), k.flatten(2).mT
    shares = torch.baddbmm(masks[window], *given, alpha=alpha).softmax(-1)
    found = torch.bmm(shares, v.flatten(2)).view(spread.shape)
    return found.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(q_N_H_D.shape)


def prefilled(q_N_H_D: Any, keys: Any, values: Any, step: SlotStep, scale: Any, window: int) -> Any:
    """Any number of new tokens a row, row by row."""
    parts, start = [], 0
    for row, new, used in step.plain:
        q = q_N_H_D[start : start + new].transpose(0, 1)[None]
        k, v = (part[row, :used].transpose(0, 1)[None] for part in (keys, values))
        places = torch.arange(used, device=q.device)
        back = places[used - new :, None] - places
        mask = (back >= 0) & (back < window)
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
        start += new
    return torch.cat(parts)
