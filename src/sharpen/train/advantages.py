"""How good each sample was: rewards → advantages and token weights, as pure functions of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FLAT = 1e-8  # rewards closer than this are the same
# how the loss of a step's tokens is put together
AGGREGATION = {"grpo": "sequence", "gspo": "sequence", "rloo": "sequence", "dr_grpo": "constant"}
AGGREGATION |= {"dapo": "token", "reinforce++": "token"}


def group_advantages(groups: Sequence[np.ndarray], variant: str = "grpo") -> list[np.ndarray]:
    """Rewards of several samples of each task → how much better each is than its group."""
    centred = [rewards - rewards.mean() for rewards in groups]
    if variant == "dr_grpo":
        return centred
    if variant == "rloo":  # against the mean of the others
        return [values * len(values) / (len(values) - 1) for values in centred]
    if variant == "reinforce++":
        whole = whiten(np.concatenate(centred))
        return np.split(whole, np.cumsum([len(values) for values in centred])[:-1])
    return [values / (values.std(ddof=1) + 1e-4) for values in centred]


def token_weights(
    lengths: Sequence[int] | np.ndarray, variant: str = "grpo", max_tokens: int = 1
) -> list[float]:
    """What each trained token of each sample weighs in an update's loss: the mean over samples of
    their token means (`sequence`), the mean over all tokens (`token`), or the sum over a `constant`
    number of them."""
    count, how = len(lengths), AGGREGATION[variant]
    if not count or how == "sequence":
        return [1 / (length * count) for length in lengths]
    return [1 / (sum(lengths) if how == "token" else count * max_tokens)] * count


def gae(
    rewards: np.ndarray, values: np.ndarray, gamma: float = 1.0, lam: float = 0.95
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns of one episode. `values[t]` is of the state before action t; the
    episode ends behind the last one."""
    later = np.append(values[1:], 0.0)
    errors = rewards + gamma * later - values
    advantages, following = np.zeros(len(errors)), 0.0
    for at in range(len(errors) - 1, -1, -1):
        advantages[at] = following = errors[at] + gamma * lam * following
    return advantages, advantages + values


def whiten(values: np.ndarray, shift: bool = True) -> np.ndarray:
    """Unit variance and, unless `shift` is off, mean zero; equal values become zero (or stay)."""
    spread = values.std()
    scaled = (values - values.mean()) / (spread if spread > FLAT else 1.0)
    return scaled if shift else scaled + values.mean()


def overlong(length: int, max_tokens: int, buffer: int) -> float:
    """DAPO's soft punishment: from 0 at `buffer` tokens below the limit down to -1 at the limit."""
    return -min(max(length - (max_tokens - buffer), 0) / buffer, 1.0) if buffer else 0.0


@dataclass
class KLController:
    """The coefficient of the KL penalty; with a `target` it follows the measured KL."""

    value: float
    target: float = 0.0  # of a whole sample; 0: the coefficient stays
    horizon: float = 10_000.0  # samples

    def update(self, kl: float, samples: int) -> None:
        if self.target:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.value *= 1 + error * samples / self.horizon
