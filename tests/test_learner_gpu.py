"""On a GPU: packed rows give the loss and gradients of padded ones, and compiled layers too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sharpen.models.load import LoRAConfig, ModelConfig, attach_lora, load_model
from sharpen.train.config.learner import LearnerConfig
from sharpen.train.learner import Learner
from sharpen.train.sft import token_mean
from sharpen.types import Datum
from test_shared_prompt import ROWS, weighted_loss

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


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize(
    "settings", [{}, {"token_budget": 100}, {"compile": True}, {"gradient_checkpointing": True}]
)
def test_shared_prompts_equal_whole_rows(pico_folder, full, settings):
    one, found = learner(pico_folder, full, **settings), []
    assert one.core.shares and not learner(pico_folder, full, packing="off").core.shares
    for one.core.shares in (True, False):
        values = np.concatenate(one.logprobs(ROWS))
        one.model.train()
        loss = one.accumulate(ROWS, weighted_loss, 1.0)
        slope = torch.cat([p.grad.flatten() for p in one.master.values()])
        found.append((values, loss, slope))
    (values, loss, slope), (wanted, other, right) = found
    np.testing.assert_allclose(values, wanted, atol=0.1)
    assert abs(loss - other) < 0.01 * abs(other)
    assert (slope - right).norm() < 0.05 * right.norm()


@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_a_quantised_base_learns(pico_folder, bits):
    pytest.importorskip("bitsandbytes")
    model = load_model(ModelConfig(base_model=str(pico_folder), **{bits: True}))
    torch.manual_seed(0)
    model = attach_lora(model, LoRAConfig(lora_r=4, lora_dropout=0.0))
    trained = Learner(model, LearnerConfig(learning_rate=1e-2, warmup_ratio=0), 20)
    losses = [trained.step(rows(), token_mean).loss for _ in range(15)]
    assert losses[-1] < losses[0] - 0.05


def test_8bit_adamw_learns_and_resumes(pico_folder):
    pytest.importorskip("bitsandbytes")
    settings = {"optimizer": "adamw_8bit", "learning_rate": 1e-3}
    whole, parts = (learner(pico_folder, True, **settings) for _ in range(2))
    losses = [whole.step(rows(), token_mean).loss for _ in range(6)]
    again = [parts.step(rows(), token_mean).loss for _ in range(3)]
    state = parts.state()
    parts = learner(pico_folder, True, **settings)
    parts.load_state({k: v.cpu() for k, v in state[0].items()}, state[1])
    again += [parts.step(rows(), token_mean).loss for _ in range(3)]
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(again, losses, rtol=2e-3)


def test_a_full_gpu_halves_the_micro_batch(pico_folder, capsys):
    """Activations of the whole step do not fit below the limit, half of them do."""
    many = [Datum(np.arange(2000, dtype=np.int32) % 250, np.ones(2000, bool)) for _ in range(64)]
    free = learner(pico_folder, True, token_budget=1 << 17, packing="off")
    torch.cuda.reset_peak_memory_stats()
    wanted = free.step(many, token_mean).loss
    peak = torch.cuda.max_memory_allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    tight = learner(pico_folder, True, token_budget=1 << 17, packing="off")
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.7 * peak / total)
    try:
        found = tight.step(many, token_mean).loss
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "out of GPU memory: micro-batches of 65536 tokens from now on" in capsys.readouterr().out
    assert abs(found - wanted) < 0.01 * wanted
