"""The mathematics of training, as pure functions of tensors.

The learner computes log-probabilities and learning rates with them, the trainers their losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_CHUNK_LOGITS = 1 << 28  # largest number of logits in memory at a time
_MIN_CHUNK_TOKENS = 256
_MAX_SAVED_RESIDUALS = 1 << 24  # up to this many logit gradients are saved for the backward pass


# Log-probabilities -----------------------------------------------------------------------------


def selected_logprobs(
    hidden_N_D: Tensor, head_V_D: Tensor, targets_N: Tensor, compiled: bool = False
) -> Tensor:
    """Return log p(target) for each hidden state under an output head, in fp32, differentiable by
    both. `compiled` fuses the softmax with torch.compile."""
    return SelectedLogprobs.apply(hidden_N_D, head_V_D, targets_N, compiled)  # type: ignore[return-value]


class SelectedLogprobs(torch.autograd.Function):
    """log p(target) from hidden states, a chunk of logits at a time.

    Only trained positions come in, and no pass holds more than one chunk of logits. The gradient
    of a token's log-probability by its hidden state does not depend on the loss above, which only
    scales it: it is computed while the logits are in memory, so they are computed once.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden_N_D: Tensor, head_V_D: Tensor, targets_N: Tensor, compiled: bool
    ) -> Tensor:
        logprobs_of, logprobs_and_residual_of = _chunk_functions(compiled)
        tokens = len(targets_N)
        vocabulary = len(head_V_D)
        hidden_needs_grad, head_needs_grad = ctx.needs_input_grad[:2]
        logprobs_N = torch.empty(tokens, dtype=torch.float32, device=hidden_N_D.device)
        slope_N_D = torch.empty_like(hidden_N_D) if hidden_needs_grad else None
        residual_n_V = None
        chunks = _chunks(tokens, vocabulary)
        for chunk in chunks:
            logits_n_V = hidden_N_D[chunk] @ head_V_D.T
            if slope_N_D is None:
                logprobs_N[chunk] = logprobs_of(logits_n_V, targets_N[chunk])
                continue
            logprobs_n, residual_n_V = logprobs_and_residual_of(logits_n_V, targets_N[chunk])
            logprobs_N[chunk] = logprobs_n
            torch.mm(residual_n_V, head_V_D, out=slope_N_D[chunk])

        # a small single chunk saves its residual; otherwise the backward pass computes it again
        is_small = len(chunks) == 1 and tokens * vocabulary <= _MAX_SAVED_RESIDUALS
        saved_residual_N_V = residual_n_V if head_needs_grad and is_small else None
        if head_needs_grad:
            ctx.save_for_backward(slope_N_D, saved_residual_N_V, hidden_N_D, head_V_D, targets_N)
        else:
            ctx.save_for_backward(slope_N_D, None, None, None, None)
        ctx.compiled = compiled
        return logprobs_N

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_N: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        slope_N_D, saved_residual_N_V, hidden_N_D, head_V_D, targets_N = ctx.saved_tensors
        grad_hidden_N_D = None
        if slope_N_D is not None:
            grad_hidden_N_D = (slope_N_D * grad_N[:, None]).to(slope_N_D.dtype)
        head_needs_grad = ctx.needs_input_grad[1]
        if not head_needs_grad:
            return grad_hidden_N_D, None, None, None
        _, logprobs_and_residual_of = _chunk_functions(ctx.compiled)
        grad_head_V_D = torch.zeros_like(head_V_D, dtype=torch.float32)
        for chunk in _chunks(len(targets_N), len(head_V_D)):
            residual_n_V = saved_residual_N_V
            if residual_n_V is None:
                logits_n_V = hidden_N_D[chunk] @ head_V_D.T
                _, residual_n_V = logprobs_and_residual_of(logits_n_V, targets_N[chunk])
            scaled_n_D = (hidden_N_D[chunk] * grad_N[chunk, None]).to(hidden_N_D.dtype)
            grad_head_V_D += residual_n_V.T @ scaled_n_D
        return grad_hidden_N_D, grad_head_V_D.to(head_V_D.dtype), None, None


def _target_logprobs(logits_n_V: Tensor, targets_n: Tensor) -> Tensor:
    """Return log p(target), in fp32."""
    logits_n_V = logits_n_V.float()
    targets_n_1 = targets_n[:, None]
    return logits_n_V.gather(-1, targets_n_1).squeeze(-1) - torch.logsumexp(logits_n_V, -1)


def _logprobs_and_residual(logits_n_V: Tensor, targets_n: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p(target), and its gradient by the logits: one-hot(target) − p.

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


def _chunks(tokens: int, vocabulary: int) -> list[slice]:
    """Cut the tokens so that no chunk has more than `MAX_CHUNK_LOGITS` logits."""
    size = max(MAX_CHUNK_LOGITS // vocabulary, _MIN_CHUNK_TOKENS)
    return [slice(start, start + size) for start in range(0, tokens, size)]


@lru_cache(maxsize=2)
def _chunk_functions(compiled: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return `_target_logprobs` and `_logprobs_and_residual`, as they are or compiled."""
    if not compiled:
        return _target_logprobs, _logprobs_and_residual
    compiled_logprobs = torch.compile(_target_logprobs, dynamic=True)
    compiled_residual = torch.compile(_logprobs_and_residual, dynamic=True)
    return compiled_logprobs, compiled_residual


# Supervised training ---------------------------------------------------------------------------


def sft_loss(logprobs_N: Tensor, weight_N: Tensor, step_tokens: float) -> Tensor:
    """Return a micro-batch's part of the mean negative log-likelihood over the `step_tokens`
    trained tokens of the whole step."""
    return -(logprobs_N * weight_N).sum() / step_tokens


def learning_rate(step: int, total: int, peak: float, scheduler: str, warmup: int) -> float:
    """Return the rate of step `step` (from 0) of `total`: linear over `warmup` steps, then
    constant, linear to zero or cosine to zero."""
    if step < warmup:
        return peak * (step + 1) / warmup
    if scheduler == "constant":
        return peak
    progress = (step - warmup) / max(total - warmup, 1)
    if scheduler == "linear":
        return peak * (1 - progress)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


def reward_loss(values_M_K: Tensor, labels_M: Tensor, center: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the mean loss and the logits of M labelled values (K = 1) or pairs of them (K = 2).

    The logit of a pair is chosen − rejected, its label 1: −log σ(chosen − rejected). `center`
    weighs the squared sum of a pair's values, which keeps them around zero.
    """
    logits_M = values_M_K[:, 0] - values_M_K[:, 1:].sum(1)
    loss = F.binary_cross_entropy_with_logits(logits_M, labels_M)
    return loss + center * values_M_K.sum(1).square().mean(), logits_M


# Reinforcement learning ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Surrogate:
    """Settings of `policy_loss`: how far a policy may move on one batch of samples."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    beta: float = 0.0  # weight of the KL to the reference
    # The importance ratio is one per "token", or one per row: of the "mean" (GSPO) or the "sum"
    # (RLOO) of the tokens' log-ratios.
    ratio: str = "token"
    # upper bound of the ratio that corrects for the sampler's own arithmetic; 0: no correction
    truncation: float = 0.0


def policy_loss(
    logprobs_N: Tensor,
    weight_N: Tensor,
    row_N: Tensor,
    columns: dict[str, Tensor],
    settings: Surrogate,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped surrogate loss, a weighted sum over tokens, and sums of figures over them.

    Columns: `advantage`; `old`, the log-probabilities before the first update (by default the
    current ones); `sampler`, those that the sampler reported; `reference`, those of the reference.
    """
    current_N = logprobs_N.detach()
    old_N = columns.get("old", current_N)
    log_ratio_N = reduce_over_rows(logprobs_N - old_N, row_N, settings.ratio)
    ratio_N = torch.exp(log_ratio_N)
    clipped_N = ratio_N.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    advantage_N = columns["advantage"]
    loss_N = -torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)
    is_clipped_N = clipped_N * advantage_N < ratio_N * advantage_N
    sums = {"clip_fraction": is_clipped_N.sum()}
    if "sampler" in columns:
        mismatch_N = old_N - columns["sampler"]
        sums["mismatch"] = mismatch_N.abs().sum()
        if settings.truncation:
            loss_N = loss_N * torch.exp(mismatch_N).clamp(max=settings.truncation)
    if "reference" in columns:
        log_ratio_to_policy_N = columns["reference"] - logprobs_N
        # an unbiased estimate of the KL that is never below zero
        kl_N = torch.exp(log_ratio_to_policy_N) - log_ratio_to_policy_N - 1
        sums["kl"] = kl_N.detach().sum()
        # the samples are from the old policy: with the ratio, the gradient too is that of the KL
        loss_N = loss_N + settings.beta * ratio_N * kl_N
    sums["surprise"] = -current_N.sum()
    sums["count"] = torch.ones_like(current_N).sum()
    return (loss_N * weight_N).sum(), sums


def reduce_over_rows(values_N: Tensor, row_N: Tensor, reduction: str) -> Tensor:
    """Return each value replaced by the `sum` or `mean` of its row; unchanged for `token`."""
    if reduction == "token" or not len(row_N):
        return values_N
    counts_R = torch.bincount(row_N)
    sums_R = torch.zeros(len(counts_R), device=values_N.device).index_add(0, row_N, values_N)
    if reduction == "sum":
        return sums_R[row_N]
    means_R = sums_R / counts_R.clamp(min=1)
    return means_R[row_N]


def value_loss(
    values_N: Tensor, weight_N: Tensor, columns: dict[str, Tensor], clip: float
) -> Tensor:
    """Return half the squared distance of the critic's values to the `return`, a weighted sum over
    tokens. Moving further than `clip` from the old `value` does not lower the loss."""
    old_N = columns["value"]
    return_N = columns["return"]
    clipped_N = torch.clamp(values_N, old_N - clip, old_N + clip)
    error_N = (values_N - return_N).square()
    clipped_error_N = (clipped_N - return_N).square()
    larger_error_N = torch.maximum(error_N, clipped_error_N)
    return 0.5 * (larger_error_N * weight_N).sum()
