"""A trained reward model as a `Reward`, and how sure it may be."""

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
    """A reward model's folder. The score of an outcome model is the value of the last turn, on an
    open scale; of a process model the lowest of its turns' probabilities, which are the parts."""

    def __init__(self, path: str | Path, device: str = "auto", batch_size: int = 16):
        self.process, self.batch_size = kind_of(find_model(str(path))) == "process", batch_size
        config = ModelConfig(base_model=str(path), device=device)
        model = load_model(config, "SequenceClassification")
        self.model: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.renderer = Renderer(load_tokenizer(str(path)))

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        return self.score_all([(task, trajectory)])[0]

    def score_all(self, items: Sequence[tuple[Task, Trajectory]]) -> list[Score]:
        dialogs, scores = [], []
        for task, made in items:
            said = [m for turn in made.turns for m in (turn.message, *turn.results)]
            dialogs.append(Dialog((*task.messages, *said), task.tools, task.id))
        for (_, made), values in zip(items, self.values(dialogs), strict=True):
            own = 1 / (1 + np.exp(-values[-len(made.turns) :].astype(np.float64)))
            parts = {f"turn_{number}": float(p) for number, p in enumerate(own, 1)}
            scores.append(Score(min(own), parts) if self.process else Score(float(values[-1])))
        return scores

    def values(self, dialogs: Sequence[Dialog]) -> list[np.ndarray]:
        """The value at the end of each assistant turn."""
        import torch

        datums, found = list(self.renderer.render(dialogs)), list[np.ndarray]()
        decoder = getattr(self.model, self.model.base_model_prefix)
        for batch in batched(datums, self.batch_size):
            width = max(len(d.ids) for d in batch)
            # padding behind a row cannot reach it: no mask is needed
            rows = np.stack([np.pad(d.ids, (0, width - len(d.ids))) for d in batch])
            with torch.no_grad():
                tokens = torch.from_numpy(rows).to(self.model.device)
                hidden = decoder(tokens, use_cache=False).last_hidden_state
                values = self.model.score(hidden)[..., 0].float().cpu().numpy()
            found += [row[turn_ends(datum)] for row, datum in zip(values, batch, strict=True)]
        return found


def kind_of(folder: Path) -> str:
    """What a folder's model scores; a language model would be given a random head."""
    if (folder / KIND_FILE).is_file():
        return read_json(folder / KIND_FILE)["kind"]
    config = folder / "config.json"
    if config.is_file() and "SequenceClass" in str(read_json(config).get("architectures")):
        return "outcome"
    raise SharpenError(f"{folder}: not a reward model; sharpen train reward makes one")


def turn_ends(datum: Datum) -> np.ndarray:
    """Where each assistant turn's last token stands."""
    return np.flatnonzero(datum.mask & ~np.append(datum.mask[1:], False))


def calibration(margins_N: np.ndarray, bins: int = 10) -> Json:
    """How sure a model was against how often it was right (a margin above zero): mean confidence,
    accuracy and count of each bin, and their mean distance (`ece`)."""
    sure_N, right_N = 1 / (1 + np.exp(-np.abs(margins_N))), margins_N > 0
    bin_N = np.minimum((sure_N - 0.5) * 2 * bins, bins - 1).astype(int)
    rows, names = [], ("confidence", "accuracy", "count")
    for inside in (bin_N == number for number in np.unique(bin_N)):
        found = sure_N[inside].mean(), right_N[inside].mean(), inside.sum()
        rows.append(dict(zip(names, (value.item() for value in found), strict=True)))
    error = sum(abs(row["confidence"] - row["accuracy"]) * row["count"] for row in rows)
    return {"ece": error / len(margins_N), "bins": rows}
