"""How an optimizer step is computed. Every training method has these settings."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sharpen.config import Config


class LearnerConfig(Config):
    """Optimizer, learning rate, micro-batches, memory and processes."""

    learning_rate: float = Field(2e-5, gt=0, description="Peak learning rate.")
    lr_scheduler: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="Learning-rate schedule after the warm-up."
    )
    warmup_ratio: float = Field(
        0.1, ge=0, le=1, description="Share of the steps over which the learning rate rises."
    )
    weight_decay: float = Field(
        0.0, ge=0, description="Weight decay of matrices; vectors do not decay."
    )
    optimizer: Literal["adamw", "adamw_8bit"] = Field(
        "adamw", description="Optimizer; adamw_8bit needs a GPU and sharpen[gpu]."
    )
    adam_betas: tuple[float, float] = Field((0.9, 0.999), description="Beta 1 and 2 of AdamW.")
    lora_plus_ratio: float = Field(
        1.0, gt=0, description="Learning-rate multiplier for the B matrices (LoRA+)."
    )
    clip_norm: float = Field(1.0, gt=0, description="Largest norm of a step's gradient.")
    token_budget: int = Field(
        8192, ge=1, description="Micro-batch size in tokens, padding included."
    )
    packing: Literal["auto", "off"] = Field(
        "auto", description="Row packing: rows end to end on a GPU, or always padded (off)."
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute layers in the backward pass: less memory, more time."
    )
    gradient_checkpointing_every: int = Field(
        1, ge=1, description="Recompute only every n-th layer."
    )
    compile: bool = Field(
        False, description="Compiled layers: a minute at the start, faster steps on a GPU."
    )
    activation_share: float = Field(
        1.0, gt=0, le=1, description="Share of their activations that compiled layers may keep."
    )
    parallel: Literal["auto", "ddp", "fsdp2", "zero2", "zero3"] = Field(
        "auto", description="How several processes share the work; auto means ddp."
    )
    seed: int = Field(0, description="Seed of the row order, dropout and new weights.")
