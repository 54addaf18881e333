"""The optimiser steps that GRPO and PPO share: the clipped surrogate loss as the learner wants it,
weighted rows, and the figures of an update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from sharpen.train.collate import Batch
from sharpen.train.learner import Loss, StepReport
from sharpen.train.losses import Surrogate, policy_loss
from sharpen.types import Datum, Json

NO_UPDATE: Json = {"loss": 0.0, "tokens": 0, "trained": 0, "skipped": True}
FigureSums = dict[str, Any]  # name → the figure's sum over all tokens of an update


def weighted_rows(
    rows: Sequence[Datum], sample_of_row: np.ndarray, sample_weights: np.ndarray
) -> list[Datum]:
    """Returns the rows of samples with a weight above 0, each with the weight of its sample."""
    weighted = []
    for row, weight in zip(rows, sample_weights[sample_of_row].tolist(), strict=True):
        if weight:
            weighted.append(replace(row, weight=weight))
    return weighted


def surrogate_loss(surrogate: Surrogate, sums: FigureSums) -> Loss:
    """Returns the loss for the learner; it adds the figures of every micro-batch to `sums`."""

    def loss(logprobs_N: torch.Tensor, batch: Batch, _: float) -> torch.Tensor:
        value, figures = policy_loss(
            logprobs_N, batch.weight_N, batch.row_N, batch.columns, surrogate
        )
        for name, figure in figures.items():
            sums[name] = sums.get(name, 0.0) + figure
        return value

    return loss


def update_figures(reports: Sequence[StepReport], sums: FigureSums, seconds: float) -> Json:
    """Returns the mean loss and gradient norm of an update's optimiser steps, and the figures of
    their tokens."""
    row = asdict(reports[-1])
    row["loss"] = float(np.mean([report.loss for report in reports]))
    row["norm"] = float(np.mean([report.norm for report in reports]))
    row["tokens"] = sum(report.tokens for report in reports)
    row["trained"] = sum(report.trained for report in reports)
    row["skipped"] = any(report.skipped for report in reports)
    count = float(sums["count"])
    for name, value in sums.items():
        if name != "count":
            row[name] = float(value) / count
    row["update_seconds"] = seconds
    row["update_tokens_per_s"] = row["tokens"] / seconds
    return row
