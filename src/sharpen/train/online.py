"""The loop of online RL, which GRPO and PPO share: sample, score, update, evaluate, keep the best,
finish.

A trainer is a subclass that says what an update is. Everything else has a place of its own: which
tasks come next (`task_order.py`), who samples them (`group_source.py`), what is measured besides
(`dev_evaluation.py`), what ends a run early (`run_guards.py`), and where the samples are kept
(`rollout_store.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from sharpen.data.sources import read_tasks
from sharpen.envs.perturb import Perturbation
from sharpen.kinds import KindReward, environment_by_name
from sharpen.policy.local import LocalPolicy
from sharpen.records import RunFolder
from sharpen.rewards.compose import build_reward
from sharpen.scored_rollout import NOT_THE_MODELS_FAULT, PlaySettings, TrajectoryGroup
from sharpen.train.advantages import overlong
from sharpen.train.callback import Callback, EvaluationContext
from sharpen.train.config.online import RLConfig
from sharpen.train.dev_evaluation import DevEvaluation
from sharpen.train.group_source import GroupSource, LocalGroupSource
from sharpen.train.learner import Learner
from sharpen.train.policy_setup import PolicySetup, prepare_policy
from sharpen.train.rl_data import sample_figures
from sharpen.train.rollout_store import RolloutStore
from sharpen.train.run import TrainingRun
from sharpen.train.run_guards import RunGuards
from sharpen.train.run_setup import finish_with_best, keep_best, open_folder
from sharpen.train.self_play import SelfPlay
from sharpen.train.task_order import CurriculumOrder, EpochOrder, SelfPlayOrder, TaskOrder
from sharpen.types import Json, Reward, Sampling, SharpenError, Task, Trajectory

ChangeTask = Callable[[Task], Task]
_LAST_FIGURES = ("step", "loss", "reward", "kl", "metric")


class OnlineTrainer(ABC):
    """Base class of the trainers that sample their own rows.

    `reward` and `callback` may be given as objects; without a reward the config's, or that of each
    task's kind, scores the samples. `change_task` is applied to every task that is read.
    """

    def __init__(
        self,
        config: RLConfig,
        output: str | Path,
        reward: Reward | None = None,
        callback: Callback | None = None,
        change_task: ChangeTask | None = None,
    ):
        self.config = config
        self.output = Path(output)
        self.train_tasks = _read_tasks(config.train_data, change_task)
        self.dev_tasks = _read_tasks(config.dev_data, change_task) if config.dev_data else []
        self.reward = reward or _reward_of(config)
        self.owns_reward = reward is None
        self.self_play = self._make_self_play() if config.self_play else None
        self.play_settings = self._make_play_settings()
        self.order = self._make_order()
        self.dev_evaluation = DevEvaluation(config, self.dev_tasks, self.reward, callback)
        self.guards = RunGuards(config)
        self.rollout_store = RolloutStore(self.output, config.rollout_store_mb)
        steps_of_epochs = -(-len(self.train_tasks) * config.num_epochs // config.tasks_per_step)
        self.total_steps = config.max_steps or steps_of_epochs
        self.model: Any = None  # until `prepare`
        self.setup: PolicySetup
        self.learner: Learner
        self.policy: LocalPolicy
        self.source: GroupSource

    # What a method says of itself -------------------------------------------------------------

    @property
    @abstractmethod
    def needs_reference(self) -> bool:
        """Whether the update asks a reference policy."""

    @abstractmethod
    def update(self, groups: Sequence[TrajectoryGroup], state: Json) -> Json:
        """Make the optimiser steps on a step's groups and return their figures. `state` is saved
        with the run. `learner.steps_done` grows by `config.updates`, whether or not anything could
        be learnt."""

    def sample_advantages(self, groups: Sequence[TrajectoryGroup]) -> list[np.ndarray | None]:
        """Returns each group's advantages, one per sample, for the stored rollouts; None where a
        method has none."""
        return [None] * len(groups)

    def other_learners(self) -> Mapping[str, Learner]:
        """Returns learners besides the policy's, by name, to be saved with the run."""
        return {}

    def first_state(self) -> Json:
        """Returns the state of a run before its first step."""
        return {"best": None, "source": self.source.state(), "guards": self.guards.state()}

    def make_source(self) -> GroupSource:
        """Returns what samples the groups."""
        return self.local_source(self.policy)

    # The loop ---------------------------------------------------------------------------------

    def train(self) -> dict[str, float]:
        """Run to the end, or on from where a stopped run was saved. Returns the last figures."""
        open_folder(self.output, self.config)
        self.prepare()
        try:
            folder = self._run_steps()
        finally:
            self._close_reward()
        return self.finish(folder)

    def prepare(self) -> Learner:
        """Load the policy that is trained, and what samples from it."""
        config = self.config
        if config.reference_model and not self.needs_reference:
            raise SharpenError(
                "reference_model: the weight of the KL is 0, nothing asks for it; leave it out"
            )
        self.setup = prepare_policy(config, self.needs_reference)
        self.model = self.setup.model
        self.learner = Learner(self.model, config, self.total_steps * config.updates)
        if self.learner.processes.world > 1:
            raise SharpenError("RL with its own samples runs in one process")
        # the distribution that is sampled from is the one that is trained
        self.learner.core.temperature = config.temperature  # type: ignore[assignment]
        self.policy = LocalPolicy(self.model, self.setup.renderer, config.rollout_rows)
        self.source = self.make_source()
        return self.learner

    def _run_steps(self) -> RunFolder:
        """All steps of the run that are not done yet."""
        config = self.config
        learner = self.learner
        others = self.other_learners()
        run = TrainingRun(self.output, config, learner, config.updates, others)
        with run, self.source:
            state = run.resume(self.first_state())
            self._load_state(state)
            if not learner.steps_done:
                self.dev_evaluation.check_gate(self.policy, self.train_tasks)
            while learner.steps_done // config.updates < run.total:
                row = self._step(state)
                run.end_of_step(row, state, show="metric" in row)
                self.guards.check_flat_steps()
        return run.folder

    def _load_state(self, state: Json) -> None:
        """Continue sampling and guards where the checkpoint was saved."""
        self.source.load_state(state["source"])
        self.guards.load_state(state["guards"])
        self.rollout_store.rewind(self.learner.steps_done // self.config.updates)

    def _step(self, state: Json) -> Json:
        """One step of the run. Returns its figures and brings `state` up to date."""
        done = self.learner.steps_done // self.config.updates
        step = done + 1
        sampled = self.source.next(done)
        advantages = self.sample_advantages(sampled.groups)
        row: Json = {"step": step, **sampled.figures}
        row |= self.learn(sampled.groups, state)
        self.source.publish(step)
        if self.dev_evaluation.is_due(step, self.total_steps):
            row |= self.dev_evaluation.evaluate(self._context(step))
        row |= self.guards.watch(sampled.groups, row)
        if "metric" in row:
            keep_best(row["metric"], state, self.output, self.save_model)
        self.rollout_store.write(step, sampled.groups, advantages)
        state["source"] = self.source.state()
        state["guards"] = self.guards.state()
        return row

    def learn(self, groups: Sequence[TrajectoryGroup], state: Json) -> Json:
        """One update. Returns the figures of its samples and of the update."""
        return sample_figures(groups) | self.update(groups, state)

    def finish(self, folder: RunFolder) -> dict[str, float]:
        """Make `final/`, and return the last of each figure that a reader asks for first."""
        finish_with_best(self.output, self.save_model)
        rows = folder.metrics()
        figures: dict[str, float] = {}
        for name in _LAST_FIGURES:
            for row in rows:
                if name in row:
                    figures[name] = row[name]
        measured = [row["metric"] for row in rows if "metric" in row]
        if measured:
            figures["best_metric"] = max(measured)
        return figures

    def save_model(self, path: str | Path) -> None:
        """Save the policy as a folder that loads on its own: an adapter, or a whole model."""
        self.setup.save(self.learner, path)

    # Parts ------------------------------------------------------------------------------------

    def local_source(self, policy: LocalPolicy, refill_rounds: int = 0) -> LocalGroupSource:
        """Returns a source that samples the run's tasks from a policy."""
        config = self.config
        return LocalGroupSource(
            policy,
            self.order,
            self.play_settings,
            config.tasks_per_step,
            config.seed,
            refill_rounds,
        )

    def _context(self, step: int) -> EvaluationContext:
        return EvaluationContext(self.model, self.setup.renderer, self.policy, step)

    def _make_play_settings(self) -> PlaySettings:
        """How the training samples are played and scored."""
        config = self.config
        make_environment = environment_by_name(config.env)
        return PlaySettings(
            reward=self.self_play or self.reward,
            sampling=self._sampling(),
            make_environment=make_environment,
            max_turns=config.max_turns,
            samples=config.group_size,
            perturbation=self._make_perturbation(),
            reward_workers=config.reward_workers,
            excluded_stops=(*NOT_THE_MODELS_FAULT, *config.excluded_stops),
            max_length=config.max_length,
            shape=self._overlong_penalty if config.overlong_buffer else None,
        )

    def _sampling(self) -> Sampling:
        config = self.config
        return Sampling(
            config.max_tokens,
            config.temperature,
            config.top_p,
            config.seed,
            constrained=config.constrained,
        )

    def _make_perturbation(self) -> Perturbation | None:
        """The share of the training tasks that is shown in a perturbed form."""
        config = self.config
        if not config.perturb:
            return None
        chosen = []
        for task in self.train_tasks:
            if Random(f"{config.seed} {task.id}").random() < config.perturb_share:
                chosen.append(task)
        return Perturbation(chosen, config.perturb, config.seed)

    def _make_self_play(self) -> SelfPlay:
        """The policy proposes tasks and solves them."""
        config = self.config
        if config.env:
            raise SharpenError(
                f"env {config.env!r}: in self_play each task's kind names its environment; "
                "leave env out"
            )
        sampling = Sampling(config.max_tokens, config.temperature, config.top_p, config.seed)
        return SelfPlay(lambda: self.policy, sampling, reward=self.reward, seed=config.seed)

    def _make_order(self) -> TaskOrder:
        config = self.config
        order: TaskOrder
        if config.curriculum:
            order = CurriculumOrder(self.train_tasks, config.seed)
        else:
            order = EpochOrder(self.train_tasks, config.seed)
        if self.self_play:
            return SelfPlayOrder(self.self_play, config.self_play, order)
        return order

    def _overlong_penalty(self, trajectory: Trajectory) -> float:
        """What is taken off the reward of an episode with an answer near the token limit."""
        longest = max(len(turn.ids) for turn in trajectory.turns)
        return overlong(longest, self.config.max_tokens, self.config.overlong_buffer or 0)

    def _close_reward(self) -> None:
        """End the processes of a reward that this trainer has made."""
        close = getattr(self.reward, "close", None)
        if self.owns_reward and close:
            close()


def _read_tasks(source: str, change_task: ChangeTask | None) -> list[Task]:
    tasks = list(read_tasks(source))
    if not tasks:
        raise SharpenError(f"{source}: no tasks")
    if change_task:
        return [change_task(task) for task in tasks]
    return tasks


def _reward_of(config: RLConfig) -> Reward:
    """The config's reward, or that of each task's kind."""
    if config.reward:
        return build_reward(config.reward)
    return KindReward(config.reward_workers)
