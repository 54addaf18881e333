"""Sampling that goes on while the learner steps.

A thread walks the next tasks with a copy of the trained weights (a frozen base is shared) and
leaves scored groups, stamped with the step that the weights are of; so many steps of them may wait.
What has become too old by the time it is its turn is dropped and counted. When a group is sampled
depends on the clock, so that a continued run is not the same run bit for bit.
"""

from __future__ import annotations

import copy
import queue
import threading
from typing import Any

import torch

from sharpen.policy.local import LocalPolicy
from sharpen.train.config.grpo import GRPOConfig
from sharpen.train.learner import Learner
from sharpen.train.practice import Practice
from sharpen.train.rl_data import Group
from sharpen.types import Json


class AsyncSampler:
    """`with AsyncSampler(…) as ahead: groups, row = ahead.take(step, state)`, then `ahead.publish(step)`
    once the weights have changed."""

    def __init__(self, practice: Practice, learner: Learner, config: GRPOConfig, state: Json):
        frozen = {id(p): p for p in learner.model.parameters() if not p.requires_grad}
        self.model = copy.deepcopy(learner.model, frozen).requires_grad_(False)
        self.own = {n: p for n, p in self.model.named_parameters() if n in learner.trained}
        self.learner, self.config, self.state = learner, config, copy.deepcopy(state)
        self.practice = copy.copy(practice)
        renderer = practice.policy.renderer
        self.practice.policy = LocalPolicy(self.model, renderer, config.rollout_rows)
        self.waiting: queue.Queue[Any] = queue.Queue(config.async_steps)
        self.ended, self.lock = threading.Event(), threading.Lock()
        self.thread = threading.Thread(target=self.run, name="ahead", daemon=True)

    def __enter__(self) -> AsyncSampler:
        print("ahead: samples are taken while the learner steps; no two runs are the same")
        self.publish(self.learner.steps_done // self.config.updates)
        self.thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self.ended.set()
        self.thread.join()

    @torch.no_grad()
    def publish(self, step: int) -> None:
        """Set apart the weights that the next groups are to be sampled from."""
        fresh = {name: self.learner.trained[name].detach().clone() for name in self.own}
        with self.lock:
            self.fresh, self.step = fresh, step

    def run(self) -> None:
        found: Any
        while not self.ended.is_set():
            try:
                with self.lock, torch.no_grad():
                    step = self.step
                    for name, parameter in self.own.items():
                        parameter.copy_(self.fresh[name])
                groups, row = self.practice.gather(self.state, self.config.refill_rounds or 0)
                found = step, groups, row, {**self.state}
            except BaseException as error:  # for the learner's thread to raise
                found = error
            while not self.ended.is_set():
                try:
                    self.waiting.put(found, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if isinstance(found, BaseException):
                return

    def take(self, step: int, state: Json) -> tuple[list[Group], Json]:
        """The oldest groups that are of weights at most `max_staleness` steps old."""
        dropped = 0
        while True:
            found = self.waiting.get()
            if isinstance(found, BaseException):
                raise found
            made, groups, row, then = found
            if step - made <= self.config.max_staleness:
                told = ("position", "flat_steps", "flat_reward", "curriculum")
                state |= {name: then[name] for name in told}
                return groups, row | {"staleness": step - made, "stale": dropped}
            dropped += sum(len(group.samples) for group in groups)
