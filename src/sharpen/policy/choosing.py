"""From logits to tokens, as pure functions: each row by its own temperature, nucleus and seed."""

from __future__ import annotations

import torch


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
    scaled_B_V = logits_B_V.float() / torch.where(greedy_B, 1.0, temperature_B)[:, None]
    logprobs_B_V = scaled_B_V - torch.logsumexp(scaled_B_V, -1, keepdim=True)
    shares_B_V = logprobs_B_V.exp()
    if top_p_B is not None:
        shares_B_V = nucleus(shares_B_V, top_p_B)
    # the first token at which the sum of shares passes a uniform number; never one without a share
    sums_B_V = shares_B_V.cumsum(-1)
    aim_B = uniform(seed_B, position_B) * sums_B_V[:, -1]
    drawn_B = torch.searchsorted(sums_B_V, aim_B[:, None], right=True).squeeze(-1)
    drawn_B = drawn_B.clamp(max=logits_B_V.shape[-1] - 1)
    tokens_B = torch.where(greedy_B, logits_B_V.argmax(-1), drawn_B)
    return tokens_B, logprobs_B_V.gather(-1, tokens_B[:, None]).squeeze(-1)


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
