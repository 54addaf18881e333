"""How samples are drawn and scored, for the methods that sample their own rows."""

from __future__ import annotations

from pydantic import Field

from sharpen.config import Config
from sharpen.rewards.compose import RewardConfig


class SamplingConfig(Config):
    """Environment, reward and sampling of the policy."""

    env: str = Field(
        "",
        description="Environment: a name or file.py:Class; empty: that of each task's kind.",
    )
    reward: str | RewardConfig = Field(
        "",
        description="Reward: a name, file.py:name or a block; empty: chosen by the task's kind.",
    )
    max_turns: int = Field(
        0, ge=0, description="Longest episode in turns; 0: the limit of each task's kind."
    )
    max_tokens: int = Field(256, ge=1, description="Longest turn in tokens.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature.")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Nucleus sampling: probability mass to sample from."
    )
