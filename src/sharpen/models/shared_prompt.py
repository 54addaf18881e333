"""Attention of rows that begin with the same prompt, which is computed once for all of them.

A line of tokens holds all prompts, then what follows each of them (the *rests*, those of a prompt
side by side), then rows that share nothing. Each of these is a *stretch*. A token sees its own
stretch up to itself, and in a rest also all of its prompt: two parts, each one call of a flash
kernel. The two softmaxes are merged by their normalisers.

The backward pass needs no kernel of its own either. A part's probabilities are
exp(score - log of the normaliser), so that its backward pass, given the output and normaliser of
the whole, returns that part's share of the gradients, and the shares add up.

`attention` calls this; the learner asks `shares_prompts` whether a model allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Suffixes of tensor names: H heads, T tokens of the line, N tokens of one part's queries.


def shares_prompts(decoder: Any) -> bool:
    """Returns whether the model allows rows to share a prompt.

    A row's place in the line must not matter: the model is told each token's position, and every
    layer sees all tokens before one. Logit caps and dropout are beyond the kernels.
    """
    config = decoder.config.get_text_config()
    unsupported = ["attn_logit_softcapping", "attention_dropout"]
    kinds = getattr(config, "layer_types", None)
    if not kinds:  # older configs: one kind of layer, windowed if this is set
        unsupported.append("sliding_window")
        kinds = ["full_attention"]
    if set(kinds) != {"full_attention"}:
        return False
    if any(getattr(config, name, 0) for name in unsupported):
        return False
    # a decoder without a list of layers is one of another build
    layers = getattr(decoder, "layers", [0])
    return hasattr(decoder, "rotary_emb") and all(hasattr(x, "self_attn") for x in layers)


class _Part(NamedTuple):
    """Which rows of queries see which rows of keys, in one kernel call."""

    query_ends: Tensor
    key_ends: Tensor
    longest: int  # upper bound of the tokens between two ends
    causal: bool  # whether a query sees only the keys up to its own place


def _split(ends: Tensor, rest_ends: Tensor, sizes: Tensor) -> tuple[_Part, _Part, slice, slice]:
    """Returns the two parts of the attention, and where the rests and the prompts lie.

    In the first part stretches see themselves, in the second rests see their prompts.
    """
    prompt_tokens, rest_tokens, longest = sizes.tolist()
    own_part = _Part(ends, ends, longest, True)
    prompt_part = _Part(rest_ends, ends[: len(rest_ends)], longest, False)
    rests = slice(prompt_tokens, prompt_tokens + rest_tokens)
    prompts = slice(prompt_tokens)
    return own_part, prompt_part, rests, prompts


@torch.library.custom_op("sharpen::shared_attention", mutates_args=())
def shared_attention(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, rest_ends: Tensor, sizes: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns the output (tokens first), and the log of each softmax's normaliser (heads first).

    `ends` are those of all stretches, `rest_ends` those of each prompt's rests together. `sizes`,
    on the CPU, holds the number of tokens of all prompts, that of all rests, and an upper bound of
    the tokens between two ends.
    """
    own_part, prompt_part, rests, prompts = _split(ends, rest_ends, sizes)
    out, total_H_T = _forward(q, k, v, own_part, scale)
    out = out.contiguous()  # the compiler is promised this, whatever the kernel returns
    prompt_out, prompt_total = _forward(q[rests], k[prompts], v[prompts], prompt_part, scale)
    merged = _merge_softmaxes(out[rests], total_H_T[:, rests], prompt_out, prompt_total)
    out[rests], total_H_T[:, rests] = merged
    return out, total_H_T


@torch.library.custom_op("sharpen::shared_attention_backward", mutates_args=())
def _shared_attention_backward(
    grad: Tensor, saved: list[Tensor], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of queries, keys and values; `saved` is from `_save_for_backward`."""
    q, k, v, ends, rest_ends, sizes, out, total_H_T = saved
    own_part, prompt_part, rests, prompts = _split(ends, rest_ends, sizes)
    own_grads = _backward(grad, q, k, v, out, total_H_T, own_part, scale)
    dq, dk, dv = (own_grad.contiguous() for own_grad in own_grads)
    prompt_grads = _backward(
        grad[rests],
        q[rests],
        k[prompts],
        v[prompts],
        out[rests],
        total_H_T[:, rests],
        prompt_part,
        scale,
    )
    dq[rests] += prompt_grads[0]
    dk[prompts] += prompt_grads[1]
    dv[prompts] += prompt_grads[2]
    return dq, dk, dv


def _merge_softmaxes(
    out_a: Tensor, total_a: Tensor, out_b: Tensor, total_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge two softmaxes over different keys into one over both.

    Each output counts by its share of the normaliser. Returns the output and the log of its
    normaliser.
    """
    share_N_H_1 = torch.sigmoid(total_b - total_a).T[..., None]
    out = torch.lerp(out_a.to(share_N_H_1.dtype), out_b.to(share_N_H_1.dtype), share_N_H_1)
    return out.to(out_a.dtype), torch.logaddexp(total_a, total_b)


def _forward(q: Tensor, k: Tensor, v: Tensor, part: _Part, scale: float) -> Sequence[Tensor]:
    """Returns a part's output and the logs of its normalisers, heads first."""
    query_ends, key_ends, longest, causal = part
    if q.is_cuda:
        flash = torch.ops.aten._flash_attention_forward
        outputs = flash(
            q, k, v, query_ends, key_ends, longest, longest, 0.0, causal, False, scale=scale
        )
        return outputs[:2]
    groups = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(groups, 1)
    v = v.repeat_interleave(groups, 1)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, total_N_H = _call_by_runs(kernel, [q], [k, v], [], part, scale)
    return out, total_N_H.T.contiguous()


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total_H_N: Tensor,
    part: _Part,
    scale: float,
) -> Sequence[Tensor]:
    """Returns this part's gradients of queries, keys and values.

    `out` and `total_H_N` are the output and normalisers of the whole attention, not of the part.
    """
    query_ends, key_ends, longest, causal = part
    if q.is_cuda:
        random_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # there is no dropout
        flash = torch.ops.aten._flash_attention_backward
        return flash(
            grad.contiguous(), q, k, v, out, total_H_N.contiguous(),
            query_ends, key_ends, longest, longest, 0.0, causal,
            random_state, random_state, scale=scale,
        )  # fmt: skip
    groups = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(groups, 1)
    v = v.repeat_interleave(groups, 1)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = _call_by_runs(kernel, [grad, q], [k, v], [out, total_H_N.T], part, scale)
    # the query heads that share a key head add their gradients
    dk = dk.unflatten(1, (-1, groups)).sum(2)
    dv = dv.unflatten(1, (-1, groups)).sum(2)
    return dq, dk, dv


def _call_by_runs(
    kernel: Callable[..., Sequence[Tensor]],
    query_lines: list[Tensor],
    key_lines: list[Tensor],
    more_query_lines: list[Tensor],
    part: _Part,
    scale: float,
) -> list[Tensor]:
    """Call a CPU kernel, which takes rows of one length: once per run of neighbours alike.

    The kernel's tensors come in three groups, in the order of its arguments: lines with a value
    per query token, lines with one per key token, and again lines per query token. Returns the
    kernel's outputs as lines.
    """
    pairs = zip(part.query_ends.diff().tolist(), part.key_ends.diff().tolist(), strict=True)
    runs = [(len(list(same)), pair) for pair, same in groupby(pairs)]
    query_sizes = [count * query_length for count, (query_length, _) in runs]
    key_sizes = [count * key_length for count, (_, key_length) in runs]
    cut_lines = [line.split(query_sizes) for line in query_lines]
    cut_lines += [line.split(key_sizes) for line in key_lines]
    cut_lines += [line.split(query_sizes) for line in more_query_lines]
    outputs_of_runs = []
    for index, (count, _) in enumerate(runs):
        stacks = []
        for pieces in cut_lines:
            stack = pieces[index].unflatten(0, (count, -1))  # [rows, tokens, heads, …]
            stacks.append(stack.transpose(1, 2))
        outputs_of_runs.append(kernel(*stacks, 0.0, part.causal, scale=scale))
    lines = []
    for outputs in zip(*outputs_of_runs, strict=True):
        lines.append(torch.cat([output.transpose(1, 2).flatten(0, 1) for output in outputs]))
    return lines


# The compiler is told shapes and dtypes of the two operations without running them.


@shared_attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@_shared_attention_backward.register_fake
def _(grad: Tensor, saved: list[Tensor], scale: float) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in saved[:3])


def _save_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    """Keep all tensors that went in and came out, and the scale."""
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, grad: Tensor, _: Any) -> Any:
    """Returns one gradient per input; ends, sizes and scale have none."""
    grads = _shared_attention_backward(grad, list(ctx.saved_tensors), ctx.scale)
    return *grads, None, None, None, None


shared_attention.register_autograd(_gradients, setup_context=_save_for_backward)
