"""Tasks learned one after another: what is forgotten and what is carried over, and three methods
against forgetting (rehearsal, EWC, DER++) behind one interface.

Call `train_sequence` with one of the methods, then `transfer_figures` on what it returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sharpen.data.replay import OnlineContinualLearner
from sharpen.train.batching import epoch_order, micro_batches, trained_tokens
from sharpen.train.collate import collate
from sharpen.train.config.learner import LearnerConfig
from sharpen.train.learner import Learner
from sharpen.train.sft import token_mean
from sharpen.types import Datum, Json, SharpenError

_State = tuple[dict[str, torch.Tensor], Json]  # tensors and plain values, as in a checkpoint


@dataclass(frozen=True, slots=True)
class TaskRows:
    """One task of a sequence."""

    name: str
    train: Sequence[Datum]
    dev: Sequence[Datum]


_Metric = Callable[[Learner, TaskRows], float]  # higher is better


# Methods ---------------------------------------------------------------------------------------


class Naive:
    """Each task as it comes. What the other methods change, they override."""

    def rows(self, task: TaskRows) -> list[Datum]:
        """Return the rows to train on in this task."""
        return list(task.train)

    def before_clip(self, learner: Learner) -> None:
        """Add to the gradients; called in every step, when they hold the task's gradients."""

    def after(self, learner: Learner, task: TaskRows) -> None:
        """Remember what the next tasks need; called when the task is learned."""

    def state(self) -> _State:
        return {}, {}

    def load_state(self, tensors: dict[str, torch.Tensor], values: Json) -> None:
        pass


class Rehearsal(Naive):
    """Rows of earlier tasks are trained on beside the new ones."""

    def __init__(self, buffer: OnlineContinualLearner):
        self.buffer = buffer

    def rows(self, task: TaskRows) -> list[Datum]:
        """Return the task's rows and replayed ones."""
        count = round(self.buffer.replay_ratio * len(task.train))
        return [*task.train, *self.buffer.replay(count)]

    def after(self, learner: Learner, task: TaskRows) -> None:
        """Offer the task's rows to the buffer."""
        self._observe(task.train, learner.logprobs(task.train))

    def _observe(self, rows: Sequence[Datum], logprobs: Sequence[np.ndarray]) -> None:
        losses = [-float(values.mean()) for values in logprobs]
        self.buffer.observe(rows, losses)
        self.buffer.round += 1

    def state(self) -> _State:
        return {}, {"buffer": self.buffer.state()}

    def load_state(self, tensors: dict[str, torch.Tensor], values: Json) -> None:
        self.buffer.load_state(values["buffer"])


class DarkReplay(Rehearsal):
    """DER++: every step replays `count` rows of the buffer with a loss of their own.

    It is alpha · the mean squared distance of their log-probabilities from those they had when they
    were saved, plus beta · their negative log-likelihood.
    """

    def __init__(
        self, buffer: OnlineContinualLearner, alpha: float = 0.5, beta: float = 0.5, count: int = 8
    ):
        super().__init__(buffer)
        self.alpha = alpha
        self.beta = beta
        self.count = count
        # row id → log-probabilities of its trained tokens when it was saved
        self.saved_logprobs: dict[str, np.ndarray] = {}

    def rows(self, task: TaskRows) -> list[Datum]:
        """Return the task's rows alone; the replayed ones come in `before_clip`."""
        return list(task.train)

    def before_clip(self, learner: Learner) -> None:
        """Add the gradients of the replayed rows."""
        rows = self.buffer.replay(self.count)
        if not rows:
            return
        tokens = sum(trained_tokens(row) for row in rows)
        lengths = [len(row.ids) for row in rows]
        for indices in micro_batches(lengths, learner.token_budget, learner.packed):
            batch_rows = [rows[index] for index in indices]
            batch = collate(batch_rows, learner.device, learner.packed)
            saved = np.concatenate([self.saved_logprobs[row.id] for row in batch_rows])
            saved_N = torch.from_numpy(saved).to(learner.device)
            current_N = learner.core(batch)
            distance_N = (current_N - saved_N) ** 2
            loss = (self.alpha * distance_N - self.beta * current_N).sum() / tokens
            loss.backward()
            learner.gather_gradients()

    def after(self, learner: Learner, task: TaskRows) -> None:
        """Offer the task's rows to the buffer, and save the log-probabilities of all rows in it."""
        rows = [replace(row, id=f"{task.name}/{n}") for n, row in enumerate(task.train)]
        logprobs = learner.logprobs(rows)
        self._observe(rows, logprobs)
        known_logprobs = dict(self.saved_logprobs)
        for row, values in zip(rows, logprobs, strict=True):
            known_logprobs[row.id] = values
        self.saved_logprobs = {}
        for heap in self.buffer.heaps.values():
            for entry in heap:
                row_id = entry[4].id
                self.saved_logprobs[row_id] = known_logprobs[row_id]

    def state(self) -> _State:
        tensors = {name: torch.from_numpy(values) for name, values in self.saved_logprobs.items()}
        _, plain_values = super().state()
        return tensors, plain_values

    def load_state(self, tensors: dict[str, torch.Tensor], values: Json) -> None:
        super().load_state(tensors, values)
        self.saved_logprobs = {name: tensor.numpy() for name, tensor in tensors.items()}


class EWC(Naive):
    """Elastic weight consolidation: the loss gains strength/2 · Σ F (w − w₀)², where F is the sum
    of the finished tasks' Fisher diagonals and w₀ the weights after the last of them."""

    def __init__(self, strength: float, fisher_rows: int = 200):
        self.strength = strength
        self.fisher_rows = fisher_rows
        self.penalty: dict[str, torch.Tensor] = {}  # fisher.NAME and anchor.NAME (F and w₀)

    @torch.no_grad()
    def before_clip(self, learner: Learner) -> None:
        """Add the gradient of the penalty."""
        if not self.penalty:
            return
        # A checkpoint's tensors come on the CPU; where they are in place already, this moves none.
        self.penalty = {name: tensor.to(learner.device) for name, tensor in self.penalty.items()}
        for name, weight in learner.master.items():
            distance = weight - self.penalty[f"anchor.{name}"]
            gradient = self.strength * self.penalty[f"fisher.{name}"] * distance
            if weight.grad is None:
                weight.grad = gradient
            else:
                weight.grad.add_(gradient)

    def after(self, learner: Learner, task: TaskRows) -> None:
        """Add the task's Fisher diagonal, from about `fisher_rows` of its rows, and move the
        anchor."""
        every = math.ceil(len(task.train) / self.fisher_rows)
        for name, fisher in fisher_diagonal(learner, task.train[::every]).items():
            self.penalty[f"fisher.{name}"] = self.penalty.get(f"fisher.{name}", 0) + fisher
            self.penalty[f"anchor.{name}"] = learner.master[name].detach().clone()

    def state(self) -> _State:
        return self.penalty, {}

    def load_state(self, tensors: dict[str, torch.Tensor], values: Json) -> None:
        self.penalty = dict(tensors)


def fisher_diagonal(learner: Learner, datums: Sequence[Datum]) -> dict[str, torch.Tensor]:
    """Return the mean over rows of the squared gradient of a row's mean loss (the empirical Fisher
    information) for every trained weight, with dropout off."""
    learner.model.eval()
    fisher = {name: torch.zeros_like(weight) for name, weight in learner.master.items()}
    for datum in datums:
        learner.accumulate([datum], token_mean, float(trained_tokens(datum)))
        for name, weight in learner.master.items():
            if weight.grad is not None:
                fisher[name] += weight.grad.detach() ** 2 / len(datums)
    learner.optimizer.zero_grad(set_to_none=True)
    return fisher


# Sequences of tasks ----------------------------------------------------------------------------


def train_sequence(
    model: Any,
    tasks: Sequence[TaskRows],
    config: LearnerConfig,
    method: Naive | None = None,
    epochs: int = 1,
    per_step: int = 32,
    metric: _Metric | None = None,
) -> dict[str, np.ndarray]:
    """Learn the tasks in turn, each with a fresh optimiser and schedule.

    Returns the matrices `loss`, of the dev rows, and `score`, by the metric if there is one. Row i
    holds all tasks after the i-th was learned, row 0 before the first.
    """
    if len(tasks) < 2 or not all(task.train and task.dev for task in tasks):
        raise SharpenError("a sequence needs two tasks or more, each with train and dev rows")
    method = method or Naive()
    loss_rows: list[list[float]] = []
    score_rows: list[list[float]] = []

    def evaluate(learner: Learner) -> None:
        loss_rows.append([learner.mean_loss(task.dev) for task in tasks])
        if metric:
            score_rows.append([metric(learner, task) for task in tasks])

    for number, task in enumerate(tasks):
        rows = method.rows(task)
        order: list[int] = []
        for epoch in range(epochs):
            order += epoch_order([""] * len(rows), config.seed, epoch)
        learner = Learner(model, config, math.ceil(len(order) / per_step))
        learner.before_clip.append(method.before_clip)
        if number == 0:
            evaluate(learner)
        for start in range(0, len(order), per_step):
            step_rows = [rows[index] for index in order[start : start + per_step]]
            learner.step(step_rows, token_mean)
        method.after(learner, task)
        evaluate(learner)
    matrices = {"loss": np.array(loss_rows)}
    if metric:
        matrices["score"] = np.array(score_rows)
    return matrices


def transfer_figures(matrix_T1_T: np.ndarray, higher_is_better: bool = True) -> dict[str, float]:
    """Summarise a matrix of `train_sequence`, with signs turned so that higher is better.

    average: all tasks at the end. backward_transfer: how later tasks changed a task after it was
    learned. forgetting: how far a task has fallen below its best. forward_transfer: what a task had
    gained before it was learned.
    """
    score_T1_T = matrix_T1_T if higher_is_better else -matrix_T1_T
    before_T = score_T1_T[0]
    after_T_T = score_T1_T[1:]
    last_T = score_T1_T[-1]
    best_before_last_T = after_T_T[:-1].max(0)
    return {
        "average": float(last_T.mean()),
        "backward_transfer": float((last_T - np.diag(after_T_T))[:-1].mean()),
        "forgetting": float((best_before_last_T - last_T)[:-1].mean()),
        "forward_transfer": float((np.diag(after_T_T, 1) - before_T[1:]).mean()),
    }
