"""The settings of reward model training (`sharpen train reward`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sharpen.train.config.run import BatchConfig, RunConfig


class RewardModelConfig(RunConfig, BatchConfig):
    """A reward model of whole answers, from preferences, or of each turn, from labelled turns.

    There is no dropout: a step runs the model twice, and both passes must see the same model.
    """

    kind: Literal["outcome", "process"] = Field(
        "outcome", description="What is scored: whole answers (outcome) or each turn (process)."
    )
    learning_rate: float = Field(1e-4, gt=0, description="Peak learning rate.")
    num_epochs: int = Field(1, ge=1, description="Number of passes over the data.")
    center_rewards_coefficient: float = Field(
        0.0, ge=0, description="Weight of the loss that centers the rewards of a pair around zero."
    )
