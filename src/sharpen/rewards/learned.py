"""Score with a trained reward model, and measure how well its confidence is calibrated.

Recipes use it as the reward `learned`; `train/reward_model.py` writes its folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sharpen.models.find import find_model
from sharpen.models.load import ModelConfig, load_model, load_tokenizer
from sharpen.records import read_json
from sharpen.render import Renderer, batched
from sharpen.types import Datum, Dialog, Json, Score, SharpenError, Task, Trajectory

KIND_FILE = "reward.json"


class LearnedReward:
    """A reward model's folder as a `Reward`.

    An outcome model scores the last turn, on an open scale. A process model scores each turn with
    a probability: these are the parts, and the lowest is the value."""

    def __init__(self, path: str | Path, device: str = "auto", batch_size: int = 16):
        self.process = _read_kind(find_model(str(path))) == "process"
        self.batch_size = batch_size
        config = ModelConfig(base_model=str(path), device=device)
        model = load_model(config, "SequenceClassification")
        self.model: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.renderer = Renderer(load_tokenizer(str(path)))

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        return self.score_all([(task, trajectory)])[0]

    def score_all(self, items: Sequence[tuple[Task, Trajectory]]) -> list[Score]:
        """Score many trajectories, in batches."""
        dialogs = [_dialog_of(task, trajectory) for task, trajectory in items]
        scores = []
        for (_, trajectory), values in zip(items, self.values(dialogs), strict=True):
            # the values before these belong to assistant turns of the task's context
            turn_values = values[-len(trajectory.turns) :].astype(np.float64)
            probabilities = 1 / (1 + np.exp(-turn_values))
            if self.process:
                parts = {f"turn_{n}": float(p) for n, p in enumerate(probabilities, 1)}
                scores.append(Score(min(probabilities), parts))
            else:
                scores.append(Score(float(values[-1])))
        return scores

    def values(self, dialogs: Sequence[Dialog]) -> list[np.ndarray]:
        """Returns for each dialog the model's value at the end of each assistant turn."""
        import torch

        datums = list(self.renderer.render(dialogs))
        values_per_dialog: list[np.ndarray] = []
        decoder = getattr(self.model, self.model.base_model_prefix)
        for batch in batched(datums, self.batch_size):
            width = max(len(datum.ids) for datum in batch)
            # causal attention: padding after a row cannot reach it, so no mask is needed
            rows = np.stack([np.pad(datum.ids, (0, width - len(datum.ids))) for datum in batch])
            with torch.no_grad():
                tokens_BT = torch.from_numpy(rows).to(self.model.device)
                hidden_BTD = decoder(tokens_BT, use_cache=False).last_hidden_state
                values_BT = self.model.score(hidden_BTD)[..., 0].float().cpu().numpy()
            for values_T, datum in zip(values_BT, batch, strict=True):
                values_per_dialog.append(values_T[turn_ends(datum)])
        return values_per_dialog


def _dialog_of(task: Task, trajectory: Trajectory) -> Dialog:
    """The task's messages, followed by the trajectory's."""
    messages = list(task.messages)
    for turn in trajectory.turns:
        messages += [turn.message, *turn.results]
    return Dialog(tuple(messages), task.tools, task.id)


def _read_kind(folder: Path) -> str:
    """Returns what a folder's model scores: `outcome` or `process`.

    A plain language model is refused: it would be loaded with a random head."""
    if (folder / KIND_FILE).is_file():
        return read_json(folder / KIND_FILE)["kind"]
    config = folder / "config.json"
    if config.is_file() and "SequenceClass" in str(read_json(config).get("architectures")):
        return "outcome"
    raise SharpenError(f"{folder}: not a reward model; sharpen train reward makes one")


def turn_ends(datum: Datum) -> np.ndarray:
    """Returns the position of each assistant turn's last token."""
    next_is_trained = np.append(datum.mask[1:], False)
    return np.flatnonzero(datum.mask & ~next_is_trained)


def calibration(margins_N: np.ndarray, bins: int = 10) -> Json:
    """Compare how sure a model was with how often it was right (a margin above zero).

    Returns mean confidence, accuracy and count of each bin, and their mean distance (`ece`)."""
    confidence_N = 1 / (1 + np.exp(-np.abs(margins_N)))
    right_N = margins_N > 0
    bin_N = np.minimum((confidence_N - 0.5) * 2 * bins, bins - 1).astype(int)
    rows = []
    for number in np.unique(bin_N):
        in_bin_N = bin_N == number
        rows.append(
            {
                "confidence": confidence_N[in_bin_N].mean().item(),
                "accuracy": right_N[in_bin_N].mean().item(),
                "count": in_bin_N.sum().item(),
            }
        )
    error = sum(abs(row["confidence"] - row["accuracy"]) * row["count"] for row in rows)
    return {"ece": error / len(margins_N), "bins": rows}
