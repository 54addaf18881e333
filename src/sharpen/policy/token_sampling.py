"""From logits to tokens, as pure functions: each row by its own temperature, nucleus and seed."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

BELOW_ONE = 1 - 2**-23
SMALL = 1024  # a vocabulary that is summed in one go


def choose(
    logits_B_V: torch.Tensor,
    temperature_B: torch.Tensor,
    top_p_B: torch.Tensor | None,
    seed_B: torch.Tensor,
    position_B: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token of each row and its log-probability at the row's temperature; where that is 0, the
    likeliest token and its log-probability at 1."""
    greedy_B = temperature_B == 0
    scaled_B_V = logits_B_V / torch.where(greedy_B, 1.0, temperature_B)[:, None]  # fp32
    best_B, best_at_B = scaled_B_V.max(-1)
    shares_B_V = scaled_B_V.softmax(-1)
    # of all log-sum-exps the one that needs no further pass over the vocabulary
    top_B = shares_B_V.gather(-1, best_at_B[:, None])[:, 0]
    kept_B_V = shares_B_V if top_p_B is None else nucleus(shares_B_V, top_p_B)
    drawn_B = draw(kept_B_V, uniform(seed_B, position_B))
    tokens_B = torch.where(greedy_B, best_at_B, drawn_B)
    chosen_B = scaled_B_V.gather(-1, tokens_B[:, None])[:, 0]
    return tokens_B, chosen_B - best_B + top_B.log()


def draw(weights_B_V: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """The first token at which the sum of weights passes the uniform number's share of it; never
    one without a weight. First which stretch of tokens that is in, then which of its tokens: a sum
    along the whole vocabulary would take longer than all the rest."""
    if weights_B_V.shape[-1] <= SMALL:
        return place(weights_B_V, uniform_B)[0]
    stretch = stretch_of(weights_B_V.shape[-1])
    weights_B_S_T = weights_B_V.unflatten(-1, (-1, stretch))
    at_B, left_B = place(weights_B_S_T.sum(-1), uniform_B)
    inner_B_T = weights_B_S_T.gather(1, at_B[:, None, None].expand(-1, 1, stretch))[:, 0]
    return at_B * stretch + place(inner_B_T, left_B)[0]


def place(weights_B_N: torch.Tensor, uniform_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the running sum passes the uniform number's share, and how far into that one it lies,
    in [0, 1)."""
    sums_B_N = weights_B_N.cumsum(-1)
    aim_B = uniform_B * sums_B_N[:, -1]
    at_B_1 = torch.searchsorted(sums_B_N, aim_B[:, None], right=True)
    at_B_1 = at_B_1.clamp(max=weights_B_N.shape[-1] - 1)
    weight_B = weights_B_N.gather(-1, at_B_1)[:, 0]
    before_B = sums_B_N.gather(-1, at_B_1)[:, 0] - weight_B
    left_B = ((aim_B - before_B) / weight_B).clamp(0, BELOW_ONE)
    return at_B_1[:, 0], left_B


@lru_cache
def stretch_of(count: int) -> int:
    """The divisor next to the root."""
    return next(size for size in range(math.isqrt(count), 0, -1) if count % size == 0)


def likeliest(logits_B_V: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`choose` where every row's temperature is 0."""
    logits_B_V = logits_B_V.float()
    best_B, tokens_B = logits_B_V.max(-1)
    return tokens_B, best_B - torch.logsumexp(logits_B_V, -1)


def nucleus(shares_B_V: torch.Tensor, top_p_B: torch.Tensor) -> torch.Tensor:
    """Shares of the likeliest tokens that together reach `top_p`; the others have none."""
    ordered_B_V, order_B_V = shares_B_V.sort(-1, descending=True)
    before_B_V = ordered_B_V.cumsum(-1) - ordered_B_V
    kept_B_V = torch.where(before_B_V < top_p_B[:, None], ordered_B_V, 0.0)
    return torch.zeros_like(shares_B_V).scatter(-1, order_B_V, kept_B_V)


def uniform(seed_B: torch.Tensor, position_B: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1) that follow from seed and place alone (splitmix64)."""
    x = seed_B * -7046029254386353131 + position_B * -4658895280553007687
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    x = x ^ ((x >> 31) & ((1 << 33) - 1))
    return ((x >> 41) & ((1 << 23) - 1)).float() / (1 << 23)
