"""The settings of preference optimization (`sharpen train dpo`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from sharpen.train.config.run import BatchConfig, RunConfig
from sharpen.train.config.sampling import SamplingConfig


class DPOConfig(RunConfig, BatchConfig, SamplingConfig):
    """Preference optimization on pairs, or on tasks that pairs are sampled from first.

    There is no dropout: a step runs the model twice, and both passes must see the same model.
    """

    loss_type: Literal["sigmoid", "hinge", "ipo", "kto", "orpo", "simpo"] = Field(
        "sigmoid", description="Loss of a pair; sigmoid is DPO."
    )
    beta: float = Field(0.1, gt=0, description="How strongly the policy is held to the reference.")
    reference_free: bool = Field(False, description="Leave the reference out of the loss.")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="Assumed share of wrong labels (sigmoid and simpo)."
    )
    sft_weight: float = Field(
        0.0, ge=0, description="Weight of the chosen answers' negative log-likelihood."
    )
    gamma: float = Field(0.5, ge=0, description="Target margin between the two answers (simpo).")
    desirable_weight: float = Field(1.0, ge=0, description="Weight of chosen answers (kto).")
    undesirable_weight: float = Field(1.0, ge=0, description="Weight of rejected answers (kto).")
    reference_model: str = Field(
        "", description="Reference model; empty: the policy as it is at the start."
    )
    fresh_adapter: bool = Field(
        False,
        description="Merge an adapter to start from into its base and train a new one, instead of "
        "continuing it.",
    )
    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate.")
    num_epochs: int = Field(1, ge=1, description="Number of passes over the data.")
    metric: str = Field(
        "",
        description="file.py:function(context) to measure at evaluations: a number, or several by "
        "name.",
    )
    rounds: int = Field(
        1, ge=1, description="Rounds of sampling pairs from tasks and training on them."
    )
    update_reference: bool = Field(
        False, description="Use the policy at the start of each round as its reference."
    )
    tasks_per_round: int = Field(
        0, ge=0, description="Tasks that pairs are sampled from in a round; 0: all."
    )
    num_samples: int = Field(4, ge=2, description="Answers sampled per task.")

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the policy with a reference."""
        return not self.reference_free and self.loss_type not in ("orpo", "simpo")

    @model_validator(mode="after")
    def _check_combinations(self) -> DPOConfig:
        """Refuse settings that contradict each other."""
        if self.label_smoothing and self.loss_type not in ("sigmoid", "simpo"):
            raise ValueError(f"label_smoothing: {self.loss_type} has none")
        if self.reference_free and self.loss_type == "kto":
            raise ValueError("reference_free: kto is about the distance to a reference")
        if self.reference_model and not self.needs_reference:
            raise ValueError("reference_model: this loss has no reference")
        if self.update_reference and (self.reference_model or not self.needs_reference):
            raise ValueError("update_reference: the reference is not the policy's own start")
        return self
