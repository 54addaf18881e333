"""The settings of proximal policy optimization (`sharpen train ppo`)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import AliasChoices, Field

from sharpen.train.config.rl import RLRunConfig


class PPOConfig(RLRunConfig):
    """PPO with a critic.

    A step samples one episode per task and goes `updates_per_step` times over them in chunks of
    `chunk_size`. The specification calls `tasks_per_step` num_rollouts and `clip` clip_range.
    """

    # not a setting: the critic, not a group of samples, says what to expect of a task
    group_size: ClassVar[int] = 1

    tasks_per_step: int = Field(
        128,
        ge=2,
        validation_alias=AliasChoices("tasks_per_step", "num_rollouts"),
        description="Tasks, and so episodes, per step.",
    )
    chunk_size: int = Field(64, ge=1, description="Episodes per optimizer step.")
    updates_per_step: int = Field(2, ge=1, description="Passes over the episodes of a step.")
    clip: float = Field(
        0.2,
        gt=0,
        validation_alias=AliasChoices("clip", "clip_range"),
        description="How far the probability ratio may leave 1, up or down.",
    )
    overlong_buffer: int = Field(
        0, ge=0, description="Tokens below max_tokens over which up to 1 is taken off the reward."
    )
    kl_coef: float = Field(
        0.02, ge=0, description="Weight of the KL to the reference, taken off each token's reward."
    )
    kl_target: float = Field(
        0.0, ge=0, description="KL of an episode that kl_coef is adapted to; 0: kl_coef is fixed."
    )
    kl_horizon: float = Field(10_000.0, gt=0, description="Episodes over which kl_coef is adapted.")
    gamma: float = Field(1.0, gt=0, le=1, description="Discount per token.")
    lam: float = Field(0.95, ge=0, le=1, description="Lambda of generalized advantage estimation.")
    vf_coef: float = Field(0.5, gt=0, description="Weight of the critic's loss.")
    value_clip: float = Field(
        0.2, gt=0, description="How far the critic's value may move in one step's passes."
    )
    critic_learning_rate: float = Field(5e-5, gt=0, description="Peak learning rate of the critic.")
    whiten_rewards: bool = Field(False, description="Scale the scores of a step to unit variance.")

    @property
    def num_rollouts(self) -> int:
        """The specification's name of `tasks_per_step`."""
        return self.tasks_per_step

    @property
    def clip_range(self) -> float:
        """The specification's name of `clip`."""
        return self.clip

    @property
    def minibatches(self) -> int:
        """Optimizer steps per pass over the episodes of a step."""
        return -(-self.tasks_per_step // self.chunk_size)

    @property
    def updates(self) -> int:
        """Optimizer steps per step of the run."""
        return self.updates_per_step * self.minibatches
