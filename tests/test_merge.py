"""Merge methods as algebra on state dicts, the numbers below them, and settings of recipes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import merge_models as mm
from sharpen.merge import tiles
from sharpen.merge.merger import merge_dicts
from sharpen.merge.method import METHODS
from sharpen.merge.recipe import evaluate
from sharpen.spec.merging import ModelMerger, TaskVectorArithmetic
from sharpen.types import SharpenError

DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64])
SEEDS = st.integers(0, 2**32 - 1)


def some(seed: int, dtype: torch.dtype, count: int, shape: tuple[int, ...] = (6, 7)) -> list[dict]:
    random = torch.Generator().manual_seed(seed)
    draws = [torch.randn(shape, generator=random).to(dtype) for _ in range(count)]
    return [{"w": draw} for draw in draws]


# ---- algebra ---------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(SEEDS, DTYPES, st.sampled_from(sorted(mm.METHOD_PARAMETERS)))
def test_models_that_are_the_base_merge_to_the_base(
    seed: int, dtype: torch.dtype, name: str
) -> None:
    (model,) = some(seed, dtype, 1)
    merged = merge_dicts(name, [model, model, model], mm.METHOD_PARAMETERS[name])["w"]
    torch.testing.assert_close(merged, model["w"], rtol=1e-6, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(SEEDS, DTYPES, st.floats(0, 1))
def test_a_model_merged_with_itself_is_itself(seed: int, dtype: torch.dtype, t: float) -> None:
    (model,) = some(seed, dtype, 1)
    exact = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
    for merged in (
        ModelMerger.average_merge([model, model]),
        ModelMerger.slerp_merge(model, model, t),
        merge_dicts("karcher", [model, model, model], {}),
        merge_dicts("nearswap", [model, model], {"t": t}),
        merge_dicts("passthrough", [model], {"scale": [None]}),
    ):
        torch.testing.assert_close(merged["w"], model["w"], **exact)


@settings(max_examples=40, deadline=None)
@given(SEEDS, DTYPES)
def test_negate_then_add_is_the_base(seed: int, dtype: torch.dtype) -> None:
    base, tuned = some(seed, dtype, 2)
    vector = TaskVectorArithmetic.compute_task_vector(base, tuned)
    negated = TaskVectorArithmetic.negate_task_vector(vector)
    nothing = TaskVectorArithmetic.add_task_vectors([vector, negated])
    assert torch.equal(nothing["w"], torch.zeros_like(nothing["w"]))
    assert torch.equal(TaskVectorArithmetic.apply_task_vector(base, nothing)["w"], base["w"])
    again = TaskVectorArithmetic.apply_task_vector(base, vector)["w"]
    torch.testing.assert_close(again, tuned["w"], rtol=1e-6, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.permutations(range(3)), st.sampled_from(["linear", "karcher", "ties", "sce"]))
def test_order_does_not_matter(seed: int, order: list[int], name: str) -> None:
    base, *models = some(seed, torch.float32, 4)
    weights = [0.5, 0.2, 0.3]
    values = {
        "linear": lambda w: {"weight": w},
        "ties": lambda w: {"weight": w, "density": [0.6] * 3},
    }
    first = [base] if METHODS[name].base == "required" else []
    make = values.get(name, lambda w: {})
    plain = merge_dicts(name, [*first, *models], make(weights))["w"]
    turned = [models[i] for i in order]
    again = merge_dicts(name, [*first, *turned], make([weights[i] for i in order]))["w"]
    torch.testing.assert_close(plain, again, rtol=1e-4, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(SEEDS, DTYPES, st.floats(0, 1))
def test_slerp_keeps_length_on_the_sphere_and_its_ends(
    seed: int, dtype: torch.dtype, t: float
) -> None:
    a, b = some(seed, dtype, 2)
    unit = [{"w": m["w"].double() / m["w"].double().norm()} for m in (a, b)]
    assert ModelMerger.slerp_merge(*unit, t)["w"].norm().item() == pytest.approx(1, abs=1e-6)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(ModelMerger.slerp_merge(a, b, 0.0)["w"], a["w"], rtol=eps, atol=1e-6)
    torch.testing.assert_close(ModelMerger.slerp_merge(a, b, 1.0)["w"], b["w"], rtol=eps, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(SEEDS, DTYPES, st.floats(0, 1))
def test_ties_keeps_exactly_the_wanted_number(
    seed: int, dtype: torch.dtype, density: float
) -> None:
    (model,) = some(seed, dtype, 1)
    model["w"].view(-1)[:9] = model["w"].view(-1)[0]  # equal sizes at the limit, sometimes
    zero = {"w": torch.zeros_like(model["w"])}
    merged = ModelMerger.ties_merge(zero, [model], density=density)["w"]
    wanted = max(1, int(density * 42)) if density > 0 else 0
    assert int(merged.count_nonzero()) == min(wanted, int(model["w"].count_nonzero()))
    kept = model["w"][merged != 0].abs()
    dropped = model["w"][merged == 0].abs()
    assert not len(kept) or not len(dropped) or kept.min() >= dropped.max()


def test_ties_elects_by_mass_and_averages_those_that_agree() -> None:
    base = {"w": torch.zeros(4)}
    models = [
        {"w": torch.tensor(v)}
        for v in ([3.0, 1.0, 0.0, -1.0], [1.0, -4.0, 2.0, 0.5], [-1.0, 1.0, 0.0, -2.0])
    ]
    merged = ModelMerger.ties_merge(base, models, density=1.0)["w"]
    assert merged.tolist() == [2.0, -4.0, 2.0, -1.5]
    plain = ModelMerger.ties_merge(base, models, density=1.0, majority_sign=False)["w"]
    assert plain.tolist() == pytest.approx([1.0, -2 / 3, 2.0, -2.5 / 3])


def test_dare_drops_and_rescales() -> None:
    base = {"w": torch.zeros(400, 50)}
    tuned = {"w": torch.ones(400, 50)}
    merged = ModelMerger.dare_merge(base, [tuned], drop_rate=0.9)["w"]
    assert merged.unique().tolist() == pytest.approx([0.0, 10.0], rel=1e-6)
    assert merged.count_nonzero() / 20_000 == pytest.approx(0.1, abs=0.01)
    plain = ModelMerger.dare_merge(base, [tuned], drop_rate=0.9, rescale=False)["w"]
    assert set(plain.unique().tolist()) == {0.0, 1.0}
    assert not torch.equal(merged, ModelMerger.dare_merge(base, [tuned], seed=1)["w"])


def test_average_refuses_weights_that_do_not_sum_to_one() -> None:
    with pytest.raises(SharpenError, match="sum to"):
        ModelMerger.average_merge(some(0, torch.float32, 2), [0.5, 0.6])


# ---- numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_that_of_torch(dtype: torch.dtype) -> None:
    """Random numbers of every size, those half-way between two, and small integers."""
    random = torch.Generator().manual_seed(0)
    name = str(dtype).removeprefix("torch.")
    draws = torch.randn(60_000, generator=random)
    halves = (
        draws.to(dtype).float().view(torch.int32) | (1 << tiles.HALF_PRECISION[name][0] - 1)
    ).view(torch.float32)
    low, high = (1e-37, 1e33) if dtype == torch.bfloat16 else (0.0, 65_000)
    sizes = torch.exp(draws * 30).clamp(low, high)
    for values in (draws, -draws, halves, -halves, sizes, torch.arange(5000.0)):
        wanted = values.to(dtype)
        for copy in (values.clone(), values.clone().numpy()):
            assert torch.equal(torch.as_tensor(tiles.round_in_place(copy, name)), wanted.float())
        raw = torch.from_numpy(tiles.encode(values.clone().numpy(), name).view("int16"))
        assert torch.equal(raw.view(dtype), wanted)
        assert torch.equal(
            torch.from_numpy(tiles.decode(raw.numpy().view(tiles.DTYPES[name][1]), name)),
            wanted.float(),
        )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bit_floats_are_read(dtype: torch.dtype) -> None:
    raw = torch.arange(256).to(torch.uint8)
    found = tiles.decode(raw.numpy(), str(dtype).removeprefix("torch."))
    wanted = raw.view(dtype).float()
    torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_selection_is_exact_across_tiles(kind: str) -> None:
    values = torch.randn(64, 33).float()
    pieces = [p if kind == "torch" else p.numpy() for p in values.split(5)]
    x = tiles.Tiles(
        len(pieces), lambda i: tiles.Tile((pieces[i],), i, i * 5 * 33), values.numel(), "float32"
    )
    for k in (1, 7, 1000, values.numel()):
        (top,) = tiles.find_top_k(x, lambda t: [tiles.magnitudes(t.tensors[0])], [(0, k)])
        masks = [torch.as_tensor(top.mask(i, tiles.magnitudes(p))) for i, p in enumerate(pieces)]
        limit = values.abs().reshape(-1).sort(descending=True).values[k - 1]
        mask = torch.cat(masks)
        assert int(mask.sum()) == k and torch.equal(mask, values.abs() >= limit)


# ---- settings --------------------------------------------------------------------------------


def test_gradients_and_filters() -> None:
    parsed = mm.parse_recipe(
        merge_method="slerp",
        models=[{"model": "a"}],
        parameters={"t": [{"filter": "mlp", "value": [0, 1]}, {"value": 0.25}]},
    ).parameters["t"]
    assert evaluate(parsed, "model.layers.0.mlp.up_proj.weight", 0.5, float) == 0.5
    assert evaluate(parsed, "model.norm.weight", 0.5, float) == 0.25
    assert evaluate([0, 1, 0], "x", 0.75, float) == 0.5
    assert evaluate("1e-4", "x", 0, float) == 1e-4
