"""Attention of rows that begin with the same prompt, which is computed once for all of them.

A line holds all prompts, then what follows each of them (the rests, those of a prompt side by
side), then rows that share nothing. A token sees its own stretch of the line up to itself, and in
a rest all of its prompt: two parts, each one call of a flash kernel. Both softmaxes become one by
their normalisers. Nor do the slopes need a kernel of their own: a part's probabilities are
exp(score - log of the normaliser), so that its backward pass, given output and normaliser of the
whole, finds that part of the slopes, and they add up.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from torch import Tensor


def shares_prompts(decoder: Any) -> bool:
    """Whether a row's place in the line says nothing to the model: it is told each token's position
    and every layer sees all tokens before one. Caps and dropout are beyond the kernels."""
    config = decoder.config.get_text_config()
    other = ("attn_logit_softcapping", "attention_dropout")
    if not (kinds := getattr(config, "layer_types", None)):
        other, kinds = (*other, "sliding_window"), ["full_attention"]
    plain = set(kinds) == {"full_attention"} and not any(getattr(config, n, 0) for n in other)
    layers = getattr(decoder, "layers", [0])
    return plain and hasattr(decoder, "rotary_emb") and all(hasattr(x, "self_attn") for x in layers)


def parts(ends: Tensor, rest_ends: Tensor, sizes: Tensor) -> Any:
    """Which rows of queries see which keys (ends of both, the longest, causally or all): stretches
    themselves, and rests their prompts; and where rests and prompts lie."""
    prompts, rests, longest = sizes.tolist()
    own = (ends, ends, longest, True)
    asked = (rest_ends, ends[: len(rest_ends)], longest, False)
    return own, asked, slice(prompts, prompts + rests), slice(prompts)


@torch.library.custom_op("sharpen::shared_attention", mutates_args=())
def shared_attention(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, rest_ends: Tensor, sizes: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The output (tokens first), and the logarithm of each softmax's normaliser (heads first).
    `ends` are of all stretches, `rest_ends` of each prompt's rests together; `sizes`, on the
    CPU: the tokens of all prompts, of all rests, and an upper bound of those between two ends."""
    own, asked, rests, prompts = parts(ends, rest_ends, sizes)
    out, total_H_T = forward(q, k, v, own, scale)
    out = out.contiguous()  # whatever the kernel likes, the compiler is promised this
    more = forward(q[rests], k[prompts], v[prompts], asked, scale)
    out[rests], total_H_T[:, rests] = merged(out[rests], total_H_T[:, rests], *more)
    return out, total_H_T


@torch.library.custom_op("sharpen::shared_attention_backward", mutates_args=())
def shared_attention_backward(
    grad: Tensor, kept: list[Tensor], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, ends, rest_ends, sizes, out, total_H_T = kept
    own, asked, rests, prompts = parts(ends, rest_ends, sizes)
    whole = backward([grad, q, k, v, out, total_H_T], own, scale)
    given = [grad[rests], q[rests], k[prompts], v[prompts], out[rests], total_H_T[:, rests]]
    dq, dk, dv = (slope.contiguous() for slope in whole)
    more = backward(given, asked, scale)
    for slope, place, added in zip((dq, dk, dv), (rests, prompts, prompts), more, strict=True):
        slope[place] += added
    return dq, dk, dv


def merged(out_a: Tensor, total_a: Tensor, out_b: Tensor, total_b: Tensor) -> tuple[Tensor, Tensor]:
    """One softmax over the keys of both: each one's own, by its share of the normaliser."""
    share_N_H_1 = torch.sigmoid(total_b - total_a).T[..., None]
    out = torch.lerp(out_a.to(share_N_H_1.dtype), out_b.to(share_N_H_1.dtype), share_N_H_1)
    return out.to(out_a.dtype), torch.logaddexp(total_a, total_b)


def forward(q: Tensor, k: Tensor, v: Tensor, rows: Any, scale: float) -> Any:
    *ends, longest, causal = rows
    if q.is_cuda:
        run = torch.ops.aten._flash_attention_forward
        return run(q, k, v, *ends, longest, longest, 0.0, causal, False, scale=scale)[:2]
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, total_N_H = by_runs(run, ((q, 0), (k, 1), (v, 1)), rows, scale)
    return out, total_N_H.T.contiguous()


def backward(given: list[Tensor], rows: Any, scale: float) -> Any:
    """This part's slopes by queries, keys and values, from output and normaliser of the whole."""
    grad, q, k, v, out, total_H_N = given
    *ends, longest, causal = rows
    if q.is_cuda:
        chance = torch.zeros(2, dtype=torch.uint64, device=q.device)  # there is no dropout
        run, more = torch.ops.aten._flash_attention_backward, (longest, longest, 0.0, causal)
        given = [grad.contiguous(), q, k, v, out, total_H_N.contiguous()]
        return run(*given, *ends, *more, chance, chance, scale=scale)
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    lines = ((grad, 0), (q, 0), (k, 1), (v, 1), (out, 0), (total_H_N.T, 0))
    dq, dk, dv = by_runs(run, lines, rows, scale)
    return dq, *(x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))


def by_runs(run: Any, lines: Any, rows: Any, scale: float) -> list[Tensor]:
    """A CPU's kernel takes rows of one length: one call for neighbours that are alike. Each line
    comes with whose ends it has: 0 the queries', 1 the keys'."""
    *ends, _, causal = rows
    pairs = zip(*(end.diff().tolist() for end in ends), strict=True)
    alike = [(len(list(same)), pair) for pair, same in groupby(pairs)]
    cut = [line.split([count * pair[side] for count, pair in alike]) for line, side in lines]
    found = []
    for (count, _), *taken in zip(alike, *cut, strict=True):
        stacks = [x.unflatten(0, (count, -1)).transpose(1, 2) for x in taken]  # heads first
        found.append(run(*stacks, 0.0, causal, scale=scale))
    kinds = zip(*found, strict=True)
    return [torch.cat([x.transpose(1, 2).flatten(0, 1) for x in kind]) for kind in kinds]


@shared_attention.register_fake
def _(q: Tensor, *_: Any) -> Any:
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@shared_attention_backward.register_fake
def _(grad: Tensor, kept: Any, scale: float) -> Any:
    return tuple(x.new_empty(x.shape) for x in kept[:3])


def keep(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def slopes(ctx: Any, grad: Tensor, _: Any) -> Any:
    found = shared_attention_backward(grad, list(ctx.saved_tensors), ctx.scale)
    return *found, None, None, None, None


shared_attention.register_autograd(slopes, setup_context=keep)
