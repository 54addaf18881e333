"""What ends or flags an online run that goes wrong: steps in which nothing can be learnt, and a
reward that rises because it is gamed. `OnlineTrainer` calls it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from sharpen.rewards.hacking import SURE_SCORE, HackingMonitor, RLVRHackingDetector
from sharpen.scored_rollout import TrajectoryGroup, is_flat
from sharpen.train.config.online import RLConfig
from sharpen.types import Json, SharpenError, Task, Trajectory


class RunGuards:
    """Counts flat steps, and with `monitor` looks for reward hacking."""

    def __init__(self, config: RLConfig):
        self.config = config
        self.flat_steps = 0  # in a row
        self.flat_reward = 0.0  # of the newest step
        self.detector = RLVRHackingDetector() if config.monitor else None
        self.monitor = HackingMonitor()

    def watch(self, groups: Sequence[TrajectoryGroup], row: Json) -> Json:
        """Take note of a step. `row` are its figures; returns further ones."""
        self._count_flat_step(groups)
        return self._watch_for_hacking(groups, row)

    def check_flat_steps(self) -> None:
        """End the run after too many steps in a row in which nothing could be learnt."""
        if self.flat_steps >= self.config.max_flat_steps:
            raise SharpenError(
                f"{self.flat_steps} steps in a row had only flat rewards, the last of them "
                f"{self.flat_reward:g}: take easier or harder tasks, a higher temperature or "
                "larger groups"
            )

    def state(self) -> Json:
        return {
            "flat_steps": self.flat_steps,
            "flat_reward": self.flat_reward,
            "monitor": asdict(self.monitor),
        }

    def load_state(self, state: Json) -> None:
        self.flat_steps = state["flat_steps"]
        self.flat_reward = state["flat_reward"]
        self.monitor = HackingMonitor(**state["monitor"])

    def _count_flat_step(self, groups: Sequence[TrajectoryGroup]) -> None:
        rewards = [group.rewards for group in groups]
        if self.config.group_size == 1:  # samples are compared over the whole step
            rewards = [np.concatenate(rewards)]
        if all(is_flat(values) for values in rewards):
            self.flat_steps += 1
        else:
            self.flat_steps = 0
        first_rewards = [float(values[0]) for values in rewards if len(values)]
        self.flat_reward = first_rewards[0] if first_rewards else 0.0

    def _watch_for_hacking(self, groups: Sequence[TrajectoryGroup], row: Json) -> Json:
        """The share of samples that look hacked, and an alarm when the reward rises and the
        evaluation does not."""
        if not self.detector:
            return {}
        verdicts = []
        for group in groups:
            for sample in group.samples:
                verdicts.append(_looks_hacked(self.detector, group.task, sample))
        hacking_rate = sum(verdicts) / len(verdicts)
        alarm = self.monitor.update(
            row["step"], row["reward"], row.get("metric"), hacking_rate=hacking_rate
        )
        figures: Json = {"hacking_rate": hacking_rate}
        if alarm:
            print(f"reward hacking? {alarm.evidence}")
            figures["alarm"] = alarm.evidence
        return figures


def _looks_hacked(detector: RLVRHackingDetector, task: Task, sample: Trajectory) -> bool:
    text = "\n".join(turn.message.content for turn in sample.turns)
    findings = detector.detect(text, task.instruction)
    return any(finding.score >= SURE_SCORE for finding in findings)
