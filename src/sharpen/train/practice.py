"""Where the samples of online RL come from: tasks in a seeded order, walked through environments,
scored; and what is measured besides, before and between the steps.

Everything follows from the config and the position in the order, which a run's state holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from sharpen.data.sources import read_tasks
from sharpen.envs.perturb import Perturbation, PerturbedEnvironment
from sharpen.records import write_jsonl
from sharpen.rewards.compose import build_reward
from sharpen.rewards.hacking import SURE, HackingMonitor, RLVRHackingDetector
from sharpen.rollout import find_environment, rollout
from sharpen.rows import message_to_wire
from sharpen.train.advantages import overlong
from sharpen.train.batching import epoch_order
from sharpen.train.config.online import RLConfig
from sharpen.train.curriculum import Curriculum
from sharpen.train.rl_data import (
    Group,
    GroupScorer,
    TaskReward,
    as_figures,
    flat,
    means,
    reasons,
)
from sharpen.train.self_play import SelfPlay
from sharpen.types import Json, Reward, Sampling, SharpenError, Task, Trajectory

SHOWN = 20  # episodes
PASSED = 0.5  # the reward of a sample that counts as solved
Evaluate = Callable[[Any, int], float | Mapping[str, float]]  # policy, step


class Practice:
    """`evaluate(policy, step)` is a further evaluation, every `eval_steps` too."""

    def __init__(
        self,
        config: RLConfig,
        reward: Reward | None = None,
        evaluate: Evaluate | None = None,
    ):
        self.config, self.callback = config, evaluate
        self.tasks = list(read_tasks(config.train_data))
        self.dev = list(read_tasks(config.dev_data)) if config.dev_data else []
        for name, found in ((config.train_data, self.tasks), (config.dev_data, self.dev)):
            if name and not found:
                raise SharpenError(f"{name}: no tasks")
        self.make = find_environment(config.env)
        default = reward or (build_reward(config.reward) if config.reward else None)
        self.reward = default or TaskReward(config.reward_workers)
        self.play = self.self_play() if config.self_play else None
        seed, share = config.seed, config.perturb_share if config.perturb else 0.0
        chosen = [task for task in self.tasks if Random(f"{seed} {task.id}").random() < share]
        self.changed = Perturbation(chosen, config.perturb, seed)
        self.judge = GroupScorer(
            self.play or self.reward,
            config.excluded_stops,
            config.max_length,
            config.reward_workers,
            self.shape if config.overlong_buffer else None,
        )
        self.policy: Any = None
        self.seconds = np.zeros(2)  # of rollouts and of rewards, in this step
        self.detector = RLVRHackingDetector() if config.monitor else None
        self.ask(lambda task: task)
        self.total = config.max_steps or -(
            -len(self.tasks) * config.num_epochs // config.tasks_per_step
        )

    def shape(self, made: Trajectory) -> float:
        longest = max(len(turn.ids) for turn in made.turns)
        return overlong(longest, self.config.max_tokens, self.config.overlong_buffer or 0)

    def __enter__(self) -> Practice:
        return self

    def __exit__(self, *failure: object) -> None:
        if isinstance(self.reward, TaskReward):
            self.reward.close()

    def ask(self, change: Callable[[Task], Task]) -> None:
        """Put every task in other words."""
        self.tasks, self.dev = [*map(change, self.tasks)], [*map(change, self.dev)]
        wanted = self.config.curriculum
        self.curriculum = Curriculum(self.tasks, self.config.seed) if wanted else None

    def first_state(self) -> Json:
        state: Json = {"position": 0, "flat_steps": 0, "flat_reward": 0.0, "best": None}
        state |= {"curriculum": self.curriculum.state() if self.curriculum else None}
        state |= {"self_play": self.play.state() if self.play else None}
        return state | {"monitor": asdict(HackingMonitor()), "samples": []}

    def self_play(self) -> SelfPlay:
        """The policy proposes tasks and solves them."""
        config = self.config
        if config.env not in ("", "auto"):
            raise SharpenError(f"env {config.env!r}: self_play needs the environment auto")
        self.make = find_environment("auto")
        sampling = Sampling(config.max_tokens, config.temperature, config.top_p, config.seed)
        return SelfPlay(lambda: self.policy, sampling, reward=self.reward, seed=config.seed)

    def pick(self, state: Json, count: int) -> list[Task]:
        """In self-play prompts for proposals, and for half of the others what was proposed before
        and can be learnt from."""
        if not self.play:
            return self.own_tasks(state, count)
        self.play.load_state(state["self_play"])
        tasks = self.play.propose(round(count * self.config.self_play))
        tasks += self.play.learnable()[: -1 - (count - len(tasks)) // 2 : -1]
        return tasks + self.own_tasks(state, count - len(tasks))

    def own_tasks(self, state: Json, count: int) -> list[Task]:
        """By the curriculum, or the next tasks of an endless order, shuffled anew in every
        epoch."""
        if self.curriculum:
            self.curriculum.load_state(state["curriculum"])
            return self.curriculum.pick(min(count, len(self.tasks)))
        position = state["position"]
        names, seed = ("",) * len(self.tasks), self.config.seed
        places = [divmod(place, len(self.tasks)) for place in range(position, position + count)]
        return [self.tasks[order(names, seed, epoch)[at]] for epoch, at in places]

    def sampled(
        self, tasks: list[Task], temperature: float, seed: int, perturbed: bool
    ) -> list[Trajectory]:
        config = self.config
        sampling = Sampling(
            config.max_tokens, temperature, config.top_p, seed, constrained=config.constrained
        )
        if not (perturbed and config.perturb):
            return rollout(self.policy, tasks, self.make, sampling, config.max_turns)

        def make() -> PerturbedEnvironment:
            return PerturbedEnvironment(self.make(), self.changed)

        made = rollout(self.policy, tasks, make, sampling, config.max_turns)
        return [self.changed.meant(trajectory) for trajectory in made]

    def attempt(self, tasks: list[Task], seed: int) -> list[Group]:
        """Each task several times, scored."""
        started = time.monotonic()
        repeated = [task for task in tasks for _ in range(self.config.group_size)]
        trajectories = self.sampled(repeated, self.config.temperature, seed, perturbed=True)
        ended = time.monotonic()
        groups = self.judge.groups(tasks, trajectories)
        self.seconds += ended - started, time.monotonic() - ended
        return groups

    def gather(self, state: Json, refill_rounds: int = 0) -> tuple[list[Group], Json]:
        """A step's groups and how long they took. Flat groups are followed by groups of further
        tasks, `refill_rounds` times at most."""
        config, groups, self.seconds = self.config, list[Group](), np.zeros(2)
        for _ in range(1 + refill_rounds):
            lively = sum(not group.flat for group in groups)
            tasks = self.pick(state, config.tasks_per_step - lively)
            if not tasks:
                break
            seed = (config.seed * 1_000_003 + state["position"]) % (1 << 32)
            state["position"] += len(tasks)
            found = self.attempt(tasks, seed)
            groups += found
            if self.curriculum:
                known = self.curriculum.tasks
                passed = [g for g in found if len(g.rewards) and g.task.id in known]
                rates = [float((group.rewards >= PASSED).mean()) for group in passed]
                self.curriculum.update([group.task.id for group in passed], rates)
                state["curriculum"] = self.curriculum.state()
            if self.play:
                state["self_play"] = self.play.state()
        rewards = [group.rewards for group in groups]
        rewards = rewards if config.group_size > 1 else [np.concatenate(rewards)]
        state["flat_steps"] = state["flat_steps"] + 1 if all(map(flat, rewards)) else 0
        state["flat_reward"] = next((float(found[0]) for found in rewards if len(found)), 0.0)
        made = [sample for group in groups for sample in group.samples]
        tokens = sum(len(turn.ids) for sample in made for turn in sample.turns)
        rolled, scored = self.seconds.tolist()
        row = {"rollout_seconds": rolled, "reward_seconds": scored}
        return groups, row | {"rollout_tokens_per_s": tokens / max(rolled, 1e-9)}

    def measure(self) -> Json:
        """The mean score of greedy answers to the dev tasks, and of its parts."""
        judge = GroupScorer(
            self.reward, workers=self.config.reward_workers
        )  # long answers count too
        groups = judge.groups(self.dev, self.sampled(self.dev, 0.0, 0, perturbed=False))
        samples = [sample for group in groups for sample in group.samples]
        dropped = [reason for group in groups for reason in group.dropped]
        if not samples:
            raise SharpenError(f"no dev task could be scored: {reasons(dropped)}")
        found = means(samples)
        row: Json = {f"eval_{name}": value for name, value in found.items() if name}
        if dropped:
            row |= {"eval_dropped": len(dropped), "eval_dropped_why": reasons(dropped)}
        return {"metric": found[""], **row}

    def evaluations(self, step: int) -> Json:
        """What is measured behind this step, if it is time."""
        row: Json = {}
        if step % self.config.eval_steps and step != self.total:
            return row
        if self.dev:
            row |= self.measure()
        if self.callback:
            row |= as_figures(self.callback(self.policy, step))
        return row

    def check_gate(self) -> None:
        """Refuse a policy that still calls tools wrongly: RL would drill its mistakes."""
        if not self.config.min_dev_score or not any(task.tools for task in self.dev or self.tasks):
            return
        if not self.dev:
            print("gate: not measured, there is no dev_data")
            return
        row = self.measure()
        names = [n for n in row if n.endswith(("tool_accuracy", "exact_call"))] or ["metric"]
        if row[names[0]] < self.config.min_dev_score:
            raise SharpenError(
                f"gate: {names[0]} is {row[names[0]]:.3f} on {self.config.dev_data}, below "
                f"{self.config.min_dev_score}; train the model with SFT first, or go on knowingly with "
                "--force (min_dev_score=0)"
            )
        print(f"gate: {names[0]} {row[names[0]]:.3f} on {self.config.dev_data}")

    def show(self, folder: Path, groups: list[Group], row: Json, state: Json) -> None:
        """The newest episodes, one a step, in `samples.jsonl`."""
        group = next(group for group in groups if group.samples)
        made = group.samples[0]
        said = [message for turn in made.turns for message in (turn.message, *turn.results)]
        found = {"step": row["step"], "task": group.task.id, "stop": made.stop.value}
        found["reward"] = made.score.value if made.score else 0.0
        found["messages"] = [message_to_wire(m) for m in (*group.task.messages, *said)]
        state["samples"] = [*state["samples"], found][-SHOWN:]
        write_jsonl(folder / "samples.jsonl", state["samples"])

    def check_flat(self, state: Json) -> None:
        """Too many steps in a row in which nothing could be learnt end the run."""
        if state["flat_steps"] >= self.config.max_flat_steps:
            raise SharpenError(
                f"{state['flat_steps']} steps in a row had only flat rewards, the last of them "
                f"{state['flat_reward']:g}: take easier or harder tasks, a higher temperature or "
                "larger groups"
            )

    def watch(self, groups: list[Group], row: Json, state: Json) -> Json:
        """The share of samples that look hacked, and an alarm where the reward rises and the
        evaluation does not."""
        if not self.detector:
            return {}
        hacked = []
        for group in groups:
            for sample in group.samples:
                said = "\n".join(turn.message.content for turn in sample.turns)
                found = self.detector.detect(said, group.task.instruction)
                hacked.append(any(finding.score >= SURE for finding in found))
        rate = sum(hacked) / len(hacked)
        monitor = HackingMonitor(**state["monitor"])
        alarm = monitor.update(row["step"], row["reward"], row.get("metric"), hacking_rate=rate)
        state["monitor"] = asdict(monitor)
        if alarm:
            print(f"reward hacking? {alarm.evidence}")
        return {"hacking_rate": rate} | ({"alarm": alarm.evidence} if alarm else {})


@lru_cache(maxsize=4)
def order(names: tuple[str, ...], seed: int, epoch: int) -> list[int]:
    return epoch_order(names, seed, epoch)
