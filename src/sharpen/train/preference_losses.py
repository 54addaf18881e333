"""The losses of preference optimisation, as pure functions of each side's log-probabilities.

`ratio_P_K` holds, for P pairs, the sum over an answer's tokens of log p(policy) - log p(reference)
or of log p(policy) alone where no reference is asked, first of the chosen side, then of the
rejected. `lengths_P_K` are their numbers of tokens. What comes back is the mean over the pairs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from sharpen.train.config.dpo import DPOConfig

Tensor = torch.Tensor


def sigmoid(ratio_P_K: Tensor, lengths_P_K: Tensor, how: DPOConfig) -> Tensor:
    """DPO; with label smoothing its conservative form, for labels that are wrong now and then."""
    return cross_entropy(how.beta * gap(ratio_P_K), how.label_smoothing)


def hinge(ratio_P_K: Tensor, lengths_P_K: Tensor, how: DPOConfig) -> Tensor:
    return F.relu(1 - how.beta * gap(ratio_P_K)).mean()


def ipo(ratio_P_K: Tensor, lengths_P_K: Tensor, how: DPOConfig) -> Tensor:
    """The distance of means over tokens to a fixed one, so that a pair is never pushed on for
    ever."""
    return (gap(ratio_P_K / lengths_P_K) - 1 / (2 * how.beta)).square().mean()


def kto(ratio_P_K: Tensor, lengths_P_K: Tensor, how: DPOConfig) -> Tensor:
    """Each side on its own against how far the policy has moved on the whole, which columns 2 and 3
    tell: answers to other prompts, through which no gradient goes."""
    moved = ratio_P_K[:, 2:].mean().clamp(min=0).detach()
    chosen_P, rejected_P = (how.beta * (ratio_P_K[:, :2] - moved)).unbind(1)
    wanted, unwanted = how.desirable_weight, how.undesirable_weight
    return (wanted * torch.sigmoid(-chosen_P) + unwanted * torch.sigmoid(rejected_P)).mean() / 2


def orpo(ratio_P_K: Tensor, lengths_P_K: Tensor, how: DPOConfig) -> Tensor:
    """The chosen answers' negative log-likelihood, and the odds of a token of one side against one
    of the other."""
    mean_P_K = (ratio_P_K / lengths_P_K).clamp(max=-1e-7)  # the odds of certainty are infinite
    odds_P_K = mean_P_K - torch.log(-torch.expm1(mean_P_K))
    return how.beta * cross_entropy(gap(odds_P_K)) + sft(ratio_P_K, lengths_P_K)


def simpo(ratio_P_K: Tensor, lengths_P_K: Tensor, how: DPOConfig) -> Tensor:
    """Means over tokens, `gamma` apart."""
    logits_P = how.beta * gap(ratio_P_K / lengths_P_K) - how.gamma
    return cross_entropy(logits_P, how.label_smoothing)


Loss = Callable[[Tensor, Tensor, DPOConfig], Tensor]
LOSSES: dict[str, Loss] = {f.__name__: f for f in (sigmoid, hinge, ipo, kto, orpo, simpo)}


def rewards(ratio_P_K: Tensor, lengths_P_K: Tensor, how: DPOConfig) -> Tensor:
    """What each side is worth to the policy: β · ratio, a mean over tokens where the loss has no
    reference by design."""
    return how.beta * (ratio_P_K / lengths_P_K if how.loss_type in ("orpo", "simpo") else ratio_P_K)


def sft(logps_P_K: Tensor, lengths_P_K: Tensor) -> Tensor:
    """Mean negative log-likelihood of the chosen answers' tokens. A loss that knows only distances
    may lower both sides."""
    return -logps_P_K[:, 0].sum() / lengths_P_K[:, 0].sum()


def gap(score_P_K: Tensor) -> Tensor:
    return score_P_K[:, 0] - score_P_K[:, 1]


def cross_entropy(logits_P: Tensor, smoothing: float = 0.0) -> Tensor:
    """-(1 - s) log σ(x) - s log σ(-x), since log σ(-x) = log σ(x) - x."""
    return (smoothing * logits_P - F.logsigmoid(logits_P)).mean()
