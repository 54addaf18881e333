"""Asks a policy for texts, one per prompt.

`user_tools.py` lets a policy word requests; `ReasoningDataGenerator` and `LongContextDataGenerator`
let one write training rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from sharpen.types import Dialog, Message, Policy, Sampling, Turn


def ask_policy(
    policy: Policy, prompts: Sequence[str], max_tokens: int, temperature: float, seed: int
) -> list[Turn]:
    """Returns the policy's turn after each prompt."""
    dialogs = [Dialog((Message("user", prompt),)) for prompt in prompts]
    return policy.respond(dialogs, Sampling(max_tokens, temperature, seed=seed))
