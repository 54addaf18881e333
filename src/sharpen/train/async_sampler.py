"""Sampling that goes on while the learner steps. GRPO uses it with `async_steps`.

A thread samples the next groups with a copy of the trained weights (a frozen base is shared) and
marks them with the step that the weights are of; `async_steps` steps of groups may wait. Groups
that have become too old when it is their turn are dropped and counted. Which weights sample a group
depends on the clock, so that a continued run is not the same run bit for bit.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sharpen.policy.local import LocalPolicy
from sharpen.render import Renderer
from sharpen.train.config.grpo import GRPOConfig
from sharpen.train.group_source import LocalGroupSource, SampledStep
from sharpen.train.learner import Learner
from sharpen.types import Json

_THREAD_NAME = "sampler"
_POLL_S = 0.1  # between two looks at whether the run has ended


@dataclass(frozen=True, slots=True)
class _WaitingStep:
    """A step's groups, sampled from the weights of `weights_step`, and where sampling continues."""

    weights_step: int
    sampled: SampledStep
    state: Json


class AsyncGroupSource:
    """A `GroupSource` that samples ahead in a thread. `make_local` returns the source that does the
    sampling, from a policy over the copied weights."""

    def __init__(
        self,
        learner: Learner,
        renderer: Renderer,
        make_local: Callable[[LocalPolicy], LocalGroupSource],
        config: GRPOConfig,
    ):
        self.learner = learner
        self.max_staleness = config.max_staleness
        # what deepcopy finds here it shares instead of copying it
        shared = {id(p): p for p in learner.model.parameters() if not p.requires_grad}
        self.model = copy.deepcopy(learner.model, shared).requires_grad_(False)
        self.copied_weights = {}
        for name, parameter in self.model.named_parameters():
            if name in learner.trained:
                self.copied_weights[name] = parameter
        self.local = make_local(LocalPolicy(self.model, renderer, config.rollout_rows))
        self._last_state = self.local.state()
        self._published: tuple[int, dict[str, torch.Tensor]] = (0, {})
        self._lock = threading.Lock()  # of what was published
        self._waiting: queue.Queue[_WaitingStep | BaseException] = queue.Queue(config.async_steps)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> AsyncGroupSource:
        print("async_steps: samples are taken while the learner steps; no two runs are the same")
        return self

    def __exit__(self, *failure: object) -> None:
        self._ended.set()
        if self._thread:
            self._thread.join()

    def next(self, step: int) -> SampledStep:
        """Returns the oldest groups whose weights are at most `max_staleness` steps old."""
        if self._thread is None:
            self._start(step)
        dropped = 0
        while True:
            waiting = self._waiting.get()
            if isinstance(waiting, BaseException):
                raise waiting
            staleness = step - waiting.weights_step
            sampled = waiting.sampled
            if staleness <= self.max_staleness:
                self._last_state = waiting.state
                figures = sampled.figures | {"staleness": staleness, "stale": dropped}
                return SampledStep(sampled.groups, figures)
            dropped += sum(len(group.samples) for group in sampled.groups)

    @torch.no_grad()
    def publish(self, step: int) -> None:
        """Set apart the weights that the next groups are sampled from."""
        weights = {}
        for name in self.copied_weights:
            weights[name] = self.learner.trained[name].detach().clone()
        with self._lock:
            self._published = (step, weights)

    def state(self) -> Json:
        return self._last_state

    def load_state(self, state: Json) -> None:
        self.local.load_state(state)
        self._last_state = state

    def _start(self, step: int) -> None:
        self.publish(step)
        self._thread = threading.Thread(target=self._sample_ahead, name=_THREAD_NAME, daemon=True)
        self._thread.start()

    def _sample_ahead(self) -> None:
        """What the thread does, until the run ends or something fails."""
        while not self._ended.is_set():
            try:
                step = self._load_published_weights()
                sampled = self.local.next(step)
                self._put(_WaitingStep(step, sampled, copy.deepcopy(self.local.state())))
            except BaseException as error:  # for the learner's thread to raise
                self._put(error)
                return

    @torch.no_grad()
    def _load_published_weights(self) -> int:
        """Copy the newest weights into the sampling model. Returns the step that they are of."""
        with self._lock:
            step, weights = self._published
            for name, parameter in self.copied_weights.items():
                parameter.copy_(weights[name])
            return step

    def _put(self, item: _WaitingStep | BaseException) -> None:
        """Wait for a free place, unless the run ends first."""
        while not self._ended.is_set():
            try:
                self._waiting.put(item, timeout=_POLL_S)
                return
            except queue.Full:
                continue
