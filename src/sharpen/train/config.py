"""The settings of training runs. No torch here: recipes are checked before anything heavy is
imported."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from sharpen.config import Config
from sharpen.envs.perturb import Way
from sharpen.models.load import LoRAConfig, ModelConfig
from sharpen.rewards.compose import RewardConfig
from sharpen.types import StopReason

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
    gradient_checkpointing_every: int = Field(1, ge=1)  # recompute only each n-th layer
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
    fresh_adapter: bool = False  # merge an adapter to start from and train a new one
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
    max_turns: int = Field(0, ge=0)  # of an episode; 0: the task kind's limit, with `env` 8
    reward: str | RewardConfig = ""  # by the task's kind: the verifiable or the agent's
    env: str = ""  # a name, or file.py:Class; else the environment of the task's kind

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


class RLConfig(RunConfig):
    """What every method has that samples its own rows. A step takes `tasks_per_step` tasks of
    `train_data` and samples each `group_size` times; `dev_data` are tasks to evaluate on."""

    train_data: str = "agent_benchmark:train"
    reference_model: str = ""  # another model to be held against; else what the run starts from
    fresh_adapter: bool = False  # merge an adapter to start from and train a new one
    rollout_store_mb: int = Field(256, ge=0)  # MiB of stored rollouts; the oldest go first
    env: str = ""  # a name, or file.py:Class; else the environment of the task's kind
    reward: str | RewardConfig = ""  # by the task's kind: the verifiable or the agent's
    reward_workers: int = Field(1, ge=1)  # threads
    max_turns: int = Field(0, ge=0)  # of an episode; 0: the task kind's limit, with `env` 8
    max_tokens: int = Field(256, ge=1)  # of a turn
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    constrained: bool = False  # calls must parse and fit the schema of a tool on offer
    rollout_rows: int = Field(0, ge=0)  # sequences sampled at once; 0: as the device likes
    batch_size: int = Field(1, ge=1, le=1)  # a step is sized by the two settings below
    gradient_accumulation: int = Field(1, ge=1, le=1)
    tasks_per_step: int = Field(16, ge=1)
    group_size: int = Field(4, ge=1)
    updates_per_step: int = Field(1, ge=1)  # passes over a step's samples
    minibatches: int = Field(1, ge=1)  # optimiser steps of a pass
    beta: float = Field(0.0, ge=0)  # weight of the KL to the reference
    clip: float = Field(0.2, gt=0)
    overlong_buffer: int | None = Field(None, ge=0)  # tokens; a fifth of max_tokens in dapo
    excluded_stops: tuple[StopReason, ...] = ()  # samples that ended so are not trained on
    importance_cap: float = Field(0.0, ge=0)  # corrects for the sampler's arithmetic; 0: not
    max_flat_steps: int = Field(10, ge=1)  # steps in a row that teach nothing, then an error
    min_dev_score: float = Field(
        0.9, ge=0, le=1
    )  # tool accuracy on `dev_data` to begin with; 0: any
    monitor: bool = False  # look for reward hacking
    curriculum: bool = False  # tasks by measured pass rate, instead of one after the other
    self_play: float = Field(0.0, ge=0, le=1)  # share of tasks in which the policy proposes tasks
    perturb: tuple[Way, ...] = ()  # of the tools in training tasks
    perturb_share: float = Field(0.5, gt=0, le=1)  # share of tasks that are
    learning_rate: float = Field(1e-5, gt=0)
    lr_scheduler: Literal["cosine", "linear", "constant"] = "constant"
    warmup_ratio: float = Field(0.0, ge=0, le=1)
    lora_dropout: float = Field(0.0, ge=0, le=0)  # sampler and learner must be one model
    num_epochs: int = Field(1, ge=1)
    save_steps: int = Field(20, ge=1)
    eval_steps: int = Field(20, ge=1)

    @property
    def updates(self) -> int:
        """Optimiser steps of a step."""
        return self.updates_per_step * self.minibatches


class GRPOConfig(RLConfig):
    """Group-relative policy optimisation; `group_size`, `beta` and `use_advantage` are the
    specification's."""

    variant: Literal["grpo", "dapo", "dr_grpo", "gspo", "rloo", "reinforce++"] = "grpo"
    group_size: int = Field(4, ge=2)
    beta: float = Field(0.1, ge=0)
    use_advantage: bool = True  # off: the reward itself
    clip_high: float | None = Field(None, gt=0)  # dapo: 0.28, else as `clip`
    refill_rounds: int | None = Field(
        None, ge=0
    )  # rounds of further tasks for flat groups; dapo: 3
    trust_sampler: bool = False  # its log-probabilities are the old ones, not computed again
    async_steps: int = Field(
        0, ge=0
    )  # steps of samples that may wait; 0: sampling and steps take turns
    max_staleness: int = Field(2, ge=0)  # steps; samples of older weights are dropped

    @model_validator(mode="after")
    def plays_here(self) -> GRPOConfig:
        if self.self_play and self.async_steps:
            raise ValueError("async_steps: in self_play, sampling and steps take turns")
        if self.importance_cap and (self.async_steps or self.trust_sampler):
            raise ValueError("importance_cap: the old log-probabilities are the sampler's already")
        return self

    @model_validator(mode="after")
    def by_variant(self) -> GRPOConfig:
        """What a variant brings, where nothing else is given."""
        dapo = self.variant == "dapo"
        usual = {"clip_high": max(0.28, self.clip) if dapo else self.clip}
        usual |= {"refill_rounds": 3 if dapo else 0, "overlong_buffer": self.max_tokens // 5 * dapo}
        for name, value in usual.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        return self


class PPOConfig(RLConfig):
    """PPO with a critic. A step samples `num_rollouts` episodes and goes `updates_per_step` times
    over them in chunks of `chunk_size`; the first five settings are the specification's."""

    kl_coef: float = Field(0.02, ge=0)  # of the KL to the reference, taken off each token's reward
    clip_range: float = Field(0.2, gt=0)
    vf_coef: float = Field(0.5, gt=0)
    num_rollouts: int = Field(128, ge=2)
    chunk_size: int = Field(64, ge=1)
    group_size: int = Field(1, ge=1, le=1)
    beta: float = Field(0.0, ge=0, le=0)  # the KL is in the reward: kl_coef
    updates_per_step: int = Field(2, ge=1)
    kl_target: float = Field(0.0, ge=0)  # of a whole episode: kl_coef follows it; 0: it stays
    kl_horizon: float = Field(10_000.0, gt=0)  # episodes
    gamma: float = Field(1.0, gt=0, le=1)
    lam: float = Field(0.95, ge=0, le=1)
    value_clip: float = Field(0.2, gt=0)
    critic_learning_rate: float = Field(5e-5, gt=0)
    whiten_rewards: bool = False  # scores of a step to unit variance

    @model_validator(mode="after")
    def as_steps(self) -> PPOConfig:
        """The specification's names say what these do elsewhere."""
        chunks = -(-self.num_rollouts // self.chunk_size)
        for own, name, value in (
            ("num_rollouts", "tasks_per_step", self.num_rollouts),
            ("chunk_size", "minibatches", chunks),
            ("clip_range", "clip", self.clip_range),
        ):
            if name in self.model_fields_set and getattr(self, name) != value:
                raise ValueError(f"{name}: is said by {own} here")
            object.__setattr__(self, name, value)
        return self


SPEC_DPO = {"beta": 0.1, "reference_free": False, "label_smoothing": 0.0, "loss_type": "sigmoid"}
SPEC_PPO = {"kl_coef": 0.02, "clip_range": 0.2, "vf_coef": 0.5}
SPEC_PPO |= {"num_rollouts": 128, "chunk_size": 64}
SPEC_GRPO = {"group_size": 4, "beta": 0.1, "use_advantage": True}


class RLTrainingConfig(Config):
    """One of three methods with its own settings; those of all of them are in `settings`."""

    algorithm: Literal["dpo", "ppo", "grpo"] = "dpo"
    dpo_config: dict[str, Any] = SPEC_DPO
    ppo_config: dict[str, Any] = SPEC_PPO
    grpo_config: dict[str, Any] = SPEC_GRPO
    train_data: str = "agent_benchmark:train"
    settings: dict[str, Any] = Field(default_factory=dict)  # of the run, such as max_steps


class R1TrainingConfig(Config):
    """Verifiable rewards, long answers, little KL, a wide clip; other settings of GRPO are in
    `settings`."""

    model_name: str = "smollm2-135m"
    train_data: str
    num_samples_per_prompt: int = Field(16, ge=2)
    max_response_length: int = Field(32_768, ge=1)
    temperature: float = Field(1.0, gt=0)
    kl_coef: float = Field(0.001, ge=0)
    clip_ratio: float = Field(10.0, gt=0)
    reward_type: Literal["verifiable"] = "verifiable"
    format_reward_weight: float = Field(0.1, ge=0, le=1)
    task_type: str = "math"  # of tasks that do not say their kind
    shaping: bool = True  # a right answer that looks hacked is worth less
    prompt: str = (
        "{question}\n\nThink step by step between <think> and </think>, then give the final answer "
        "as \\boxed{{answer}}."
    )
    settings: dict[str, Any] = Field(default_factory=dict)
