"""The training methods by name: where the settings and the trainer of each one are.

`sharpen train` and the stages of recipes look methods up here. Modules are imported on first use,
so that settings can be checked without loading torch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from sharpen.train.config.run import RunConfig


@dataclass(frozen=True, slots=True)
class Method:
    """One way of training: its settings, its trainer, and a line for the help page."""

    config_module: str
    config_name: str
    trainer_module: str
    trainer_name: str
    about: str

    def load_config_class(self) -> type[RunConfig]:
        """Returns the class of the method's settings."""
        return getattr(importlib.import_module(self.config_module), self.config_name)

    def load_trainer_class(self) -> Any:
        """Returns the class `Trainer(config, output)`; its `train()` returns the last figures."""
        return getattr(importlib.import_module(self.trainer_module), self.trainer_name)


METHODS = {
    "sft": Method(
        "sharpen.train.config.sft",
        "AgentSFTConfig",
        "sharpen.train.sft",
        "AgentSFTTrainer",
        "Fine-tune on dialogs.",
    ),
    "reward": Method(
        "sharpen.train.config.reward_model",
        "RewardModelConfig",
        "sharpen.train.reward_model",
        "RewardModelTrainer",
        "Train a reward model on preferences.",
    ),
    "dpo": Method(
        "sharpen.train.config.dpo",
        "DPOConfig",
        "sharpen.train.dpo",
        "DPOTrainer",
        "Optimize on preferences, or on tasks that preferences are sampled from.",
    ),
    "grpo": Method(
        "sharpen.train.config.grpo",
        "GRPOConfig",
        "sharpen.train.grpo",
        "GRPOTrainer",
        "Reinforcement learning with groups of samples per task.",
    ),
    "ppo": Method(
        "sharpen.train.config.ppo",
        "PPOConfig",
        "sharpen.train.ppo",
        "PPOTrainer",
        "Reinforcement learning with a critic.",
    ),
}
