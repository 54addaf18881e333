"""The losses of preference optimisation, chosen by name in `LOSSES`; called by the DPO trainer.

Every loss is a pure function of P pairs and returns the mean over the pairs. Column 0 of each
argument is the chosen side, column 1 the rejected side:

- `ratio_P_K`: the sum over an answer's tokens of log p(policy) − log p(reference), or of
  log p(policy) alone for a loss without a reference;
- `lengths_P_K`: the answers' numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from sharpen.train.config.dpo import DPOConfig

_REFERENCE_FREE = ("orpo", "simpo")


def sigmoid(ratio_P_K: Tensor, lengths_P_K: Tensor, config: DPOConfig) -> Tensor:
    """DPO; with label smoothing its conservative form, for labels that are sometimes wrong."""
    return _cross_entropy(config.beta * _margin(ratio_P_K), config.label_smoothing)


def hinge(ratio_P_K: Tensor, lengths_P_K: Tensor, config: DPOConfig) -> Tensor:
    """SLiC's hinge loss: no gradient once the scaled margin is above 1."""
    return F.relu(1 - config.beta * _margin(ratio_P_K)).mean()


def ipo(ratio_P_K: Tensor, lengths_P_K: Tensor, config: DPOConfig) -> Tensor:
    """IPO: the margin of the means over tokens is drawn to the fixed target 1 / (2β), so a pair is
    not pushed further apart for ever."""
    target = 1 / (2 * config.beta)
    return (_margin(ratio_P_K / lengths_P_K) - target).square().mean()


def kto(ratio_P_K: Tensor, lengths_P_K: Tensor, config: DPOConfig) -> Tensor:
    """KTO: each side on its own, against a baseline of how far the policy has moved as a whole.

    Columns 2 and 3 hold answers to other prompts, which give the baseline; it has no gradient.
    """
    baseline = ratio_P_K[:, 2:].mean().clamp(min=0).detach()
    chosen_P, rejected_P = (config.beta * (ratio_P_K[:, :2] - baseline)).unbind(1)
    chosen_loss_P = config.desirable_weight * torch.sigmoid(-chosen_P)
    rejected_loss_P = config.undesirable_weight * torch.sigmoid(rejected_P)
    return (chosen_loss_P + rejected_loss_P).mean() / 2


def orpo(ratio_P_K: Tensor, lengths_P_K: Tensor, config: DPOConfig) -> Tensor:
    """ORPO: the chosen answers' negative log-likelihood, plus the log-odds ratio of the two sides,
    per token."""
    mean_P_K = (ratio_P_K / lengths_P_K).clamp(max=-1e-7)  # the odds of certainty are infinite
    log_odds_P_K = mean_P_K - torch.log(-torch.expm1(mean_P_K))
    odds_loss = config.beta * _cross_entropy(_margin(log_odds_P_K))
    return odds_loss + sft(ratio_P_K, lengths_P_K)


def simpo(ratio_P_K: Tensor, lengths_P_K: Tensor, config: DPOConfig) -> Tensor:
    """SimPO: the means over tokens are to be a margin of `gamma` apart."""
    logits_P = config.beta * _margin(ratio_P_K / lengths_P_K) - config.gamma
    return _cross_entropy(logits_P, config.label_smoothing)


LOSSES: dict[str, Callable[[Tensor, Tensor, DPOConfig], Tensor]] = {
    "sigmoid": sigmoid,
    "hinge": hinge,
    "ipo": ipo,
    "kto": kto,
    "orpo": orpo,
    "simpo": simpo,
}


def rewards(ratio_P_K: Tensor, lengths_P_K: Tensor, config: DPOConfig) -> Tensor:
    """Return each side's implicit reward: β · ratio, divided by the length for a loss without a
    reference."""
    if config.loss_type in _REFERENCE_FREE:
        ratio_P_K = ratio_P_K / lengths_P_K
    return config.beta * ratio_P_K


def sft(logps_P_K: Tensor, lengths_P_K: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of the chosen answers' tokens. Added to a preference
    loss, it keeps the chosen side from becoming less likely along with the rejected one."""
    return -logps_P_K[:, 0].sum() / lengths_P_K[:, 0].sum()


def _margin(score_P_K: Tensor) -> Tensor:
    """Return chosen − rejected."""
    return score_P_K[:, 0] - score_P_K[:, 1]


def _cross_entropy(logits_P: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the mean of −(1 − s) log σ(x) − s log σ(−x), using log σ(−x) = log σ(x) − x."""
    return (smoothing * logits_P - F.logsigmoid(logits_P)).mean()
