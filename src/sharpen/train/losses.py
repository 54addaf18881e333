"""The mathematics of training, as pure functions of tensors."""

from __future__ import annotations

import math
from typing import Any

import torch

CHUNK = 2048  # logits of so many tokens exist at a time


class SelectedLogprobs(torch.autograd.Function):
    """log p(target) from hidden states, a chunk of logits at a time.

    Only trained positions come in, and neither pass holds more than one chunk of logits: the
    backward pass computes them again, which costs less than keeping them.
    """

    @staticmethod
    def forward(ctx: Any, hidden_N_D, head_V_D, targets_N):  # type: ignore[override]
        logprobs_N = torch.empty(len(targets_N), dtype=torch.float32, device=hidden_N_D.device)
        totals_N = torch.empty_like(logprobs_N)
        for start in range(0, len(targets_N), CHUNK):
            part = slice(start, start + CHUNK)
            logits_n_V = (hidden_N_D[part] @ head_V_D.T).float()
            totals_N[part] = torch.logsumexp(logits_n_V, -1)
            chosen_n = logits_n_V.gather(-1, targets_N[part, None]).squeeze(-1)
            logprobs_N[part] = chosen_n - totals_N[part]
        ctx.save_for_backward(hidden_N_D, head_V_D, targets_N, totals_N)
        return logprobs_N

    @staticmethod
    def backward(ctx: Any, grad_N):  # type: ignore[override]
        hidden_N_D, head_V_D, targets_N, totals_N = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden_N_D)
        grad_head = (
            torch.zeros_like(head_V_D, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        )
        for start in range(0, len(targets_N), CHUNK):
            part = slice(start, start + CHUNK)
            logits_n_V = (hidden_N_D[part] @ head_V_D.T).float()
            # d log p(target) / d logits = onehot(target) - softmax
            slope_n_V = torch.exp(logits_n_V - totals_N[part, None]).mul_(-grad_N[part, None])
            slope_n_V.scatter_add_(-1, targets_N[part, None], grad_N[part, None])
            slope_n_V = slope_n_V.to(hidden_N_D.dtype)
            grad_hidden[part] = slope_n_V @ head_V_D
            if grad_head is not None:
                grad_head += slope_n_V.T @ hidden_N_D[part]
        return grad_hidden, grad_head if grad_head is None else grad_head.to(head_V_D.dtype), None


def selected_logprobs(
    hidden_N_D: torch.Tensor, head_V_D: torch.Tensor, targets_N: torch.Tensor
) -> torch.Tensor:
    return SelectedLogprobs.apply(hidden_N_D, head_V_D, targets_N)  # type: ignore[return-value]


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
