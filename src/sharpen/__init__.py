"""Sharpen: post-training for tool-using LLM agents. Names are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import Any

# public name → the module that has it
_PUBLIC = {
    **dict.fromkeys(
        (
            "Datum", "Dialog", "Message", "Preference", "Sampling", "Score", "SharpenError",
            "StopReason", "Task", "ToolCall", "ToolSpec", "Trajectory", "Turn", "UnparsedToolCall",
        ),
        "sharpen.types",
    ),
    "AgentSFTConfig": "sharpen.train.config",
    "AgentSFTTrainer": "sharpen.train.sft",
    "AgentLoRATrainer": "sharpen.train.sft",
    "RewardModelConfig": "sharpen.train.config",
    "RewardModelTrainer": "sharpen.train.reward_model",
    "DPOConfig": "sharpen.train.config",
    "DPOTrainer": "sharpen.train.dpo",
    "generate_preference_pairs": "sharpen.train.preferences",
    "GRPOConfig": "sharpen.train.config",
    "GRPOTrainer": "sharpen.train.grpo",
    "PPOConfig": "sharpen.train.config",
    "PPOTrainer": "sharpen.train.ppo",
    "RLTrainingConfig": "sharpen.train.config",
    "R1TrainingConfig": "sharpen.train.config",
    "AgentRLTrainer": "sharpen.train.rl",
    "R1StyleTrainer": "sharpen.train.rl",
    "LearnedReward": "sharpen.rewards.learned",
    "CoresetSelector": "sharpen.data.coreset",
    "OnlineContinualLearner": "sharpen.data.replay",
    "tool": "sharpen.tools",
    "Sandbox": "sharpen.sandbox",
    "VerifiableRewardCalculator": "sharpen.rewards.verifiable",
    **dict.fromkeys(
        ("AgentRewardConfig", "AgentRewardModel", "PlanEvaluator", "ToolVerifier"),
        "sharpen.rewards.agent",
    ),
    "ToolCallEvaluator": "sharpen.rewards.calls",
    "AgentTrajectoryRL": "sharpen.rewards.trajectory",
    "Renderer": "sharpen.render",
    "LocalPolicy": "sharpen.policy.local",
    "RemotePolicy": "sharpen.policy.remote",
    "VLLMPolicy": "sharpen.policy.vllm",
    **dict.fromkeys(("Judge", "JudgeConfig"), "sharpen.rewards.judge"),
    **dict.fromkeys(
        ("RLVRHackingDetector", "RLVRRewardShaping", "HackingMonitor"), "sharpen.rewards.hacking"
    ),
    **dict.fromkeys(("AgentTrainingEvaluator", "EvaluateOptions"), "sharpen.evals.evaluator"),
    "evaluate_merged": "sharpen.evals.abilities",
    "ModelConfig": "sharpen.models.load",
    "LoRAConfig": "sharpen.models.load",
    **dict.fromkeys(
        ("AgentTrainingUsage", "AgentSFTFormatter", "AgentDialogProcessor", "ProcessedDialog"),
        "sharpen.data.sources",
    ),
    **dict.fromkeys(
        ("ToolCallDataGenerator", "ReActDataGenerator", "mask_functions", "preference_pair"),
        "sharpen.data.generate.samples",
    ),
    "ReasoningDataGenerator": "sharpen.data.generate.samples",
    "LongContextDataGenerator": "sharpen.data.generate.samples",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'sharpen' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(_PUBLIC)
