"""The settings of training runs. No torch here: recipes are checked before anything heavy is
imported."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from sharpen.config import Config
from sharpen.models.load import LoRAConfig, ModelConfig
from sharpen.rewards.compose import RewardConfig

Tracker = Literal["tensorboard", "trackio", "wandb"]
Focus = Literal["tool_format_understanding", "basic_planning_structure"]


class LearnerConfig(Config):
    """How a step is made."""

    learning_rate: float = Field(2e-5, gt=0)
    lr_scheduler: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_ratio: float = Field(0.1, ge=0, le=1)
    weight_decay: float = Field(0.0, ge=0)
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    adam_betas: tuple[float, float] = (0.9, 0.999)
    lora_plus_ratio: float = Field(1.0, gt=0)  # LoRA+: B learns so many times faster than A
    clip_norm: float = Field(1.0, gt=0)
    token_budget: int = Field(8192, ge=1)  # tokens of a micro-batch, padding included
    packing: Literal["auto", "off"] = "auto"  # rows end to end where the kernel exists: on a GPU
    gradient_checkpointing: bool = False
    checkpoint_every: int = Field(1, ge=1)  # recompute only each n-th layer
    compile: bool = False  # worth its minute of start on a GPU
    activation_share: float = Field(1.0, gt=0, le=1)  # of what compiled layers would keep
    parallel: Literal["auto", "ddp", "fsdp2", "zero2", "zero3"] = "auto"  # of several processes
    seed: int = 0


class WarmupConfig(Config):
    """A first short pass that shows the base model what calls and plans look like."""

    enabled: bool = False
    data_source: str = "agent_sft:train"
    samples: int = Field(1000, ge=1)
    focus: tuple[Focus, ...] = ("tool_format_understanding", "basic_planning_structure")


class RunConfig(ModelConfig, LoRAConfig, LearnerConfig):
    """What every run over a file of rows has."""

    train_data: str
    dev_data: str = ""
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
    report_to: tuple[Tracker, ...] = ()


class AgentSFTConfig(RunConfig):
    """The settings of an SFT run; names and defaults are the specification's."""

    train_data: str = "agent_sft:train"  # several, separated by commas, are rounds of a stream
    task_weights: dict[str, float] = Field(default_factory=dict)
    warmup: WarmupConfig = WarmupConfig()
    use_coreset_selection: bool = False
    coreset_target_size: int = Field(8000, ge=1)
    coreset_strategy: str = "hybrid"
    use_online_continual: bool = False
    continual_buffer_size: int = Field(4096, ge=1)
    continual_replay_ratio: float = Field(0.3, ge=0)
    continual_strategy: str = "reservoir"
    continual_buffer: str = ""  # `replay.json` of an earlier run, to go on from
    metric: str = ""  # file.py:function(model, renderer) → float, higher is better; else dev loss
    patience: int = Field(0, ge=0)  # stop after so many evaluations without a gain; 0: never


class RewardModelConfig(RunConfig):
    """A reward model: of whole answers from preferences, or of each turn from labelled turns."""

    kind: Literal["outcome", "process"] = "outcome"
    learning_rate: float = Field(1e-4, gt=0)
    lora_dropout: float = Field(0.0, ge=0, le=0)  # a step's two passes must see one model
    num_epochs: int = Field(1, ge=1)
    center_rewards_coefficient: float = Field(0.0, ge=0)  # draws a pair's rewards around zero


class DPOConfig(RunConfig):
    """Preference optimisation on pairs, or on tasks that pairs are first sampled from."""

    loss_type: Literal["sigmoid", "hinge", "ipo", "kto", "orpo", "simpo"] = "sigmoid"
    beta: float = Field(0.1, gt=0)
    reference_free: bool = False
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    sft_weight: float = Field(0.0, ge=0)  # of the chosen answers' own likelihood, besides the loss
    gamma: float = Field(0.5, ge=0)  # simpo: how far apart the sides should be
    desirable_weight: float = Field(1.0, ge=0)  # kto
    undesirable_weight: float = Field(1.0, ge=0)
    reference_model: str = ""  # else the policy as it starts
    learning_rate: float = Field(1e-5, gt=0)
    lora_dropout: float = Field(0.0, ge=0, le=0)  # a step's two passes must see one model
    num_epochs: int = Field(1, ge=1)
    metric: str = ""  # file.py:function(model, renderer) → a number or several by name
    # where train_data has tasks
    rounds: int = Field(1, ge=1)  # of sampling and training on what was sampled
    update_reference: bool = False  # each round is held against the policy that it starts with
    tasks_per_round: int = Field(0, ge=0)  # 0: all
    num_samples: int = Field(4, ge=2)
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    max_tokens: int = Field(256, ge=1)
    max_turns: int = Field(8, ge=1)
    reward: str | RewardConfig = "agent"
    env: str = ""  # toolworld or file.py:Class; else one turn

    @property
    def needs_reference(self) -> bool:
        return not self.reference_free and self.loss_type not in ("orpo", "simpo")

    @model_validator(mode="after")
    def parts_fit(self) -> DPOConfig:
        if self.label_smoothing and self.loss_type not in ("sigmoid", "simpo"):
            raise ValueError(f"label_smoothing: {self.loss_type} has none")
        if self.reference_free and self.loss_type == "kto":
            raise ValueError("reference_free: kto is about the distance to a reference")
        if self.reference_model and not self.needs_reference:
            raise ValueError("reference_model: this loss has no reference")
        if self.update_reference and (self.reference_model or not self.needs_reference):
            raise ValueError("update_reference: the reference is not the policy's own start")
        return self
