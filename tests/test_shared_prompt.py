"""A prompt that several rows share is computed once, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from sharpen.models.attention import packed_arguments
from sharpen.models.load import LoRAConfig, ModelConfig, attach_lora, load_model
from sharpen.models.shared_prompt import shared_attention, shares_prompts
from sharpen.train.batching import group_by_prompt, group_length, prompt_length
from sharpen.train.config.learner import LearnerConfig
from sharpen.train.learner import Learner
from sharpen.train.values import ValueModel
from sharpen.types import Datum

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
ON_GPU = [pytest.mark.gpu, NO_GPU]


def family(seed: int, prompt: int, rests: list[int]) -> list[Datum]:
    """Rows of one prompt, each with several trained stretches behind it."""
    chance = np.random.default_rng(seed)
    begin = chance.integers(0, 250, prompt)
    found = []
    for rest in rests:
        ids = np.concatenate([begin, chance.integers(0, 250, rest)]).astype(np.int32)
        mask = np.r_[np.zeros(prompt, bool), True, chance.random(rest - 1) < 0.6]
        column = chance.random(mask.sum()).astype(np.float32)
        found.append(Datum(ids, mask, weight=chance.random(), columns={"advantage": column}))
    return found


FAMILIES = st.tuples(st.integers(1, 30), st.lists(st.integers(1, 40), min_size=1, max_size=6))
ROWS = [*family(0, 30, [5, 12, 12, 1, 20, 9, 12, 7]), *family(1, 17, [25]), *family(2, 40, [8, 3])]
ROWS = [ROWS[i] for i in np.random.default_rng(0).permutation(len(ROWS))]


@pytest.mark.parametrize(
    ("device", "dtype", "heads", "width", "near"),
    [
        ("cpu", torch.float64, 2, 8, 1e-7),
        pytest.param("cuda", torch.bfloat16, 3, 64, 2e-2, marks=ON_GPU),
        pytest.param("cuda", torch.bfloat16, 1, 128, 2e-2, marks=ON_GPU),
    ],
)
def test_two_kernel_calls_equal_dense_attention(device, dtype, heads, width, near):
    """Two prompts of 5 and 3 tokens with rests, a row alone, and padding; `heads` share a key."""
    rows = [5, 3, 4, 1, 4, 2, 6, 7]
    extra = packed_arguments(rows, np.zeros(35), device, [3, 2])
    torch.manual_seed(0)
    shapes = [(35, 2 * heads, width), *[(35, 2, width)] * 2, (35, 2 * heads, width)]
    q, k, v, slope = (torch.randn(shape, dtype=dtype, device=device) for shape in shapes)
    stretch = torch.arange(9).repeat_interleave(torch.tensor([*rows, 3]))
    prompt = torch.tensor([-1, -1, 0, 0, 0, 1, 1, -1, -1])[stretch]
    seen = (stretch[:, None] == stretch) & (torch.ones(35, 35).tril() > 0)
    seen = (seen | (prompt[:, None] == stretch)).to(device)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    a, b, c = (t.transpose(0, 1) for t in exact)
    wanted = F.scaled_dot_product_attention(a, b, c, seen, scale=0.1, enable_gqa=True)
    wanted = wanted.transpose(0, 1)
    ours = [t.requires_grad_() for t in (q, k, v)]
    found, _ = shared_attention(*ours, extra["row_ends"], *extra["shared"], 0.1)
    slopes = torch.autograd.grad(found, ours, slope)
    right = torch.autograd.grad(wanted, exact, slope.double())
    for a, b in zip((found, *slopes), (wanted, *right), strict=True):
        assert (a.double() - b).norm() < near * b.norm()


@settings(max_examples=60)
@given(st.lists(FAMILIES, min_size=1, max_size=4), st.integers(1, 200), st.randoms())
def test_trees(families, budget, chance):
    rows = [row for seed, found in enumerate(families) for row in family(seed, *found)]
    chance.shuffle(rows)
    trees = group_by_prompt(rows, budget)
    assert sorted(i for tree in trees for i in tree) == list(range(len(rows)))
    for tree in ([rows[i] for i in tree] for tree in trees if len(tree) > 1):
        begin = tree[0].ids[: prompt_length(tree[0])]
        alone = sum(len(row.ids) for row in tree)
        assert all(np.array_equal(row.ids[: prompt_length(row)], begin) for row in tree)
        assert group_length(tree, range(len(tree))) <= min(budget, 7 * alone / 8)


def learner(pico_folder, kind: str = "model", full: bool = True, **settings) -> Learner:
    torch.manual_seed(0)
    head = "CausalLM" if kind == "model" else "SequenceClassification"
    model = load_model(ModelConfig(base_model=str(pico_folder), device="cpu"), head)
    lora = LoRAConfig(lora_r=4, lora_dropout=0.0)
    model = model.requires_grad_(True) if full else attach_lora(model, lora)
    core = None if kind == "model" else ValueModel(model, before=kind == "critic")
    return Learner(model, LearnerConfig(learning_rate=1e-3, warmup_ratio=0, **settings), 9, core)


def weighted_loss(values_N, batch, _):
    return (values_N * batch.weight_N * (batch.columns["advantage"] + batch.row_N * 0)).sum()


@pytest.mark.parametrize(
    ("kind", "full", "settings"),
    [
        ("model", True, {}),
        ("model", False, {"token_budget": 60}),
        ("model", True, {"gradient_checkpointing": True}),
        ("reward", True, {}),
        ("critic", True, {"token_budget": 100}),
    ],
)
def test_shared_rows_have_the_same_values_and_gradients(pico_folder, kind, full, settings):
    one = learner(pico_folder, kind, full, **settings)
    assert one.core.shares
    assert one.core.batch(ROWS).tokens_B_T.numel() < 0.65 * sum(len(row.ids) for row in ROWS)
    found = []
    for one.core.shares in (True, False):
        values = np.concatenate(one.logprobs(ROWS))
        report = one.accumulate(ROWS, weighted_loss, 1.0)
        slope = torch.cat([p.grad.flatten() for p in one.trained.values()])
        found.append((values, report, slope))
    np.testing.assert_allclose(found[0][0], found[1][0], atol=1e-5)
    assert abs(found[0][1] - found[1][1]) < 1e-4
    assert (found[0][2] - found[1][2]).norm() < 1e-5 * found[1][2].norm()


def test_rows_that_share_nothing_are_laid_out_as_ever(pico_folder):
    one = learner(pico_folder)
    rows = [replace(row, ids=row.ids + n) for n, row in enumerate(ROWS)]
    assert group_by_prompt(rows, 10_000) == [[n] for n in range(len(rows))]
    assert not one.core.batch(rows).extra and one.core.batch(rows).tokens_B_T.shape == (11, 50)
    assert one.step(ROWS, weighted_loss).tokens == sum(len(row.ids) for row in ROWS)


@pytest.mark.parametrize(
    ("settings", "shared"),
    [
        ({}, True),
        ({"sliding_window": 8}, False),
        ({"layer_types": ["full_attention", "sliding_attention"]}, False),
        ({"layer_types": ["full_attention"] * 2, "sliding_window": 8}, True),
        ({"attention_dropout": 0.1}, False),
    ],
)
def test_where_the_place_in_the_line_matters_nothing_is_shared(pico_folder, settings, shared):
    decoder = load_model(ModelConfig(base_model=str(pico_folder), device="cpu")).model
    for name, value in settings.items():
        setattr(decoder.config, name, value)
    assert shares_prompts(decoder) == shared
    del decoder.rotary_emb
    assert not shares_prompts(decoder)


def test_a_line_of_one_row_without_padding():
    arguments = packed_arguments([300], np.arange(300), "cpu")
    assert arguments["row_ends"].tolist() == [0, 300]
    assert arguments["longest_row"] >= 300
