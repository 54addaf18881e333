"""On a GPU: GRPO samples through graphs from the weights that it steps, in turns or ahead."""

from __future__ import annotations

import pytest
import torch

from guessing import metrics, tasks
from sharpen.train.config.grpo import GRPOConfig
from sharpen.train.grpo import GRPOTrainer
from sharpen.types import Score

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("without_reports"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


class Short:
    def score(self, task, trajectory):
        return Score(1 / (1 + len(trajectory.turns[-1].message.content)))


@pytest.mark.parametrize(
    "more",
    [
        {"full": True},
        {"lora_r": 4},
        {"full": True, "async_steps": 1},
        {"lora_r": 4, "async_steps": 1},
    ],
)
def test_samples_are_of_the_stepped_weights(pico_folder, tmp_path, more):
    config = GRPOConfig(
        base_model=str(pico_folder), train_data=tasks(tmp_path), device="cuda", dtype="bfloat16",
        max_steps=6, tasks_per_step=4, group_size=8, max_tokens=24, learning_rate=1e-3, **more,
    )  # fmt: skip
    GRPOTrainer(config, tmp_path / "run", Short()).train()
    rows = metrics(tmp_path / "run")
    assert len(rows) == 6 and not any(row["skipped"] for row in rows)
    if "async_steps" in more:  # the old log-probabilities are the sampler's own
        assert all("staleness" in row and "mismatch" not in row for row in rows)
    else:
        assert all(row["mismatch"] < 0.05 and "staleness" not in row for row in rows)
