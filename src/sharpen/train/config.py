"""The settings of training runs. No torch here: recipes are checked before anything heavy is
imported."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sharpen.config import Config
from sharpen.models.load import LoRAConfig, ModelConfig


class LearnerConfig(Config):
    """How a step is made."""

    learning_rate: float = Field(2e-5, gt=0)
    lr_scheduler: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_ratio: float = Field(0.1, ge=0, le=1)
    weight_decay: float = Field(0.0, ge=0)
    adam_betas: tuple[float, float] = (0.9, 0.999)
    clip_norm: float = Field(1.0, gt=0)
    token_budget: int = Field(8192, ge=1)  # padded tokens of a micro-batch
    packing: Literal["auto", "off"] = "auto"  # rows end to end where the kernel exists: on a GPU
    gradient_checkpointing: bool = False
    checkpoint_every: int = Field(1, ge=1)  # recompute only each n-th layer
    compile: bool = False  # worth its minute of start on a GPU
    activation_share: float = Field(1.0, gt=0, le=1)  # of what compiled layers would keep
    seed: int = 0


class AgentSFTConfig(ModelConfig, LoRAConfig, LearnerConfig):
    """The settings of an SFT run; names and defaults are the specification's."""

    train_data: str = "agent_sft:train"
    dev_data: str = ""
    task_weights: dict[str, float] = Field(default_factory=dict)
    base_model: str = "smollm2-135m"
    template: str = "auto"
    max_length: int = Field(4096, ge=8)
    full: bool = False  # train every weight instead of an adapter
    num_epochs: int = Field(3, ge=1)
    max_steps: int = Field(0, ge=0)  # 0: as many as the epochs give
    batch_size: int = Field(4, ge=1)
    gradient_accumulation: int = Field(8, ge=1)
    save_steps: int = Field(100, ge=1)
    eval_steps: int = Field(100, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    patience: int = Field(0, ge=0)  # stop after so many dev evaluations without a gain; 0: never
