"""The settings of supervised fine-tuning (`sharpen train sft`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sharpen.config import Config
from sharpen.models.load import LoRAConfig
from sharpen.train.config.run import BatchConfig, RunConfig

_Focus = Literal["tool_format_understanding", "basic_planning_structure"]


class WarmupConfig(Config):
    """A first short pass that shows the base model what calls and plans look like."""

    enabled: bool = Field(False, description="Begin with a warm-up pass.")
    data_source: str = Field("agent_sft:train", description="Where the warm-up rows come from.")
    samples: int = Field(1000, ge=1, description="Number of warm-up rows.")
    focus: tuple[_Focus, ...] = Field(
        ("tool_format_understanding", "basic_planning_structure"),
        description="Abilities to show: selection and retrieval of tools, or plans.",
    )


class AgentSFTConfig(RunConfig, LoRAConfig, BatchConfig):
    """Supervised fine-tuning; names and defaults are the specification's."""

    train_data: str = Field(
        "agent_sft:train",
        description="Training rows: name of a built set or JSONL file; several, separated by "
        "commas, are rounds of a stream.",
    )
    task_weights: dict[str, float] = Field(
        default_factory=dict, description="Share of each task type in a step, by type."
    )
    warmup: WarmupConfig = Field(WarmupConfig(), description="Warm-up pass before the training.")
    use_coreset_selection: bool = Field(False, description="Train on a selected part of the rows.")
    coreset_target_size: int = Field(8000, ge=1, description="Number of rows to select.")
    coreset_strategy: str = Field("hybrid", description="How rows are selected (docs/training.md).")
    use_online_continual: bool = Field(
        False, description="Train round by round and mix rows of earlier rounds in."
    )
    continual_buffer_size: int = Field(4096, ge=1, description="Rows kept for later rounds.")
    continual_replay_ratio: float = Field(
        0.3, ge=0, description="Rows of earlier rounds per row of the current round."
    )
    continual_strategy: str = Field(
        "reservoir",
        description="Which rows are kept: reservoir, loss_weighted or class_balanced.",
    )
    continual_buffer: str = Field(
        "", description="replay.json of an earlier run to continue from; empty: none."
    )
    metric: str = Field(
        "",
        description="file.py:function(context) to select the best weights by, higher is "
        "better; empty: dev loss.",
    )
    patience: int = Field(
        0, ge=0, description="Evaluations without improvement before the run stops; 0: never stop."
    )
