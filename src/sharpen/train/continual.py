"""Tasks learned one after another: what is forgotten and what is carried over, and three ways
against forgetting (rehearsal, EWC, DER++) behind one interface."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sharpen.data.replay import OnlineContinualLearner
from sharpen.train.batching import collate, epoch_order, micro_batches, trained_tokens
from sharpen.train.config.learner import LearnerConfig
from sharpen.train.learner import Learner
from sharpen.train.sft import token_mean
from sharpen.types import Datum, Json, SharpenError

State = tuple[dict[str, torch.Tensor], Json]  # tensors and plain values, as a checkpoint takes them


@dataclass(frozen=True, slots=True)
class TaskRows:
    name: str
    train: Sequence[Datum]
    dev: Sequence[Datum]


Metric = Callable[[Learner, TaskRows], float]  # higher is better


class Naive:
    """Each task as it comes. What the other methods change, they override."""

    def rows(self, task: TaskRows) -> list[Datum]:
        """What is trained on in this task."""
        return list(task.train)

    def before_clip(self, learner: Learner) -> None:
        """Called in every step with the task's gradients: more may be added."""

    def after(self, learner: Learner, task: TaskRows) -> None:
        """Called when the task is learned."""

    def state(self) -> State:
        return {}, {}

    def load_state(self, tensors: dict[str, torch.Tensor], values: Json) -> None:
        pass


class Rehearsal(Naive):
    """Rows of earlier tasks are trained on beside the new ones."""

    def __init__(self, buffer: OnlineContinualLearner):
        self.buffer = buffer

    def rows(self, task: TaskRows) -> list[Datum]:
        return [*task.train, *self.buffer.replay(round(self.buffer.replay_ratio * len(task.train)))]

    def after(self, learner: Learner, task: TaskRows) -> None:
        self.keep(task.train, learner.logprobs(task.train))

    def keep(self, rows: Sequence[Datum], logprobs: Sequence[np.ndarray]) -> None:
        self.buffer.observe(rows, [-float(values.mean()) for values in logprobs])
        self.buffer.round += 1

    def state(self) -> State:
        return {}, {"buffer": self.buffer.state()}

    def load_state(self, tensors: dict[str, torch.Tensor], values: Json) -> None:
        self.buffer.load_state(values["buffer"])


class DarkReplay(Rehearsal):
    """DER++: every step adds, for `count` kept rows, alpha · the mean squared distance of their
    log-probabilities from those they had when they were kept, and beta · their loss."""

    rows = Naive.rows  # the kept ones come by `before_clip`

    def __init__(
        self, buffer: OnlineContinualLearner, alpha: float = 0.5, beta: float = 0.5, count: int = 8
    ):
        super().__init__(buffer)
        self.alpha, self.beta, self.count = alpha, beta, count
        self.then: dict[str, np.ndarray] = {}  # row's id → log-probabilities of its trained tokens

    def before_clip(self, learner: Learner) -> None:
        if not (rows := self.buffer.replay(self.count)):
            return
        tokens, lengths = sum(map(trained_tokens, rows)), [len(d.ids) for d in rows]
        for chosen in micro_batches(lengths, learner.token_budget, learner.packed):
            batch = collate([rows[i] for i in chosen], learner.device, learner.packed)
            then_N = torch.from_numpy(np.concatenate([self.then[rows[i].id] for i in chosen]))
            now_N = learner.core(batch)
            moved_N = (now_N - then_N.to(learner.device)) ** 2
            ((self.alpha * moved_N - self.beta * now_N).sum() / tokens).backward()
            learner.gather_gradients()

    def after(self, learner: Learner, task: TaskRows) -> None:
        rows = [replace(d, id=f"{task.name}/{n}") for n, d in enumerate(task.train)]
        found = learner.logprobs(rows)
        self.keep(rows, found)
        known = self.then | {row.id: values for row, values in zip(rows, found, strict=True)}
        kept = [entry[4].id for heap in self.buffer.heaps.values() for entry in heap]
        self.then = {name: known[name] for name in kept}

    def state(self) -> State:
        return {n: torch.from_numpy(v) for n, v in self.then.items()}, super().state()[1]

    def load_state(self, tensors: dict[str, torch.Tensor], values: Json) -> None:
        super().load_state(tensors, values)
        self.then = {name: tensor.numpy() for name, tensor in tensors.items()}


class EWC(Naive):
    """Elastic weight consolidation: the loss gains strength/2 · Σ F (w - w₀)², where F is the sum
    of the finished tasks' Fisher diagonals and w₀ the weights after the last of them."""

    def __init__(self, strength: float, fisher_rows: int = 200):
        self.strength, self.fisher_rows = strength, fisher_rows
        self.kept: dict[str, torch.Tensor] = {}  # fisher.NAME and anchor.NAME

    @torch.no_grad()
    def before_clip(self, learner: Learner) -> None:
        # a checkpoint's tensors come on the CPU; where they are in place already, this moves none
        self.kept = {name: tensor.to(learner.device) for name, tensor in self.kept.items()}
        for name, weight in learner.master.items() if self.kept else ():
            away = weight - self.kept[f"anchor.{name}"]
            slope = self.strength * self.kept[f"fisher.{name}"] * away
            weight.grad = slope if weight.grad is None else weight.grad.add_(slope)

    def after(self, learner: Learner, task: TaskRows) -> None:
        every = math.ceil(len(task.train) / self.fisher_rows)
        for name, found in fisher_diagonal(learner, task.train[::every]).items():
            self.kept[f"fisher.{name}"] = self.kept.get(f"fisher.{name}", 0) + found
            self.kept[f"anchor.{name}"] = learner.master[name].detach().clone()

    def state(self) -> State:
        return self.kept, {}

    def load_state(self, tensors: dict[str, torch.Tensor], values: Json) -> None:
        self.kept = dict(tensors)


def fisher_diagonal(learner: Learner, datums: Sequence[Datum]) -> dict[str, torch.Tensor]:
    """The mean over rows of the squared gradient of a row's mean loss (the empirical Fisher
    information), for every trained weight, dropout off."""
    learner.model.eval()
    found = {name: torch.zeros_like(weight) for name, weight in learner.master.items()}
    for datum in datums:
        learner.accumulate([datum], token_mean, float(trained_tokens(datum)))
        for name, weight in learner.master.items():
            if weight.grad is not None:
                found[name] += weight.grad.detach() ** 2 / len(datums)
    learner.optimizer.zero_grad(set_to_none=True)
    return found


def train_sequence(
    model: Any,
    tasks: Sequence[TaskRows],
    config: LearnerConfig,
    method: Naive | None = None,
    epochs: int = 1,
    per_step: int = 32,
    metric: Metric | None = None,
) -> dict[str, np.ndarray]:
    """Learn the tasks in turn, each with a fresh optimiser and schedule.

    Returns `loss` on the dev rows, and `score` by the metric: row i has all tasks after the i-th,
    row 0 before the first.
    """
    if len(tasks) < 2 or not all(task.train and task.dev for task in tasks):
        raise SharpenError("a sequence needs two tasks or more, each with train and dev rows")
    method = method or Naive()
    found: dict[str, list[list[float]]] = {}

    def evaluate(learner: Learner) -> None:
        found.setdefault("loss", []).append([learner.mean_loss(task.dev) for task in tasks])
        if metric:
            found.setdefault("score", []).append([metric(learner, task) for task in tasks])

    for number, task in enumerate(tasks):
        rows = method.rows(task)
        order = [i for e in range(epochs) for i in epoch_order([""] * len(rows), config.seed, e)]
        learner = Learner(model, config, math.ceil(len(order) / per_step))
        learner.before_clip.append(method.before_clip)
        if number == 0:
            evaluate(learner)
        for start in range(0, len(order), per_step):
            learner.step([rows[i] for i in order[start : start + per_step]], token_mean)
        method.after(learner, task)
        evaluate(learner)
    return {name: np.array(matrix) for name, matrix in found.items()}


def transfer_figures(found_T1_T: np.ndarray, higher_is_better: bool = True) -> dict[str, float]:
    """What a matrix of `train_sequence` says, signs turned so that higher is better.

    average: all tasks at the end. backward_transfer: what later tasks changed since a task was
    learned. forgetting: how far a task has fallen behind its best. forward_transfer: what a task
    had gained before its turn came.
    """
    good_T1_T = found_T1_T if higher_is_better else -found_T1_T
    before, after, last = good_T1_T[0], good_T1_T[1:], good_T1_T[-1]
    return {
        "average": float(last.mean()),
        "backward_transfer": float((last - np.diag(after))[:-1].mean()),
        "forgetting": float((after[:-1].max(0) - last)[:-1].mean()),
        "forward_transfer": float((np.diag(after, 1) - before[1:]).mean()),
    }
