"""The attention function that transformers calls in every layer, for three layouts of tokens.

- Packed rows lie end to end in one line and do not see each other, except for a prompt that they
  share (`shared_prompt`, which also has a CPU kernel). No time is spent on padding.
- Tokens of a `SlotStep` are written into a cache of keys and values that has a row per sequence,
  and see what their row holds. This is how the sampling engine (`policy.slots`) calls it.
- Anything else is ordinary causal attention.

The kernel of the first two needs a GPU and half precision. Elsewhere rows are padded, and slots
are computed by plain torch. The learner packs its batches with `packed_arguments`.
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
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from sharpen.models.shared_prompt import shared_attention
from sharpen.types import SharpenError

_HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters  # since torch 2.12
_NAME = "sharpen"  # of our attention in transformers' registry
_FEW_KEY_HEADS = 4
# The kernel is given an upper bound of the longest row: this, doubled as needed. Few different
# bounds mean few compilations.
_LONGEST_ROW = 4096

# Suffixes of tensor names: N new tokens, H heads, D width of a head, T tokens of a line.


def use_our_attention(model: Any) -> bool:
    """Give the model our attention; return whether its weights lie where the kernel runs."""
    _register()
    if model.config._attn_implementation != _NAME:
        model.set_attn_implementation(_NAME)
    weight = next(model.parameters())
    return weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16)


@lru_cache(maxsize=1)
def _register() -> None:
    """Tell transformers about our attention, once."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_NAME, attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)


def plain_head(causal: Any) -> Any:
    """Returns the output head; raises unless logits are just its product with hidden states."""
    kind = causal.config.model_type
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(causal.config, name, None) not in (None, 1, 1.0):
            raise SharpenError(f"{kind}: {name} changes its logits, which is not supported yet")
    head = causal.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise SharpenError(f"{kind}: its output head is not a plain matrix")
    return head


def check_layers(causal: Any) -> Any:
    """Returns the decoder; raises unless its layers remember only keys and values."""
    config = causal.config.get_text_config()
    decoder = getattr(causal, causal.base_model_prefix)
    known_kinds = {"full_attention", "sliding_attention"}
    unknown_kinds = set(getattr(config, "layer_types", None) or ()) - known_kinds
    # a decoder without a list of layers is one of another build
    layers = getattr(decoder, "layers", [0])
    if unknown_kinds or not all(hasattr(layer, "self_attn") for layer in layers):
        what = ", ".join(sorted(unknown_kinds)) or "of another build"
        raise SharpenError(f"{config.model_type}: layers ({what}) that cannot be sampled from here")
    if getattr(config, "attn_logit_softcapping", None):
        raise SharpenError(f"{config.model_type}: attn_logit_softcapping is not supported yet")
    return decoder


def no_mask(device: torch.device | str) -> Tensor:
    """Returns an empty mask of four dimensions.

    transformers hands such a mask through instead of making one of T x T.
    """
    return torch.empty(1, 1, 1, 1, device=device)


def packed_arguments(
    lengths: Sequence[int], positions_T: np.ndarray, device: str, trees: Sequence[int] = ()
) -> dict[str, Any]:
    """Returns the decoder's arguments for a line of packed rows.

    `lengths` are those of the rows, `positions_T` the position of each token in its row. With
    `trees`, the line begins with one shared prompt per tree, followed by the rows that go on from
    them; `trees` says how many rows each prompt has. Tokens after all rows (padding) are treated
    as a row of their own.
    """
    padding = len(positions_T) - sum(lengths)
    ends = np.cumsum([0, *lengths, padding] if padding else [0, *lengths])
    # where the rows of each prompt begin and end, all rows of a prompt together
    rest_ends = ends[len(trees) + np.cumsum([0, *trees])]
    row_lengths = np.concatenate([np.diff(ends), np.diff(rest_ends)])
    longest = _LONGEST_ROW
    while longest < row_lengths.max():
        longest *= 2
    arguments: dict[str, Any] = {"longest_row": longest, "attention_mask": no_mask(device)}
    if trees:
        prompt_tokens = rest_ends[0]
        rest_tokens = rest_ends[-1] - rest_ends[0]
        sizes = torch.tensor([prompt_tokens, rest_tokens, longest])
        rest_ends_from_0 = torch.from_numpy(rest_ends - rest_ends[0]).int().to(device)
        arguments["shared"] = (rest_ends_from_0, sizes)
    arguments["row_ends"] = torch.from_numpy(ends).int().to(device)
    arguments["position_ids"] = torch.from_numpy(positions_T)[None].to(device)
    return arguments


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute attention behind transformers' interface.

    Tensors come heads first, with a batch of one when tokens are packed or in slots. The keyword
    arguments are those that the decoder was called with: `packed_arguments`, or `slots=True`.
    """
    ends = kwargs.pop("row_ends", None)
    slots = kwargs.pop("slots", False)
    longest = kwargs.pop("longest_row", 0)
    shared = kwargs.pop("shared", None)
    if ends is None and not slots:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    window = kwargs.get("sliding_window")  # how many places back a token sees, itself included
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    if slots:
        # while compiling, one opaque operation that the compiler does not look into
        run: Any = _compiled_slots if torch.compiler.is_compiling() else _slot_attention
        return run(q, k, v, module.layer_idx, kwargs.get("scaling"), window)[None], None
    if window is not None:
        raise SharpenError("packing with a sliding window is not supported; set packing=off")
    if shared is not None:
        scale = kwargs.get("scaling") or q.shape[-1] ** -0.5
        return shared_attention(q, k, v, ends, *shared, scale)[0][None], None
    options: dict[str, Any] = {"scale": kwargs.get("scaling"), "window_size": (-1, 0)}  # causal
    if q.shape[1] > k.shape[1] and _HAS_GQA:  # older versions accept fewer key heads unasked
        options["enable_gqa"] = True
    return varlen_attn(q, k, v, ends, ends, longest, longest, **options)[None], None  # type: ignore[index]


@dataclass(frozen=True, slots=True)
class SlotStep:
    """New tokens of some rows of a cache.

    Row i of the step has the tokens between `ends[i]` and `ends[i + 1]`, and they are the last
    ones of its `used[i]`.
    """

    cache: Tensor  # [layers, keys and values, rows, places, heads, width of a head]
    at_N: Tensor  # where each new token lies: row * places + place
    ends: Tensor  # int32
    starts: Tensor  # int32, the first place of each row, and one more
    used: Tensor  # int32, places of each row that hold a token, the new ones included
    longest: int  # most new tokens of one row
    kernel: bool  # whether the GPU kernel runs
    # what the computation without a kernel needs: for one token per row, (rows, places to read,
    # masks by window); otherwise a list of (row, new tokens, used)
    plain: Any = None


current_call = threading.local()  # its `step` is the SlotStep of the decoder call that is running


def _slot_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: int,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Write a layer's new keys and values into the cache and attend to what the rows hold."""
    step: SlotStep = current_call.step
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
        run = attend_decode if isinstance(step.plain, tuple) else _prefill
        return run(q, keys, values, step, scale, window or step.cache.shape[3])
    # a query sees the keys up to its own place: the mask is aligned to the end of each row
    places = step.cache.shape[3]
    flash = torch.ops.aten._flash_attention_forward
    outputs = flash(
        q, keys, values, step.ends, step.starts, step.longest, places, 0.0, True, False,
        scale=scale, seqused_k=step.used,
        window_size_left=window and window - 1, window_size_right=window and 0,
    )  # fmt: skip
    return outputs[0]


# The cache that it writes into is not among its arguments: the compiler might copy it.
_compiled_slots: Any = torch.library.custom_op(
    "sharpen::slot_attention", _slot_attention, mutates_args=()
)


@_compiled_slots.register_fake
def _empty_like_queries(q: Tensor, *others: Any) -> Tensor:
    """Returns what the compiler needs to know of the output: its shape and dtype."""
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def attend_decode(
    q_N_H_D: Tensor, keys: Tensor, values: Tensor, step: SlotStep, scale: float | None, window: int
) -> Tensor:
    """Attend with one new token per row, without the kernel: all rows in one product.

    The query heads that share a key head are treated as several queries of that head.
    """
    rows, read, masks = step.plain
    k = keys[:rows, :read]
    v = values[:rows, :read]
    heads, width = k.shape[2:]
    q = q_N_H_D.view(rows, heads, -1, width)
    if window not in masks:  # the first layer makes it for all
        distance = step.used[:rows, None] - 1 - torch.arange(read, device=k.device)
        unseen = (distance < 0) | (distance >= window)
        masks[window] = q.new_zeros(rows, 1, read).masked_fill_(unseen[:, None], float("-inf"))
    if heads > _FEW_KEY_HEADS:
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, masks[window][:, None], scale=scale)
        return out.reshape(q_N_H_D.shape)
    # one product for all heads, queries being 0 where the keys are another head's: twice as fast
    spread = q.new_zeros(rows, heads, q.shape[2], heads, width)
    spread.diagonal(dim1=1, dim2=3).copy_(q.permute(0, 2, 3, 1))
    alpha = width**-0.5 if scale is None else scale
    all_queries = spread.view(rows, -1, heads * width)
    all_keys = k.flatten(2).mT
    shares = torch.baddbmm(masks[window], all_queries, all_keys, alpha=alpha).softmax(-1)
    out = torch.bmm(shares, v.flatten(2)).view(spread.shape)
    return out.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(q_N_H_D.shape)


def _prefill(
    q_N_H_D: Tensor, keys: Tensor, values: Tensor, step: SlotStep, scale: float | None, window: int
) -> Tensor:
    """Attend with any number of new tokens per row, without the kernel: row by row."""
    outputs = []
    start = 0
    for row, new, used in step.plain:
        q = q_N_H_D[start : start + new].transpose(0, 1)[None]
        k, v = (part[row, :used].transpose(0, 1)[None] for part in (keys, values))
        places = torch.arange(used, device=q.device)
        distance = places[used - new :, None] - places
        mask = (distance >= 0) & (distance < window)
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
        start += new
    return torch.cat(outputs)
