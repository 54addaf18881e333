"""Sample tokens from logits; every row has its own temperature, nucleus and seed.

`policy/slots.py` calls these functions at every decoding step. They are pure and never wait for the
GPU, so that a step can be captured as a CUDA graph.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

_BELOW_ONE = 1 - 2**-23  # the largest fp32 number of this spacing that is less than 1
_MAX_DIRECT_SUM = 1024  # vocabularies up to this size are summed in one go

# Constants of the splitmix64 generator, as signed 64-bit integers.
_SEED_FACTOR = -7046029254386353131
_MIX_FACTOR_1 = -4658895280553007687
_MIX_FACTOR_2 = -7723592293110705685


def sample_tokens(
    logits_B_V: torch.Tensor,
    temperature_B: torch.Tensor,
    top_p_B: torch.Tensor | None,
    seed_B: torch.Tensor,
    position_B: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row. Returns the tokens and their log-probabilities.

    Log-probabilities are those at the row's temperature. A row with temperature 0 gets its most
    likely token, with the log-probability at temperature 1.
    """
    greedy_B = temperature_B == 0
    scaled_B_V = logits_B_V / torch.where(greedy_B, 1.0, temperature_B)[:, None]  # fp32
    max_logit_B, argmax_B = scaled_B_V.max(-1)
    probs_B_V = scaled_B_V.softmax(-1)
    weights_B_V = probs_B_V if top_p_B is None else keep_nucleus(probs_B_V, top_p_B)
    drawn_B = _draw_tokens(weights_B_V, uniform(seed_B, position_B))
    tokens_B = torch.where(greedy_B, argmax_B, drawn_B)

    # log p(token) = logit(token) - logsumexp. The softmax already holds the log-sum-exp:
    # log p(argmax) = max_logit - logsumexp, so no further pass over the vocabulary is needed.
    max_prob_B = probs_B_V.gather(-1, argmax_B[:, None])[:, 0]
    token_logit_B = scaled_B_V.gather(-1, tokens_B[:, None])[:, 0]
    return tokens_B, token_logit_B - max_logit_B + max_prob_B.log()


def most_likely_tokens(logits_B_V: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the most likely token of each row and its log-probability.

    Gives what `choose` gives when the temperature of every row is 0.
    """
    logits_B_V = logits_B_V.float()
    max_logit_B, tokens_B = logits_B_V.max(-1)
    return tokens_B, max_logit_B - torch.logsumexp(logits_B_V, -1)


def keep_nucleus(probs_B_V: torch.Tensor, top_p_B: torch.Tensor) -> torch.Tensor:
    """Set all probabilities to 0 but those of the most likely tokens that reach `top_p`."""
    sorted_B_V, order_B_V = probs_B_V.sort(-1, descending=True)
    sum_before_B_V = sorted_B_V.cumsum(-1) - sorted_B_V
    cut_B_V = torch.where(sum_before_B_V < top_p_B[:, None], sorted_B_V, 0.0)
    return torch.zeros_like(probs_B_V).scatter(-1, order_B_V, cut_B_V)


def uniform(seed_B: torch.Tensor, position_B: torch.Tensor) -> torch.Tensor:
    """Returns fp32 numbers in [0, 1) that depend on seed and position alone (splitmix64)."""
    x_B = seed_B * _SEED_FACTOR + position_B * _MIX_FACTOR_1
    x_B = (x_B ^ _unsigned_shift(x_B, 30)) * _MIX_FACTOR_1
    x_B = (x_B ^ _unsigned_shift(x_B, 27)) * _MIX_FACTOR_2
    x_B = x_B ^ _unsigned_shift(x_B, 31)
    return _unsigned_shift(x_B, 41).float() / (1 << 23)


def _unsigned_shift(x_B: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right and fill with zeros; `>>` alone would copy the sign bit."""
    return (x_B >> bits) & ((1 << (64 - bits)) - 1)


def _draw_tokens(weights_B_V: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """Draw one token per row in proportion to the weights; never one of weight 0.

    A large vocabulary is cut into stretches of equal size. First the stretch is drawn, then the
    token in it: a running sum along the whole vocabulary would take longer than everything else.
    """
    vocabulary = weights_B_V.shape[-1]
    if vocabulary <= _MAX_DIRECT_SUM:
        return _invert_cumsum(weights_B_V, uniform_B)[0]
    stretch = _stretch_size(vocabulary)
    weights_B_S_T = weights_B_V.unflatten(-1, (-1, stretch))
    stretch_index_B, rest_B = _invert_cumsum(weights_B_S_T.sum(-1), uniform_B)
    gather_index_B_1_T = stretch_index_B[:, None, None].expand(-1, 1, stretch)
    inner_B_T = weights_B_S_T.gather(1, gather_index_B_1_T)[:, 0]
    return stretch_index_B * stretch + _invert_cumsum(inner_B_T, rest_B)[0]


def _invert_cumsum(
    weights_B_N: torch.Tensor, uniform_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find where the running sum passes `uniform` times the total.

    Returns the index, and how far into that weight the point lies, in [0, 1).
    """
    sums_B_N = weights_B_N.cumsum(-1)
    target_B = uniform_B * sums_B_N[:, -1]
    index_B_1 = torch.searchsorted(sums_B_N, target_B[:, None], right=True)
    index_B_1 = index_B_1.clamp(max=weights_B_N.shape[-1] - 1)
    weight_B = weights_B_N.gather(-1, index_B_1)[:, 0]
    sum_before_B = sums_B_N.gather(-1, index_B_1)[:, 0] - weight_B
    rest_B = ((target_B - sum_before_B) / weight_B).clamp(0, _BELOW_ONE)
    return index_B_1[:, 0], rest_B


@lru_cache
def _stretch_size(count: int) -> int:
    """Returns the largest divisor of `count` that is at most its square root."""
    for size in range(math.isqrt(count), 0, -1):
        if count % size == 0:
            return size
    return 1
