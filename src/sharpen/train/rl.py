"""The specification's trainers, composed of the others: `AgentRLTrainer` runs DPO, PPO or GRPO with
one reward model, `R1StyleTrainer` GRPO with rewards that can be verified."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sharpen.config import parse_config
from sharpen.data.sources import read_tasks
from sharpen.models.find import find_model
from sharpen.models.load import ModelConfig, base_of_adapter
from sharpen.policy.local import LocalPolicy
from sharpen.rewards.hacking import RLVRRewardShaping
from sharpen.rewards.verifiable import GOLD_KEYS, VerifiableRewardCalculator
from sharpen.rollout import find_environment
from sharpen.rows import preference_to_row
from sharpen.train.config.grpo import GRPOConfig
from sharpen.train.config.specification import R1TrainingConfig, RLTrainingConfig
from sharpen.train.grpo import GRPOTrainer
from sharpen.train.practice import Evaluate
from sharpen.types import Json, Reward, Sampling, Score, SharpenError, Task, Trajectory

# algorithm → its module, trainer and config
ALGORITHMS = {"dpo": ("dpo", "DPOTrainer", "DPOConfig"), "ppo": ("ppo", "PPOTrainer", "PPOConfig")}
ALGORITHMS["grpo"] = ("grpo", "GRPOTrainer", "GRPOConfig")


class AgentRLTrainer:
    """`AgentRLTrainer(config, base_model_path, sft_model_path, reward_model).train()`. The run
    starts from `sft_model_path`, an adapter of the base or a model of its own; empty: from the
    base. `evaluate(policy, step)` is called every `eval_steps`."""

    def __init__(
        self,
        config: RLTrainingConfig,
        base_model_path: str,
        sft_model_path: str,
        reward_model: Reward,
        output: str | Path = "",
        evaluate: Evaluate | None = None,
    ):
        self.config, self.reward_model, self.evaluate = config, reward_model, evaluate
        self.path = started_from(str(base_model_path), str(sft_model_path))
        module, trainer, settings = ALGORITHMS[config.algorithm]
        found: Any = importlib.import_module(f"sharpen.train.{module}")
        kind = getattr(importlib.import_module(f"sharpen.train.config.{module}"), settings)
        own = getattr(config, f"{config.algorithm}_config")
        given = {"base_model": self.path, "train_data": config.train_data} | config.settings | own
        self.settings = parse_config(kind, given, f"{config.algorithm}_config")
        called = {"metric": self.measured} if config.algorithm == "dpo" else {"evaluate": evaluate}
        output = output or f"runs/{config.algorithm}"
        called = called if evaluate else {}
        self.trainer = getattr(found, trainer)(self.settings, output, reward=reward_model, **called)

    def measured(self, model: Any, renderer: Any) -> Any:
        """The callback as DPO knows it."""
        assert self.evaluate is not None
        return self.evaluate(LocalPolicy(model, renderer), self.trainer.learner.steps_done)

    def train(self) -> dict[str, float]:
        return self.trainer.train()

    def save_model(self, path: str | Path) -> None:
        self.trainer.start.save(self.trainer.learner, path)

    @property
    def model(self) -> Any:
        """The policy; there is none before `train`."""
        learner = getattr(self.trainer, "learner", None)
        return learner.model if learner else None

    def generate_preference_pairs(
        self, prompts: Sequence[str | Task], num_samples: int = 4
    ) -> list[Json]:
        """The best and the worst of several answers to each task, as rows to train DPO on. A text
        stands for the task of `train_data` that says it: without its gold nothing could be
        scored."""
        preferences: Any = importlib.import_module("sharpen.train.preferences")
        known = {}
        if any(isinstance(prompt, str) for prompt in prompts):
            known = {task.instruction: task for task in read_tasks(self.config.train_data)}
        for prompt in prompts:
            if isinstance(prompt, str) and prompt not in known:
                lost = f"no task of {self.config.train_data} says this"
                raise SharpenError(f"{prompt[:60]!r}: {lost}; give a Task with its gold")
        tasks = [known[prompt] if isinstance(prompt, str) else prompt for prompt in prompts]
        settings = self.settings
        if self.model is not None:
            policy = LocalPolicy(self.model, self.trainer.start.renderer)
        else:
            policy = LocalPolicy.load(ModelConfig(base_model=self.path, device=settings.device))
        chance = settings.temperature, settings.top_p, settings.seed
        sampling = Sampling(settings.max_tokens, *chance)
        make = find_environment(settings.env)
        pairs = preferences.generate_preference_pairs(
            policy, tasks, self.reward_model, make, num_samples, sampling, settings.max_turns
        )
        return [preference_to_row(pair) for pair in pairs]


def started_from(base: str, trained: str) -> str:
    """The model to start from, which must be of the base that is named with it."""
    folder = find_model(trained) if trained else None
    if folder and base and (folder / "adapter_config.json").is_file():
        own = base_of_adapter(folder)
        if find_model(own).resolve() != find_model(base).resolve():
            raise SharpenError(f"{trained}: an adapter of {own}, not of {base}")
    return trained or base


class R1Reward:
    """Right or not, and a little for the form."""

    def __init__(self, config: R1TrainingConfig):
        self.config, self.verifiable = config, VerifiableRewardCalculator(config.task_type)
        self.shaping = RLVRRewardShaping() if config.shaping else None

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        found, weight = self.verifiable.score(task, trajectory), self.config.format_reward_weight
        right, form = (found.parts.get(name, 0.0) for name in ("correctness", "format"))
        worth = right
        if self.shaping:
            said = trajectory.turns[-1].message.content
            worth = self.shaping.shaped_reward(right, said, task.instruction)
        return Score((1 - weight) * worth + weight * form, found.parts, found.feedback)


class R1StyleTrainer:
    """`R1StyleTrainer(config, output).train()` over the tasks of `train_data`, or `train_step`
    after `train_step` with questions and answers of the caller's own."""

    def __init__(
        self,
        config: R1TrainingConfig,
        output: str | Path = "runs/r1",
        evaluate: Evaluate | None = None,
    ):
        self.config, self.reward_calculator = config, R1Reward(config)
        given: Json = {
            "base_model": config.model_name,
            "train_data": config.train_data,
            "group_size": config.num_samples_per_prompt,
            "max_tokens": config.max_response_length,
            "max_length": config.max_response_length + 8192,
            "temperature": config.temperature,
            "beta": config.kl_coef,
            "clip": config.clip_ratio,
            "monitor": True,
            "min_dev_score": 0.0,
        }
        settings = parse_config(GRPOConfig, given | config.settings, "R1TrainingConfig")
        self.trainer = GRPOTrainer(settings, output, self.reward_calculator, evaluate)
        self.trainer.practice.ask(self.asked)

    def asked(self, task: Task) -> Task:
        return replace(task, instruction=self.config.prompt.format(question=task.instruction))

    def train(self) -> dict[str, float]:
        try:
            return self.trainer.train()
        finally:
            self.reward_calculator.verifiable.close()

    def train_step(self, prompts: Sequence[str], ground_truths: Sequence[str]) -> Json:
        """One step on these questions. Returns its figures."""
        trainer, kind = self.trainer, self.config.task_type
        key = GOLD_KEYS.get(kind, "answers")
        if trainer.model is None:
            trainer.prepare()
        pairs = zip(prompts, ground_truths, strict=True)
        tasks = [
            self.asked(Task(str(n), text, gold={key: truth}, kind=kind))
            for n, (text, truth) in enumerate(pairs)
        ]
        groups = trainer.practice.attempt(tasks, trainer.learner.steps_done)
        return trainer.learn(groups)

    def save_model(self, path: str | Path) -> None:
        self.trainer.save_model(path)

    @property
    def model(self) -> Any:
        return self.trainer.model
