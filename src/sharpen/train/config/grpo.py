"""The settings of group-relative policy optimization (`sharpen train grpo`)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from sharpen.train.config.rl import RLRunConfig

_DAPO_CLIP_HIGH = 0.28
_DAPO_REFILL_ROUNDS = 3


class GRPOConfig(RLRunConfig):
    """GRPO and its variants; `group_size`, `beta` and `use_advantage` are the specification's."""

    variant: Literal["grpo", "dapo", "dr_grpo", "gspo", "rloo", "reinforce++"] = Field(
        "grpo", description="How advantages and the loss are computed."
    )
    group_size: int = Field(4, ge=2, description="Samples per task.")
    beta: float = Field(0.1, ge=0, description="Weight of the KL to the reference; 0: none.")
    use_advantage: bool = Field(
        True, description="Train on advantages within the group; false: on the reward itself."
    )
    minibatches: int = Field(
        1, ge=1, description="Optimizer steps per pass over the samples of a step."
    )
    # the variant decides what these three are if they are not given
    clip_high: float = Field(
        None,
        gt=0,
        validate_default=True,
        description="How far the probability ratio may rise above 1 (default: clip; dapo: at "
        "least 0.28).",
    )
    refill_rounds: int = Field(
        None,
        ge=0,
        validate_default=True,
        description="Rounds of further tasks in place of groups whose samples are equally good "
        "(default: 0; dapo: 3).",
    )
    overlong_buffer: int = Field(
        None,
        ge=0,
        validate_default=True,
        description="Tokens below max_tokens over which up to 1 is taken off the reward (default: "
        "0; dapo: a fifth of max_tokens).",
    )
    trust_sampler: bool = Field(
        False, description="Use the sampler's log-probabilities as the old ones."
    )
    async_steps: int = Field(
        0, ge=0, description="Steps of samples that may wait; 0: sample and train in turns."
    )
    max_staleness: int = Field(
        2, ge=0, description="Age in steps above which waiting samples are dropped."
    )

    @property
    def updates(self) -> int:
        """Optimizer steps per step of the run."""
        return self.updates_per_step * self.minibatches

    @field_validator("clip_high", "refill_rounds", "overlong_buffer", mode="before")
    @classmethod
    def _fill_in_variant_default(cls, value: Any, info: ValidationInfo) -> Any:
        """Returns the variant's default of a setting that is not given.

        `info.data` holds the settings above, without those that are wrong: these are reported
        anyway, so any number does in their place.
        """
        if value is not None:
            return value
        is_dapo = info.data.get("variant") == "dapo"
        if info.field_name == "clip_high":
            clip = info.data.get("clip", cls.model_fields["clip"].default)
            return max(_DAPO_CLIP_HIGH, clip) if is_dapo else clip
        if info.field_name == "refill_rounds":
            return _DAPO_REFILL_ROUNDS if is_dapo else 0
        return info.data.get("max_tokens", 0) // 5 if is_dapo else 0

    @model_validator(mode="after")
    def _check_combinations(self) -> GRPOConfig:
        """Refuse settings that contradict each other."""
        if self.self_play and self.async_steps:
            raise ValueError("async_steps: in self_play, sampling and steps take turns")
        if self.importance_cap and (self.async_steps or self.trust_sampler):
            raise ValueError("importance_cap: the old log-probabilities are the sampler's already")
        return self
