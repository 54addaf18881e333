"""Sharpen: post-training for tool-using LLM agents. Names are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import Any

# module → its public names
_NAMES = {
    "types": "Datum Dialog Message Preference Sampling Score SharpenError StopReason Task ToolCall"
    " ToolSpec Trajectory Turn UnparsedToolCall",
    "train.config.sft": "AgentSFTConfig",
    "train.config.reward_model": "RewardModelConfig",
    "train.config.dpo": "DPOConfig",
    "train.config.grpo": "GRPOConfig",
    "train.config.ppo": "PPOConfig",
    "train.config.specification": "RLTrainingConfig R1TrainingConfig",
    "train.sft": "AgentSFTTrainer AgentLoRATrainer",
    "train.reward_model": "RewardModelTrainer",
    "train.dpo": "DPOTrainer",
    "train.preferences": "generate_preference_pairs",
    "train.grpo": "GRPOTrainer",
    "train.ppo": "PPOTrainer",
    "train.rl": "AgentRLTrainer R1StyleTrainer",
    "rewards.agent": "AgentRewardConfig AgentRewardModel PlanEvaluator ToolVerifier",
    "rewards.calls": "ToolCallEvaluator",
    "rewards.hacking": "RLVRHackingDetector RLVRRewardShaping HackingMonitor",
    "rewards.judge": "Judge JudgeConfig",
    "rewards.learned": "LearnedReward",
    "rewards.trajectory": "AgentTrajectoryRL",
    "rewards.verifiable": "VerifiableRewardCalculator",
    "data.coreset": "CoresetSelector",
    "data.replay": "OnlineContinualLearner",
    "data.sources": "AgentTrainingUsage AgentSFTFormatter AgentDialogProcessor ProcessedDialog",
    "data.generate.samples": "ToolCallDataGenerator ReActDataGenerator mask_functions"
    " preference_pair ReasoningDataGenerator LongContextDataGenerator",
    "evals.abilities": "evaluate_merged",
    "evals.evaluator": "AgentTrainingEvaluator EvaluateOptions",
    "models.load": "ModelConfig LoRAConfig",
    "policy.local": "LocalPolicy",
    "policy.remote": "RemotePolicy",
    "policy.vllm": "VLLMPolicy",
    "render": "Renderer",
    "sandbox": "Sandbox",
    "tools": "tool",
}
_PUBLIC = {name: f"sharpen.{module}" for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'sharpen' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(_PUBLIC)
