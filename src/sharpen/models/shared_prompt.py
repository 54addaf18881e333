"""Attention of rows that begin with the same prompt, which is computed once for all of them.

A line holds all prompts, then what follows each of them (the rests, a prompt's side by side), then
rows that share nothing. A token sees its own stretch of the line up to itself, and in a rest all
of its prompt: two parts, each one call of a flash kernel. Both softmaxes become one by their
normalisers. The slopes need no kernel of their own: a part's probabilities are exp(score - log of
the normaliser), so that a part's backward pass, given the output and normaliser of the whole,
finds that part of the slopes, and they add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Part(NamedTuple):
    """Which queries see which keys: those of one row between two ends, causally or all of them."""

    ends_q: Tensor  # int32
    ends_k: Tensor
    longest: int
    causal: bool
    scale: float


def shares_prompts(decoder: Any) -> bool:
    """Whether a row's place in the line says nothing to the model: it is told each token's position
    and every layer sees all tokens before one."""
    config = decoder.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds and getattr(config, "sliding_window", None) is None:
        kinds = {"full_attention"}
    changed = ("attn_logit_softcapping", "attention_dropout")  # what the kernel does not do
    plain = not any(getattr(config, name, None) for name in changed)
    layers = hasattr(decoder, "rotary_emb") and all(hasattr(x, "self_attn") for x in decoder.layers)
    return kinds == {"full_attention"} and plain and layers


def parts(row_ends: Tensor, rest_ends: Tensor, sizes: Sequence[int], scale: float) -> Any:
    """Queries, keys and their rows: of each stretch with itself, of the rests with their prompts.
    `row_ends` are of all stretches, `rest_ends` of each prompt's rests together; `sizes` are the
    tokens of all prompts, of all rests, and an upper bound of a row's."""
    prompts, rests, longest = sizes
    own = Part(row_ends, row_ends, longest, True, scale)
    asked = Part(rest_ends, row_ends[: len(rest_ends)], longest, False, scale)
    return own, slice(prompts, prompts + rests), slice(prompts), asked


@torch.library.custom_op("sharpen::shared_attention", mutates_args=())
def shared_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_ends: Tensor,
    rest_ends: Tensor,
    sizes: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The output (tokens first), and the logarithm of each softmax's normaliser (heads first)."""
    own, rests, prompts, asked = parts(row_ends, rest_ends, sizes, scale)
    out, total_H_T = forward(q, k, v, own)
    more = forward(q[rests], k[prompts], v[prompts], asked)
    out[rests], total_H_T[:, rests] = merged(out[rests], total_H_T[:, rests], *more)
    return out, total_H_T


@torch.library.custom_op("sharpen::shared_attention_backward", mutates_args=())
def shared_attention_backward(
    grad: Tensor, kept: list[Tensor], sizes: list[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, row_ends, rest_ends, out, total_H_T = kept
    own, rests, prompts, asked = parts(row_ends, rest_ends, sizes, scale)
    dq, dk, dv = backward(grad, (q, k, v), out, total_H_T, own)
    given = (q[rests], k[prompts], v[prompts])
    more = backward(grad[rests], given, out[rests], total_H_T[:, rests].contiguous(), asked)
    for slope, place, added in zip((dq, dk, dv), (rests, prompts, prompts), more, strict=True):
        slope[place] += added
    return dq, dk, dv


def merged(out_a: Tensor, total_a: Tensor, out_b: Tensor, total_b: Tensor) -> tuple[Tensor, Tensor]:
    """One softmax over the keys of both: each one's own, by its share of the normaliser."""
    share_N_H_1 = torch.sigmoid(total_b - total_a).T[..., None]
    out = torch.lerp(out_a.to(share_N_H_1.dtype), out_b.to(share_N_H_1.dtype), share_N_H_1)
    return out.to(out_a.dtype), torch.logaddexp(total_a, total_b)


def forward(q: Tensor, k: Tensor, v: Tensor, part: Part) -> tuple[Tensor, Tensor]:
    if q.is_cuda:
        ends_q, ends_k, longest, causal, scale = part
        found: Any = torch.ops.aten._flash_attention_forward(
            q, k, v, ends_q, ends_k, longest, longest, 0.0, causal, False, scale=scale,
            window_size_left=-1, window_size_right=0 if causal else -1,
        )  # fmt: skip
        return found[0], found[1]
    run, outs, totals = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, [], []
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    for at_q, at_k in runs(part):
        rows = at_q.laid(q), at_k.laid(k), at_k.laid(v)
        out, total = run(*rows, 0.0, part.causal, scale=part.scale)
        outs.append(out.transpose(1, 2).flatten(0, 1))
        totals.append(total.transpose(0, 1).flatten(1))
    return torch.cat(outs), torch.cat(totals, 1)


def backward(grad: Tensor, given: Any, out: Tensor, total: Tensor, part: Part) -> Any:
    """The slopes of this part by queries, keys and values, from output and normaliser of the
    whole."""
    q, k, v = given
    if q.is_cuda:
        ends_q, ends_k, longest, causal, scale = part
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of no dropout
        return torch.ops.aten._flash_attention_backward(
            grad.contiguous(), q, k, v, out, total, ends_q, ends_k, longest, longest, 0.0, causal,
            state, torch.empty(0, device=q.device), scale=scale,
            window_size_left=-1, window_size_right=0 if causal else -1,
        )  # fmt: skip
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    groups, found = q.shape[1] // k.shape[1], []
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    for at_q, at_k in runs(part):
        rows = at_q.laid(q), at_k.laid(k), at_k.laid(v), at_q.laid(out), at_q.laid(total.T)
        found.append(run(at_q.laid(grad), *rows, 0.0, part.causal, scale=part.scale))
    dq, dk, dv = (
        torch.cat([slope.transpose(1, 2).flatten(0, 1) for slope in slopes])
        for slopes in zip(*found, strict=True)
    )
    return dq, *(x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))


class Rows(NamedTuple):
    """Rows of one length that lie side by side."""

    start: int
    count: int
    length: int

    def laid(self, line: Tensor) -> Tensor:
        taken = line[self.start : self.start + self.count * self.length]
        return taken.unflatten(0, (self.count, self.length)).transpose(1, 2)


def runs(part: Part) -> Iterator[tuple[Rows, Rows]]:
    """A CPU's kernel takes rows of one length: queries and keys of neighbours that are alike."""
    lengths = zip(part.ends_q.diff().tolist(), part.ends_k.diff().tolist(), strict=True)
    at_q = at_k = 0
    for (long_q, long_k), same in groupby(lengths):
        count = len(list(same))
        yield Rows(at_q, count, long_q), Rows(at_k, count, long_k)
        at_q, at_k = at_q + count * long_q, at_k + count * long_k


@shared_attention.register_fake
def _(q: Tensor, *_: Any) -> Any:
    return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@shared_attention_backward.register_fake
def _(grad: Tensor, kept: Any, *_: Any) -> Any:
    return tuple(torch.empty_like(x) for x in kept[:3])


def keep(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.sizes, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def slopes(ctx: Any, grad: Tensor, _: Any) -> Any:
    found = shared_attention_backward(grad, list(ctx.saved_tensors), ctx.sizes, ctx.scale)
    return *found, None, None, None, None


shared_attention.register_autograd(slopes, setup_context=keep)
