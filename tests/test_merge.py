"""Merge methods as algebra, and whole merges of tiny models as files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import merge_models as mm
from sharpen.config import parse_config
from sharpen.merge import checkpoint, stream, tiles
from sharpen.merge.merger import ModelMerger, merge_dicts, merge_domain_experts
from sharpen.merge.method import METHODS
from sharpen.merge.recipe import MergeConfig, evaluate
from sharpen.merge.search import search
from sharpen.merge.stream import MergeOptions, merge
from sharpen.merge.vectors import TaskVectorArithmetic
from sharpen.types import SharpenError

DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64])
SEEDS = st.integers(0, 2**32 - 1)
MERGED = {  # method → its parameters for two models tuned from one base
    "task_arithmetic": {"weight": [0.4, 0.6]},
    "ties": {"weight": [1.0, 1.0], "density": [0.5, 0.5]},
    "breadcrumbs": {"weight": [0.4, 0.6], "density": [0.5, 0.5], "gamma": [0.1, 0.1]},
    "breadcrumbs_ties": {"weight": [0.4, 0.6], "density": [0.5, 0.5], "gamma": [0.1, 0.1]},
    "dare_linear": {"weight": [0.4, 0.6], "density": [0.5, 0.5]},
    "dare_ties": {"weight": [0.4, 0.6], "density": [0.5, 0.5]},
    "della_linear": {"weight": [0.4, 0.6], "density": [0.5, 0.5], "epsilon": [0.1, 0.1]},
    "della": {"weight": [0.4, 0.6], "density": [0.5, 0.5], "epsilon": [0.1, 0.1]},
    "sce": {"select_topk": 0.5},
    "model_stock": {},
    "multislerp": {"weight": [0.4, 0.6]},
}


def some(seed: int, dtype: torch.dtype, count: int, shape: tuple[int, ...] = (6, 7)) -> list[dict]:
    random = torch.Generator().manual_seed(seed)
    draws = [torch.randn(shape, generator=random).to(dtype) for _ in range(count)]
    return [{"w": draw} for draw in draws]


def config(**values: object) -> MergeConfig:
    return parse_config(MergeConfig, values, "test")


# ---- algebra ---------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(SEEDS, DTYPES, st.sampled_from(sorted(MERGED)))
def test_models_that_are_the_base_merge_to_the_base(
    seed: int, dtype: torch.dtype, name: str
) -> None:
    (model,) = some(seed, dtype, 1)
    merged = merge_dicts(name, [model, model, model], MERGED[name])["w"]
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
    kept, dropped = model["w"][merged != 0].abs(), model["w"][merged == 0].abs()
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
    base, tuned = {"w": torch.zeros(400, 50)}, {"w": torch.ones(400, 50)}
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
    random, name = torch.Generator().manual_seed(0), str(dtype).removeprefix("torch.")
    draws = torch.randn(60_000, generator=random)
    halves = (draws.to(dtype).float().view(torch.int32) | (1 << tiles.HALF_PRECISION[name][0] - 1)).view(
        torch.float32
    )
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


# ---- settings --------------------------------------------------------------------------------


def test_gradients_and_filters() -> None:
    parsed = config(
        merge_method="slerp",
        models=[{"model": "a"}],
        parameters={"t": [{"filter": "mlp", "value": [0, 1]}, {"value": 0.25}]},
    ).parameters["t"]
    assert evaluate(parsed, "model.layers.0.mlp.up_proj.weight", 0.5, float) == 0.5
    assert evaluate(parsed, "model.norm.weight", 0.5, float) == 0.25
    assert evaluate([0, 1, 0], "x", 0.75, float) == 0.5
    assert evaluate("1e-4", "x", 0, float) == 1e-4


# ---- files -----------------------------------------------------------------------------------


def test_the_result_does_not_depend_on_processes_tiles_or_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, *others = mm.trio(tmp_path)
    for name, values in (MERGED | {"slerp": {"t": 0.3}, "karcher": {}}).items():
        extra = {} if name == "karcher" else {"base_model": others[0] if name == "slerp" else base}
        flat = {k: v[0] if isinstance(v, list) else v for k, v in values.items()}
        models = [{"model": m} for m in others]
        recipe = config(merge_method=name, models=models, parameters=flat, **extra)
        merge(recipe, tmp_path / name / "one", MergeOptions(seed=5, workers=1))
        with monkeypatch.context() as patch:
            patch.setattr(stream, "TILE_ELEMENTS", 37)
            merge(
                recipe, tmp_path / name / "two", MergeOptions(seed=5, workers=3, shard_bytes=3000)
            )
        first, second = mm.load(tmp_path / name / "one"), mm.load(tmp_path / name / "two")
        assert first.keys() == second.keys() == mm.load(base).keys()
        for tensor in first:
            torch.testing.assert_close(first[tensor], second[tensor], rtol=2**-7, atol=1e-6)
        same = torch.cat([(first[t] == second[t]).reshape(-1) for t in first])
        assert same.float().mean() > 0.99, name
    index = json.loads((tmp_path / "ties" / "two" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(mm.load(base))
    assert all((tmp_path / "ties" / "two" / f).exists() for f in index["weight_map"].values())


@pytest.mark.parametrize("method", sorted(MERGED))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_files_and_state_dicts_give_the_same(
    tmp_path: Path, method: str, dtype: torch.dtype
) -> None:
    """Files are merged by numpy and state dicts by torch, as on a GPU."""
    folders = mm.trio(tmp_path, dtype=dtype)
    values = {k: v[0] if isinstance(v, list) else v for k, v in MERGED[method].items()}
    models = [{"model": folder} for folder in folders[1:]]
    recipe = config(merge_method=method, base_model=folders[0], models=models, parameters=values)
    merge(recipe, tmp_path / "out", MergeOptions(seed=3))
    known = METHODS[method].parameters.items()
    filled = {n: p.default if p.scope == "shared" else [p.default] * 2 for n, p in known}
    per_model = {k: [v, v] if isinstance(filled[k], list) else v for k, v in values.items()}
    wanted = merge_dicts(method, [mm.load(f) for f in folders], filled | per_model, seed=3)
    found = mm.load(tmp_path / "out")
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_a_wrong_value_is_named_from_any_process(tmp_path: Path) -> None:
    weights = mm.tensors(0)
    weights["model.layers.1.mlp.up_proj.weight"][3, 1] = torch.nan
    folder = mm.save(tmp_path / "bad", weights)
    recipe = config(merge_method="passthrough", models=[{"model": folder}])
    with pytest.raises(SharpenError, match=r"layers\.1\.mlp\.up_proj\.weight: nan at \[3, 1\]"):
        merge(recipe, tmp_path / "out", MergeOptions(workers=2))
    assert not (tmp_path / "out").exists()


def test_random_methods_follow_the_seed(tmp_path: Path) -> None:
    base, *others = mm.trio(tmp_path)
    recipe = config(
        merge_method="dare_ties",
        base_model=base,
        models=[{"model": m, "parameters": {"weight": 0.5, "density": 0.5}} for m in others],
    )
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        merge(recipe, tmp_path / name, MergeOptions(seed=seed))
    a, b, c = (mm.load(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert any(not torch.equal(a[n], c[n]) for n in a)


def test_the_config_of_the_documents_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = mm.tensors(0)
    mm.save(tmp_path / "base_model", base)
    for i, name in enumerate(("math_expert", "code_expert", "writing_expert")):
        mm.save(tmp_path / name, mm.tuned(base, i + 1))
    text = """
    models:
      - {model: ./math_expert, parameters: {weight: 0.4}}
      - {model: ./code_expert, parameters: {weight: 0.3}}
      - {model: ./writing_expert, parameters: {weight: 0.3}}
    merge_method: ties
    base_model: ./base_model
    parameters: {density: 0.5, majority_sign: true}
    dtype: float16
    """
    (tmp_path / "m.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    from sharpen.merge.recipe import load_recipe

    report = merge(load_recipe("m.yaml"), "out")
    assert report["tensors"] == len(base)
    assert {t.dtype for t in mm.load("out").values()} == {torch.float16}
    assert json.loads(Path("out/config.json").read_text())["torch_dtype"] == "float16"


def test_layer_ranges_make_a_deeper_model(tmp_path: Path) -> None:
    base, math, _ = mm.trio(tmp_path, layers=3)
    values = json.loads(Path(base, "config.json").read_text()) | {"layer_types": ["a", "b", "c"]}
    Path(base, "config.json").write_text(json.dumps(values))
    recipe = config(
        merge_method="passthrough",
        base_model=base,
        slices=[
            {"sources": [{"model": base, "layer_range": [0, 2]}]},
            {"sources": [{"model": math, "layer_range": [1, 3]}]},
        ],
    )
    merge(recipe, tmp_path / "out")
    out, first, second = mm.load(tmp_path / "out"), mm.load(base), mm.load(math)
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["num_hidden_layers"] == 4 and values["layer_types"] == ["a", "b", "b", "c"]
    at = "model.layers.{}.mlp.up_proj.weight"
    assert torch.equal(out[at.format(1)], first[at.format(1)])
    assert torch.equal(out[at.format(3)], second[at.format(2)])
    assert torch.equal(out["model.embed_tokens.weight"], first["model.embed_tokens.weight"])
    assert torch.equal(out["lm_head.weight"], second["lm_head.weight"])


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    weights = mm.tensors(0)
    full = mm.save(tmp_path / "full", weights)
    tied = {n: t for n, t in mm.tuned(weights, 1).items() if n != "lm_head.weight"}
    other = mm.save(tmp_path / "tied", tied, tie_word_embeddings=True)
    recipe = config(
        merge_method="linear", models=[{"model": other}, {"model": full}], parameters={"weight": 1}
    )
    merge(recipe, tmp_path / "out")
    head = (weights["lm_head.weight"].float() + tied["model.embed_tokens.weight"].float()) / 2
    assert torch.equal(mm.load(tmp_path / "out")["lm_head.weight"], head.bfloat16())
    assert not json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]


def test_vocabularies_are_united(tmp_path: Path) -> None:
    left, right = mm.tensors(1, vocab=6), mm.tensors(2, vocab=7)
    a, b = mm.save(tmp_path / "a", left), mm.save(tmp_path / "b", right)
    mm.tokenizer(tmp_path / "a", ["<unk>", "x", "y", "z", "u"], ("<a>",))
    mm.tokenizer(tmp_path / "b", ["<unk>", "y", "x", "w", "v"], ("<a>", "<b>"))
    models = [{"model": a}, {"model": b}]
    recipe = config(
        merge_method="linear",
        models=models,
        parameters={"weight": 0.5},
        tokenizer={"source": "union", "pad_to_multiple_of": 8},
    )
    report = merge(recipe, tmp_path / "out")
    assert "differ in" in report["notes"][0]
    merged = json.loads((tmp_path / "out" / "tokenizer.json").read_text())
    ids = merged["model"]["vocab"] | {t["content"]: t["id"] for t in merged["added_tokens"]}
    assert ids == {"<unk>": 0, "x": 1, "y": 2, "z": 3, "u": 4, "<a>": 5, "w": 6, "v": 7, "<b>": 8}
    rows = mm.load(tmp_path / "out")["model.embed_tokens.weight"]
    assert rows.shape[0] == 16
    one, two = left["model.embed_tokens.weight"], right["model.embed_tokens.weight"]
    assert torch.equal(rows[1], ((one[1].float() + two[2].float()) / 2).bfloat16())
    assert torch.equal(rows[3], one[3]) and torch.equal(rows[6], two[3])
    assert torch.equal(rows[8], two[6]) and torch.equal(
        rows[5], ((one[5].float() + two[5].float()) / 2).bfloat16()
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 16


@pytest.mark.parametrize("method", ["average", "slerp", "ties", "dare"])
def test_merge_domain_experts(tmp_path: Path, method: str) -> None:
    base, *experts = mm.trio(tmp_path)
    mm.tokenizer(tmp_path / "base", ["a", "b"])
    merge_domain_experts(base, experts, method, str(tmp_path / "out"))
    out, first = mm.load(tmp_path / "out"), mm.load(base)
    assert all(out[n].shape == first[n].shape and out[n].dtype == first[n].dtype for n in first)
    assert all(t.isfinite().all() for t in out.values())
    if method == "average":
        both = [mm.load(e) for e in experts]
        assert torch.equal(
            out["model.norm.weight"], ModelMerger.average_merge(both)["model.norm.weight"]
        )


def test_search_finds_the_better_weights(tmp_path: Path) -> None:
    base, math, code = mm.trio(tmp_path)
    wanted = mm.load(math)
    models = [{"model": m, "parameters": {"weight": 0.5}} for m in (math, code)]
    recipe = config(merge_method="task_arithmetic", base_model=base, models=models)

    def distance(folder: Path) -> float:
        found = mm.load(folder)
        return sum(float((found[n].float() - wanted[n].float()).square().sum()) for n in wanted)

    report = search(recipe, tmp_path / "best", distance, trials=12, minimize=True)
    assert report["trials"][0]["models.0.parameters.weight"] == 0.5
    assert report["score"] < report["trials"][0]["score"]
    assert distance(tmp_path / "best") == report["score"]
    assert not list(tmp_path.glob(".best*"))
    with pytest.raises(SharpenError, match="is not empty"):
        search(recipe, tmp_path / "best", distance)
    with pytest.raises(SharpenError, match="objective returned nan"):
        search(recipe, tmp_path / "none", lambda folder: float("nan"))
    assert not (tmp_path / "none").exists()


def test_merging_on_a_cpu_imports_nothing_heavy(tmp_path: Path) -> None:
    base, *others = mm.trio(tmp_path)
    recipe = mm.recipe(
        tmp_path / "m.yaml",
        merge_method="ties",
        base_model=base,
        models=[{"model": m, "parameters": {"weight": 1.0, "density": 0.5}} for m in others],
    )
    code = (
        "import sys; sys.argv = ['sharpen', 'merge', *sys.argv[1:]]\n"
        "from sharpen.cli.main import main\nmain()\n"
        "heavy = {'torch', 'transformers', 'peft', 'optuna'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(recipe), str(tmp_path / "out"), "--json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["method"] == "ties"
    made = yaml.safe_load((tmp_path / "out" / "merge.yaml").read_text())
    assert made["merge_method"] == "ties" and made["seed"] == 0


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


def test_reading_checks_sizes(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(b"\x00" * 4)
    with pytest.raises(SharpenError, match="not a safetensors file"):
        checkpoint.read_header(file)


def test_search_by_dev_loss_and_evaluation_by_tasks(tmp_path, sharpen, pico_folder):
    """Two real models: the search finds the one that says the dev rows, and tasks are scored."""
    import shutil

    from sharpen.data.generate.starter import starter_dialogs, starter_task
    from sharpen.records import write_jsonl
    from sharpen.rows import dialog_to_row, task_to_row

    rows = starter_dialogs("test", 4)
    write_jsonl(tmp_path / "dev.jsonl", map(dialog_to_row, rows))
    write_jsonl(tmp_path / "tasks.jsonl", [task_to_row(starter_task(row)) for row in rows])
    shutil.copytree(pico_folder, tmp_path / "other")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"merge_method: linear\nmodels:\n- {{model: {pico_folder}, parameters: {{weight: 0.5}}}}\n"
        f"- {{model: {tmp_path}/other, parameters: {{weight: 0.5}}}}\n"
    )
    dev, out = str(tmp_path / "dev.jsonl"), str(tmp_path / "best")
    code, text, err = sharpen(
        "merge", "search", str(recipe), out, "--dev", dev, "--trials", "2", "--json"
    )
    assert code == 0, err
    assert 4 < json.loads(text.splitlines()[-1])["score"] < 7
    tasks = str(tmp_path / "tasks.jsonl")
    code, text, err = sharpen(
        "merge", str(recipe), str(tmp_path / "m"), "--evaluate", tasks, "--json"
    )
    assert code == 0, err
    abilities = json.loads(text.splitlines()[-1])["abilities"]
    assert abilities["overall"] == 0.0 and abilities["call"]["count"] == 4
    code, _, err = sharpen("merge", "search", str(recipe), out)
    assert code == 2 and "give --dev FILE or --objective" in err
