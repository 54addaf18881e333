"""The specification's trainers, composed of the others: `AgentRLTrainer` runs DPO, PPO or GRPO with
one reward model, `R1StyleTrainer` GRPO with rewards that can be verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sharpen.config import parse_config
from sharpen.data.sources import read_tasks
from sharpen.kinds import environment_by_name
from sharpen.models.find import find_model
from sharpen.models.load import ModelConfig, base_of_adapter
from sharpen.policy.local import LocalPolicy
from sharpen.rewards.hacking import RLVRRewardShaping
from sharpen.rewards.verifiable import GOLD_KEYS, VerifiableRewardCalculator
from sharpen.rows import preference_to_row
from sharpen.scored_rollout import play_and_score
from sharpen.train.callback import Callback
from sharpen.train.config.grpo import GRPOConfig
from sharpen.train.config.specification import R1TrainingConfig, RLTrainingConfig
from sharpen.train.group_source import with_seed
from sharpen.train.grpo import GRPOTrainer
from sharpen.train.methods import METHODS
from sharpen.train.preferences import generate_preference_pairs
from sharpen.types import Json, Reward, Sampling, Score, SharpenError, Task, Trajectory

_TITLE_CHARACTERS = 60  # of a text that an error quotes


class AgentRLTrainer:
    """`AgentRLTrainer(config, base_model_path, sft_model_path, reward_model).train()`. The run
    starts from `sft_model_path`, an adapter of the base or a model of its own; empty: from the
    base. `evaluate` is called every `eval_steps`."""

    def __init__(
        self,
        config: RLTrainingConfig,
        base_model_path: str,
        sft_model_path: str,
        reward_model: Reward,
        output: str | Path = "",
        evaluate: Callback | None = None,
    ):
        self.config = config
        self.reward_model = reward_model
        self.path = _model_to_start_from(str(base_model_path), str(sft_model_path))
        method = METHODS[config.algorithm]
        own_name = f"{config.algorithm}_config"
        values: Json = {"base_model": self.path, "train_data": config.train_data}
        values |= config.settings
        values |= getattr(config, own_name)
        self.settings: Any = parse_config(method.load_config_class(), values, own_name)
        output = output or f"runs/{config.algorithm}"
        trainer_class = method.load_trainer_class()
        self.trainer = trainer_class(self.settings, output, reward_model, evaluate)

    def train(self) -> dict[str, float]:
        """Run to the end, or on from where a stopped run was saved. Returns the last figures."""
        return self.trainer.train()

    def save_model(self, path: str | Path) -> None:
        """Save the policy as a folder that loads on its own."""
        self.trainer.save_model(path)

    @property
    def model(self) -> Any:
        """The policy's model; None before `train`."""
        learner = getattr(self.trainer, "learner", None)
        return learner.model if learner else None

    def generate_preference_pairs(
        self, prompts: Sequence[str | Task], num_samples: int = 4
    ) -> list[Json]:
        """Returns the best and the worst of several answers to each task, as rows to train DPO on.
        A text stands for the task of `train_data` with this instruction: without its gold nothing
        could be scored."""
        settings = self.settings
        pairs = generate_preference_pairs(
            self._policy(),
            self._tasks_of(prompts),
            self.reward_model,
            environment_by_name(settings.env),
            num_samples,
            Sampling(settings.max_tokens, settings.temperature, settings.top_p, settings.seed),
            settings.max_turns,
        )
        return [preference_to_row(pair) for pair in pairs]

    def _policy(self) -> LocalPolicy:
        """The trained policy, or before `train` the one to start from."""
        if self.model is not None:
            return LocalPolicy(self.model, self.trainer.setup.renderer)
        return LocalPolicy.load(ModelConfig(base_model=self.path, device=self.settings.device))

    def _tasks_of(self, prompts: Sequence[str | Task]) -> list[Task]:
        """Tasks as they are, texts as the tasks of the training data that they stand for."""
        task_of_text = {}
        if any(isinstance(prompt, str) for prompt in prompts):
            for task in read_tasks(self.config.train_data):
                task_of_text[task.instruction] = task
        tasks = []
        for prompt in prompts:
            if isinstance(prompt, Task):
                tasks.append(prompt)
            elif prompt in task_of_text:
                tasks.append(task_of_text[prompt])
            else:
                raise SharpenError(
                    f"{prompt[:_TITLE_CHARACTERS]!r}: no task of {self.config.train_data} says "
                    "this; give a Task with its gold"
                )
        return tasks


def _model_to_start_from(base: str, trained: str) -> str:
    """The trained model or adapter, which must be of the base that is named with it; otherwise the
    base."""
    folder = find_model(trained) if trained else None
    if folder and base and (folder / "adapter_config.json").is_file():
        own_base = base_of_adapter(folder)
        if find_model(own_base).resolve() != find_model(base).resolve():
            raise SharpenError(f"{trained}: an adapter of {own_base}, not of {base}")
    return trained or base


class R1Reward:
    """Mostly whether the answer is right, and a little for its form."""

    def __init__(self, config: R1TrainingConfig):
        self.config = config
        self.verifiable = VerifiableRewardCalculator(config.task_type)
        self.shaping = RLVRRewardShaping() if config.shaping else None

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        verified = self.verifiable.score(task, trajectory)
        correctness = verified.parts.get("correctness", 0.0)
        form = verified.parts.get("format", 0.0)
        weight = self.config.format_reward_weight
        if self.shaping:
            text = trajectory.turns[-1].message.content
            answer_value = self.shaping.shaped_reward(correctness, text, task.instruction)
        else:
            answer_value = correctness
        value = (1 - weight) * answer_value + weight * form
        return Score(value, verified.parts, verified.feedback, verified.solved)


class R1StyleTrainer:
    """`R1StyleTrainer(config, output).train()` over the tasks of `train_data`, or `train_step`
    after `train_step` with questions and answers of the caller's own."""

    def __init__(
        self,
        config: R1TrainingConfig,
        output: str | Path = "runs/r1",
        evaluate: Callback | None = None,
    ):
        self.config = config
        self.reward_calculator = R1Reward(config)
        values: Json = {
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
        settings = parse_config(GRPOConfig, values | config.settings, "R1TrainingConfig")
        self.trainer = GRPOTrainer(
            settings, output, self.reward_calculator, evaluate, self.put_into_prompt
        )

    def put_into_prompt(self, task: Task) -> Task:
        """Returns the task with the config's prompt around its question."""
        return replace(task, instruction=self.config.prompt.format(question=task.instruction))

    def train(self) -> dict[str, float]:
        """Run to the end, or on from where a stopped run was saved. Returns the last figures."""
        try:
            return self.trainer.train()
        finally:
            self.reward_calculator.verifiable.close()

    def train_step(self, prompts: Sequence[str], ground_truths: Sequence[str]) -> Json:
        """Make one step on these questions. Returns its figures."""
        trainer = self.trainer
        if trainer.model is None:
            trainer.prepare()
        kind = self.config.task_type
        gold_key = GOLD_KEYS.get(kind, "answers")
        tasks = []
        for number, (prompt, truth) in enumerate(zip(prompts, ground_truths, strict=True)):
            task = Task(str(number), prompt, gold={gold_key: truth}, kind=kind)
            tasks.append(self.put_into_prompt(task))
        how = with_seed(trainer.play_settings, trainer.learner.steps_done)
        groups = play_and_score(trainer.policy, tasks, how)
        return trainer.learn(groups, trainer.first_state())

    def save_model(self, path: str | Path) -> None:
        """Save the policy as a folder that loads on its own."""
        self.trainer.save_model(path)

    @property
    def model(self) -> Any:
        """The policy's model; None before the first step."""
        return self.trainer.model
