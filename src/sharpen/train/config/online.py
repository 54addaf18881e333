"""The config of either online method, for code that GRPO and PPO share."""

from __future__ import annotations

from sharpen.train.config.grpo import GRPOConfig
from sharpen.train.config.ppo import PPOConfig

RLConfig = GRPOConfig | PPOConfig
