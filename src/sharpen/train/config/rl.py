"""The settings that GRPO and PPO share."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sharpen.envs.perturb import PerturbationKind
from sharpen.train.config.aliases import AliasedConfig
from sharpen.train.config.run import RunConfig
from sharpen.train.config.sampling import SamplingConfig
from sharpen.types import StopReason


class RLRunConfig(RunConfig, SamplingConfig, AliasedConfig):
    """A run that samples its own rows; `train_data` and `dev_data` are tasks.

    There is no dropout, because the sampler and the learner must be the same model, and no batch
    size: a step has `tasks_per_step` tasks.
    """

    # defaults that differ from those of other methods
    train_data: str = Field(
        "agent_benchmark:train",
        description="Training tasks: name of a built set, such as agent_benchmark:train, or JSONL "
        "file.",
    )
    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate.")
    lr_scheduler: Literal["cosine", "linear", "constant"] = Field(
        "constant", description="Learning-rate schedule after the warm-up."
    )
    warmup_ratio: float = Field(
        0.0, ge=0, le=1, description="Share of the steps over which the learning rate rises."
    )
    num_epochs: int = Field(1, ge=1, description="Number of passes over the tasks.")
    save_steps: int = Field(20, ge=1, description="Steps between checkpoints.")
    eval_steps: int = Field(20, ge=1, description="Steps between evaluations.")

    reference_model: str = Field(
        "", description="Reference model of the KL; empty: the policy as it is at the start."
    )
    fresh_adapter: bool = Field(
        False,
        description="Merge an adapter to start from into its base and train a new one, instead of "
        "continuing it.",
    )
    rollout_store_mb: int = Field(
        256,
        ge=0,
        description="Stored rollouts in MiB; the oldest steps are removed first; 0: store none.",
    )
    reward_workers: int = Field(1, ge=1, description="Threads that compute rewards.")
    constrained: bool = Field(
        False, description="Sample only calls that parse and fit the schema of an offered tool."
    )
    rollout_rows: int = Field(
        0, ge=0, description="Sequences sampled at once; 0: chosen for the device."
    )
    tasks_per_step: int = Field(16, ge=1, description="Tasks per step.")
    updates_per_step: int = Field(1, ge=1, description="Passes over the samples of a step.")
    clip: float = Field(
        0.2, gt=0, description="How far the probability ratio may leave 1, up or down."
    )
    excluded_stops: tuple[StopReason, ...] = Field(
        (), description="Stop reasons of samples that are not trained on."
    )
    importance_cap: float = Field(
        0.0,
        ge=0,
        description="Largest weight that corrects for a sampler whose log-probabilities differ "
        "from the learner's; 0: no correction.",
    )
    max_flat_steps: int = Field(
        10,
        ge=1,
        description="Consecutive steps without any difference in reward before the run ends with "
        "an error.",
    )
    min_dev_score: float = Field(
        0.9,
        ge=0,
        le=1,
        description="Tool accuracy on dev_data that a run needs to start; 0: start anyway.",
    )
    monitor: bool = Field(False, description="Look for reward hacking.")
    curriculum: bool = Field(
        False, description="Draw tasks by measured pass rate instead of in a shuffled order."
    )
    self_play: float = Field(
        0.0, ge=0, le=1, description="Share of tasks in which the policy proposes new tasks."
    )
    perturb: tuple[PerturbationKind, ...] = Field(
        (), description="How the tools of training tasks are changed; empty: not at all."
    )
    perturb_share: float = Field(
        0.5, gt=0, le=1, description="Share of training tasks whose tools are changed."
    )
