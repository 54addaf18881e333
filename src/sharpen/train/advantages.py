"""How good each sample was: rewards → advantages and token weights, as pure functions of arrays.

Called by the GRPO and PPO trainers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FLAT = 1e-8  # rewards that differ by less than this count as equal
_STD_EPSILON = 1e-4  # added to a group's standard deviation before dividing by it
_MAX_KL_ERROR = 0.2  # the KL controller clips the relative error to ± this
# how the loss of a step's tokens is put together; `token_weights` says what each means
_AGGREGATION = {
    "grpo": "sequence",
    "gspo": "sequence",
    "rloo": "sequence",
    "dr_grpo": "constant",
    "dapo": "token",
    "reinforce++": "token",
}


def group_advantages(groups: Sequence[np.ndarray], variant: str = "grpo") -> list[np.ndarray]:
    """Return how much better each sample is than its group, from the rewards of each group.

    A group is the samples of one task.
    """
    centered = [rewards - rewards.mean() for rewards in groups]
    if variant == "dr_grpo":
        return centered
    if variant == "rloo":
        # the baseline is the mean of the other samples of the group
        return [values * len(values) / (len(values) - 1) for values in centered]
    if variant == "reinforce++":
        # whitened over all groups together
        whitened = whiten(np.concatenate(centered))
        group_ends = np.cumsum([len(values) for values in centered])
        return np.split(whitened, group_ends[:-1])
    return [values / (values.std(ddof=1) + _STD_EPSILON) for values in centered]


def token_weights(
    lengths: Sequence[int] | np.ndarray, variant: str = "grpo", max_tokens: int = 1
) -> list[float]:
    """Return the weight of each trained token in the loss of an update, one number per sample.

    The loss is the mean over samples of their token means (`sequence`), the mean over all tokens
    (`token`), or the sum over tokens divided by the `constant` samples × `max_tokens`.
    """
    samples = len(lengths)
    aggregation = _AGGREGATION[variant]
    if not samples or aggregation == "sequence":
        return [1 / (length * samples) for length in lengths]
    if aggregation == "token":
        return [1 / sum(lengths)] * samples
    return [1 / (samples * max_tokens)] * samples


def gae(
    rewards: np.ndarray, values: np.ndarray, gamma: float = 1.0, lam: float = 0.95
) -> tuple[np.ndarray, np.ndarray]:
    """Return advantages and returns of one episode by generalised advantage estimation.

    `values[t]` is of the state before action t; the episode ends after the last action.
    """
    next_values = np.append(values[1:], 0.0)
    errors = rewards + gamma * next_values - values
    advantages = np.zeros(len(errors))
    next_advantage = 0.0
    for t in reversed(range(len(errors))):
        next_advantage = errors[t] + gamma * lam * next_advantage
        advantages[t] = next_advantage
    return advantages, advantages + values


def whiten(values: np.ndarray, shift: bool = True) -> np.ndarray:
    """Scale to unit variance and shift to mean zero. Without `shift` the mean is kept. Equal values
    are not scaled."""
    std = values.std()
    scale = std if std > FLAT else 1.0
    centered = (values - values.mean()) / scale
    return centered if shift else centered + values.mean()


def overlong_penalty(length: int, max_tokens: int, buffer: int) -> float:
    """Return DAPO's soft length penalty: from 0 at `buffer` tokens below the limit down to −1 at
    the limit; always 0 without a buffer."""
    if not buffer:
        return 0.0
    excess = max(length - (max_tokens - buffer), 0)
    return -min(excess / buffer, 1.0)


@dataclass
class KLController:
    """The coefficient of the KL penalty; with a `target` it follows the measured KL."""

    value: float
    target: float = 0.0  # KL of a whole sample; 0: the coefficient stays
    horizon: float = 10_000.0  # number of samples over which an error is corrected

    def update(self, kl: float, samples: int) -> None:
        """Raise the coefficient if the mean KL of these samples is above the target, lower it if
        it is below."""
        if self.target:
            error = kl / self.target - 1
            error = min(max(error, -_MAX_KL_ERROR), _MAX_KL_ERROR)
            self.value *= 1 + error * samples / self.horizon
