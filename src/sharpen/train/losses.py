"""The mathematics of training, as pure functions of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F

CHUNK = 1 << 28  # largest number of logits in memory at a time
KEPT = 1 << 24  # up to this many logit gradients are kept for the backward pass


class SelectedLogprobs(torch.autograd.Function):
    """log p(target) from hidden states, a chunk of logits at a time.

    Only trained positions come in, and no pass holds more than one chunk of logits. The gradient
    of a token's log-probability by its hidden state does not depend on the loss above, which only
    scales it: it is computed while the logits are in memory, so they are computed once.
    """

    @staticmethod
    def forward(ctx: Any, hidden_N_D, head_V_D, targets_N, compiled):  # type: ignore[override]
        logprobs_of, logprobs_and_residual_of = chunk_functions(compiled)
        logprobs_N = torch.empty(len(targets_N), dtype=torch.float32, device=hidden_N_D.device)
        hidden_needs_grad, head_needs_grad = ctx.needs_input_grad[:2]
        slope_N_D = torch.empty_like(hidden_N_D) if hidden_needs_grad else None
        parts = chunks(len(targets_N), len(head_V_D))
        residual_n_V = None
        for part in parts:
            logits_n_V = hidden_N_D[part] @ head_V_D.T
            if slope_N_D is None:
                logprobs_N[part] = logprobs_of(logits_n_V, targets_N[part])
                continue
            logprobs_N[part], residual_n_V = logprobs_and_residual_of(logits_n_V, targets_N[part])
            torch.mm(residual_n_V, head_V_D, out=slope_N_D[part])
        keep = head_needs_grad and len(parts) == 1 and len(targets_N) * len(head_V_D) <= KEPT
        inputs = (hidden_N_D, head_V_D, targets_N) if head_needs_grad else (None, None, None)
        ctx.save_for_backward(slope_N_D, residual_n_V if keep else None, *inputs)
        ctx.compiled = compiled
        return logprobs_N

    @staticmethod
    def backward(ctx: Any, grad_N):  # type: ignore[override]
        slope_N_D, kept_residual_N_V, hidden_N_D, head_V_D, targets_N = ctx.saved_tensors
        grad_hidden = None
        if slope_N_D is not None:
            grad_hidden = (slope_N_D * grad_N[:, None]).to(slope_N_D.dtype)
        if not ctx.needs_input_grad[1]:
            return grad_hidden, None, None, None
        logprobs_and_residual_of = chunk_functions(ctx.compiled)[1]
        grad_head = torch.zeros_like(head_V_D, dtype=torch.float32)
        for part in chunks(len(targets_N), len(head_V_D)):
            residual_n_V = kept_residual_N_V
            if residual_n_V is None:
                logits_n_V = hidden_N_D[part] @ head_V_D.T
                residual_n_V = logprobs_and_residual_of(logits_n_V, targets_N[part])[1]
            scaled_n_D = (hidden_N_D[part] * grad_N[part, None]).to(hidden_N_D.dtype)
            grad_head += residual_n_V.T @ scaled_n_D
        return grad_hidden, grad_head.to(head_V_D.dtype), None, None


def target_logprobs(logits_n_V: torch.Tensor, targets_n: torch.Tensor) -> torch.Tensor:
    """log p(target), in fp32."""
    logits_n_V = logits_n_V.float()
    targets_n_1 = targets_n[:, None]
    return logits_n_V.gather(-1, targets_n_1).squeeze(-1) - torch.logsumexp(logits_n_V, -1)


def logprobs_and_residual(
    logits_n_V: torch.Tensor, targets_n: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(target), and its gradient by the logits: one-hot(target) − p.

    The subtraction is made in fp32 and only its result is rounded to the logits' type. Rounding p
    first would lose most of a confident token's gradient: 1 − p of p = 0.999 is below what bf16
    can tell from 1.
    """
    dtype = logits_n_V.dtype
    logits_n_V = logits_n_V.float()
    normalizer_n_1 = torch.logsumexp(logits_n_V, -1, keepdim=True)
    targets_n_1 = targets_n[:, None]
    logprobs_n_1 = logits_n_V.gather(-1, targets_n_1) - normalizer_n_1
    residual_n_V = (logits_n_V - normalizer_n_1).exp_().neg_()
    residual_n_V.scatter_(-1, targets_n_1, -torch.expm1(logprobs_n_1))
    return logprobs_n_1.squeeze(-1), residual_n_V.to(dtype)


def chunks(tokens: int, vocabulary: int) -> list[slice]:
    size = max(CHUNK // vocabulary, 256)
    return [slice(start, start + size) for start in range(0, tokens, size)]


@lru_cache(maxsize=2)
def chunk_functions(compiled: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`target_logprobs` and `logprobs_and_residual`, fused by the compiler if asked to."""
    if not compiled:
        return target_logprobs, logprobs_and_residual
    fused_logprobs = torch.compile(target_logprobs, dynamic=True)
    fused_residual = torch.compile(logprobs_and_residual, dynamic=True)
    return fused_logprobs, fused_residual


def selected_logprobs(
    hidden_N_D: torch.Tensor,
    head_V_D: torch.Tensor,
    targets_N: torch.Tensor,
    compiled: bool = False,
) -> torch.Tensor:
    return SelectedLogprobs.apply(hidden_N_D, head_V_D, targets_N, compiled)  # type: ignore[return-value]


def sft_loss(logprobs_N: torch.Tensor, weight_N: torch.Tensor, step_tokens: float) -> torch.Tensor:
    """Mean negative log-likelihood over the step's trained tokens: a micro-batch adds its part of
    the sum."""
    return -(logprobs_N * weight_N).sum() / step_tokens


def learning_rate(step: int, total: int, peak: float, scheduler: str, warmup: int) -> float:
    """The rate of step `step` (from 0): linear warm-up, then constant, linear or cosine to zero."""
    if step < warmup:
        return peak * (step + 1) / warmup
    if scheduler == "constant":
        return peak
    progress = (step - warmup) / max(total - warmup, 1)
    if scheduler == "linear":
        return peak * (1 - progress)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


def reward_loss(values_M_K: Any, labels_M: torch.Tensor, center: float = 0.0) -> tuple[Any, Any]:
    """Mean loss and logits of labelled values; of two values a label, it is of their distance:
    −log σ(chosen − rejected) where the label is 1. `center` draws them around zero."""
    logits_M = values_M_K[:, 0] - values_M_K[:, 1:].sum(1)
    loss = F.binary_cross_entropy_with_logits(logits_M, labels_M)
    return loss + center * values_M_K.sum(1).square().mean(), logits_M


@dataclass(frozen=True, slots=True)
class Surrogate:
    """How far a policy may move on one batch of samples."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    beta: float = 0.0  # weight of the KL to the reference
    ratio: str = "token"  # one a token, or of a row: the "mean" (GSPO) or "sum" (RLOO) of its logs
    truncation: float = 0.0  # upper bound of the correction for the sampler's own arithmetic


def policy_loss(
    logprobs_N: torch.Tensor, weight_N: Any, row_N: Any, columns: dict[str, Any], how: Surrogate
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped surrogate, a weighted sum over tokens, and sums of figures over them.

    Columns: `advantage`; `old`, the log-probabilities before the first update (without them this
    is it); `sampler`, what the sampler said they were; `reference`.
    """
    now_N = logprobs_N.detach()
    old_N = columns.get("old", now_N)
    ratio_N = torch.exp(over_rows(logprobs_N - old_N, row_N, how.ratio))
    clipped_N = ratio_N.clamp(1 - how.clip_low, 1 + how.clip_high)
    advantage_N = columns["advantage"]
    loss_N = -torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)
    sums = {"clip_fraction": (clipped_N * advantage_N < ratio_N * advantage_N).sum()}
    if "sampler" in columns:
        sums["mismatch"] = (old_N - columns["sampler"]).abs().sum()
        if how.truncation:
            loss_N = loss_N * torch.exp(old_N - columns["sampler"]).clamp(max=how.truncation)
    if "reference" in columns:
        away_N = columns["reference"] - logprobs_N
        kl_N = torch.exp(away_N) - away_N - 1  # unbiased, never below zero
        sums["kl"] = kl_N.detach().sum()
        # samples are of the old policy: with the ratio the gradient too is that of the KL
        loss_N = loss_N + how.beta * ratio_N * kl_N
    sums |= {"surprise": -now_N.sum(), "count": torch.ones_like(now_N).sum()}
    return (loss_N * weight_N).sum(), sums


def over_rows(values_N: torch.Tensor, row_N: torch.Tensor, how: str) -> torch.Tensor:
    """Each value replaced by the `sum` or `mean` of its row; or left as it is."""
    if how == "token" or not len(row_N):
        return values_N
    counts_R = torch.bincount(row_N)
    sums_R = torch.zeros(len(counts_R), device=values_N.device).index_add(0, row_N, values_N)
    return (sums_R if how == "sum" else sums_R / counts_R.clamp(min=1))[row_N]


def value_loss(
    values_N: torch.Tensor, weight_N: torch.Tensor, columns: dict[str, Any], clip: float
) -> torch.Tensor:
    """Half the squared distance to the `return`, a weighted sum over tokens; a value that went
    further than `clip` from what it was (`value`) gains nothing by it."""
    old_N, return_N = columns["value"], columns["return"]
    near_N = torch.clamp(values_N, old_N - clip, old_N + clip)
    worse_N = torch.maximum((values_N - return_N).square(), (near_N - return_N).square())
    return 0.5 * (worse_N * weight_N).sum()
