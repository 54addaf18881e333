"""What every training run has: a model, an adapter, data, a length and checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sharpen.config import Config
from sharpen.models.load import AdapterConfig, ModelConfig
from sharpen.train.config.learner import LearnerConfig

_Tracker = Literal["tensorboard", "trackio", "wandb"]


class DataConfig(Config):
    """Which rows a run reads and how they become tokens."""

    train_data: str = Field(
        description="Training rows: name of a built set, such as agent_sft:train, or JSONL file."
    )
    dev_data: str = Field(
        "", description="Rows to evaluate on: name of a built set or JSONL file; empty: none."
    )
    template: str = Field(
        "auto", description="Chat template: auto, model (the model's own) or hermes (ours)."
    )
    max_length: int = Field(
        4096, ge=8, description="Longest row in tokens; longer rows are left out, never cut."
    )


class RunConfig(ModelConfig, AdapterConfig, LearnerConfig, DataConfig):
    """The settings that all training methods share."""

    full: bool = Field(False, description="Train every weight instead of an adapter.")
    num_epochs: int = Field(3, ge=1, description="Number of passes over the data.")
    max_steps: int = Field(0, ge=0, description="Number of steps to run; 0: as num_epochs gives.")
    save_steps: int = Field(100, ge=1, description="Steps between checkpoints.")
    eval_steps: int = Field(100, ge=1, description="Steps between evaluations.")
    keep_checkpoints: int = Field(2, ge=1, description="Number of checkpoints to keep.")
    report_to: tuple[_Tracker, ...] = Field(
        (), description="Experiment trackers besides metrics.jsonl."
    )


class BatchConfig(Config):
    """The size of a step, for methods that train on a fixed set of rows."""

    batch_size: int = Field(4, ge=1, description="Rows per batch.")
    gradient_accumulation: int = Field(
        8, ge=1, description="Batches per step: a step has batch_size × this many rows."
    )
