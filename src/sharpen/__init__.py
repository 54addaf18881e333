"""Sharpen: post-training for tool-using LLM agents.

The public names are imported when they are first used, so that `import sharpen` stays quick.
`from sharpen import *` imports all of them.
"""

from __future__ import annotations

import importlib
from typing import Any

# module → its public names
_NAMES = {
    # nouns, and what every part uses
    "types": (
        "Datum Dialog Message Preference Sampling Score SharpenError StopReason Task ToolCall"
        " ToolSpec Trajectory Turn UnparsedToolCall"
    ),
    "render": "Renderer",
    "sandbox": "Sandbox",
    "tools": "tool",
    # models and policies
    "models.load": "LoRAConfig ModelConfig",
    "policy.local": "LocalPolicy",
    "policy.remote": "RemotePolicy",
    "policy.vllm": "VLLMPolicy",
    # data
    "data.coreset": "CoresetSelector",
    "data.replay": "OnlineContinualLearner",
    "data.generate.samples": "mask_functions preference_pair",
    # rewards
    "rewards.agent": "AgentRewardConfig AgentRewardModel",
    "rewards.calls": "ToolCallEvaluator ToolVerifier",
    "rewards.hacking": "HackingMonitor RLVRHackingDetector RLVRRewardShaping",
    "rewards.judge": "Judge JudgeConfig",
    "rewards.learned": "LearnedReward",
    "rewards.plan_evaluator": "PlanEvaluator",
    "rewards.verifiable": "VerifiableRewardCalculator",
    # training
    "train.config.sft": "AgentSFTConfig",
    "train.config.reward_model": "RewardModelConfig",
    "train.config.dpo": "DPOConfig",
    "train.config.grpo": "GRPOConfig",
    "train.config.ppo": "PPOConfig",
    "train.config.specification": "R1TrainingConfig RLTrainingConfig",
    "train.sft": "AgentSFTTrainer",
    "train.reward_model": "RewardModelTrainer",
    "train.preferences": "generate_preference_pairs",
    "train.dpo": "DPOTrainer",
    "train.grpo": "GRPOTrainer",
    "train.ppo": "PPOTrainer",
    "train.rl": "AgentRLTrainer R1StyleTrainer",
    # evaluation
    "evals.abilities": "evaluate_merged",
    "evals.evaluator": "AgentTrainingEvaluator EvaluateOptions",
    # the specification's names that only translate to ours
    "spec.data": "AgentDialogProcessor AgentSFTFormatter AgentTrainingUsage ProcessedDialog",
    "spec.data_generators": (
        "LongContextDataGenerator ReActDataGenerator ReasoningDataGenerator ToolCallDataGenerator"
    ),
    "spec.merging": "ModelMerger TaskVectorArithmetic merge_domain_experts",
    "spec.rewards": "AgentTrajectoryRL",
    "spec.training": "AgentLoRATrainer",
}
_MODULE_OF = {
    name: f"sharpen.{module}" for module, names in _NAMES.items() for name in names.split()
}

__all__ = list(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'sharpen' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(_MODULE_OF)
