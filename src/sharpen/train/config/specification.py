"""The settings of the specification's own trainers, `AgentRLTrainer` and `R1StyleTrainer`.

Both start one of our trainers; its further settings are given in `settings`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AliasChoices, Field

from sharpen.config import Config
from sharpen.train.config.aliases import AliasedConfig

_DPO_SETTINGS = {
    "beta": 0.1,
    "reference_free": False,
    "label_smoothing": 0.0,
    "loss_type": "sigmoid",
}
_PPO_SETTINGS = {
    "kl_coef": 0.02,
    "clip_range": 0.2,
    "vf_coef": 0.5,
    "num_rollouts": 128,
    "chunk_size": 64,
}
_GRPO_SETTINGS = {"group_size": 4, "beta": 0.1, "use_advantage": True}


class RLTrainingConfig(Config):
    """One of three methods, with settings for each of them."""

    algorithm: Literal["dpo", "ppo", "grpo"] = Field("dpo", description="Training method.")
    dpo_config: dict[str, Any] = Field(_DPO_SETTINGS, description="Settings of DPO.")
    ppo_config: dict[str, Any] = Field(_PPO_SETTINGS, description="Settings of PPO.")
    grpo_config: dict[str, Any] = Field(_GRPO_SETTINGS, description="Settings of GRPO.")
    train_data: str = Field(
        "agent_benchmark:train", description="Tasks (or pairs): built set or JSONL file."
    )
    settings: dict[str, Any] = Field(
        default_factory=dict, description="Further settings of the run, such as max_steps."
    )


class R1TrainingConfig(AliasedConfig):
    """GRPO with verifiable rewards, long answers, little KL and a wide clip range."""

    base_model: str = Field(
        "smollm2-135m",
        validation_alias=AliasChoices("base_model", "model_name"),
        description="Model to train.",
    )
    train_data: str = Field(description="Tasks: built set or JSONL file.")
    group_size: int = Field(
        16,
        ge=2,
        validation_alias=AliasChoices("group_size", "num_samples_per_prompt"),
        description="Samples per task.",
    )
    max_tokens: int = Field(
        32_768,
        ge=1,
        validation_alias=AliasChoices("max_tokens", "max_response_length"),
        description="Longest answer in tokens.",
    )
    temperature: float = Field(1.0, gt=0, description="Sampling temperature.")
    beta: float = Field(
        0.001,
        ge=0,
        validation_alias=AliasChoices("beta", "kl_coef"),
        description="Weight of the KL to the reference; 0: none.",
    )
    clip: float = Field(
        10.0,
        gt=0,
        validation_alias=AliasChoices("clip", "clip_ratio"),
        description="How far the probability ratio may leave 1, up or down.",
    )
    reward_type: Literal["verifiable"] = Field("verifiable", description="Kind of reward.")
    format_reward_weight: float = Field(
        0.1, ge=0, le=1, description="Share of the reward for the form of the answer."
    )
    task_type: str = Field("math", description="Kind of tasks that do not name their own.")
    shaping: bool = Field(True, description="Lower the reward of a right answer that looks hacked.")
    prompt: str = Field(
        "{question}\n\nThink step by step between <think> and </think>, then give the final answer "
        "as \\boxed{{answer}}.",
        description="Prompt around each question.",
    )
    settings: dict[str, Any] = Field(
        default_factory=dict, description="Further settings of GRPO, such as max_steps."
    )

    @property
    def model_name(self) -> str:
        """The specification's name of `base_model`."""
        return self.base_model

    @property
    def num_samples_per_prompt(self) -> int:
        """The specification's name of `group_size`."""
        return self.group_size

    @property
    def max_response_length(self) -> int:
        """The specification's name of `max_tokens`."""
        return self.max_tokens

    @property
    def kl_coef(self) -> float:
        """The specification's name of `beta`."""
        return self.beta

    @property
    def clip_ratio(self) -> float:
        """The specification's name of `clip`."""
        return self.clip
