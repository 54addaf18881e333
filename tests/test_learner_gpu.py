"""On a GPU: packed rows give the loss and gradients of padded ones, and compiled layers too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sharpen.models.load import LoRAConfig, ModelConfig, attach_lora, load_model
from sharpen.train.config import LearnerConfig
from sharpen.train.learner import Learner
from sharpen.train.sft import token_mean
from sharpen.types import Datum

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def rows() -> list[Datum]:
    chance = np.random.default_rng(0)
    lengths = (130, 12, 300, 77, 5, 210)
    return [
        Datum(chance.integers(0, 250, n).astype(np.int32), chance.random(n) < 0.7) for n in lengths
    ]


def learner(pico_folder, full: bool, **settings) -> Learner:
    model = load_model(ModelConfig(base_model=str(pico_folder), device="cuda", dtype="bfloat16"))
    torch.manual_seed(0)
    lora = LoRAConfig(lora_r=4, lora_dropout=0.0)
    model = model.requires_grad_(True) if full else attach_lora(model, lora)
    return Learner(
        model, LearnerConfig(**{"learning_rate": 1e-3, "warmup_ratio": 0, **settings}), 9
    )


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize(
    "settings",
    [{}, {"token_budget": 310}, {"compile": True}, {"compile": True, "activation_share": 0.4},
     {"gradient_checkpointing": True}],
)  # fmt: skip
def test_packed_equals_padded(pico_folder, full, settings):
    padded, packed = (
        learner(pico_folder, full, packing="off"),
        learner(pico_folder, full, **settings),
    )
    assert packed.packed and not padded.packed
    for step in range(5):
        a, b = (x.step(rows(), token_mean) for x in (padded, packed))
        assert abs(a.loss - b.loss) < 0.02 * a.loss
        assert step or abs(a.norm - b.norm) < 0.03 * a.norm  # bf16 steps drift apart later
    for x, y in zip(padded.logprobs(rows()), packed.logprobs(rows()), strict=True):
        np.testing.assert_allclose(x, y, atol=0.35)
