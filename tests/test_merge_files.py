"""Whole merges of tiny models as files: every method, the search, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import merge_models as mm
from sharpen.merge import checkpoint, stream
from sharpen.merge.merger import merge_dicts
from sharpen.merge.method import METHODS
from sharpen.merge.recipe import load_recipe
from sharpen.merge.search import search
from sharpen.merge.stream import MergeOptions, merge
from sharpen.spec.merging import ModelMerger, merge_domain_experts
from sharpen.types import SharpenError


def test_the_result_does_not_depend_on_processes_tiles_or_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, *others = mm.save_trio(tmp_path)
    recipes = {
        "slerp": {"base_model": others[0], "parameters": {"t": 0.3}},
        "karcher": {"parameters": {}},
    }
    for name in mm.METHOD_PARAMETERS:
        recipes[name] = {"base_model": base, "parameters": mm.recipe_parameters(name)}
    models = [{"model": other} for other in others]
    for name, fields in recipes.items():
        recipe = mm.parse_recipe(merge_method=name, models=models, **fields)
        merge(recipe, tmp_path / name / "one", MergeOptions(seed=5, workers=1))
        with monkeypatch.context() as patch:
            patch.setattr(stream, "TILE_ELEMENTS", 37)
            merge(
                recipe, tmp_path / name / "two", MergeOptions(seed=5, workers=3, shard_bytes=3000)
            )
        first = mm.load_weights(tmp_path / name / "one")
        second = mm.load_weights(tmp_path / name / "two")
        assert first.keys() == second.keys() == mm.load_weights(base).keys()
        for tensor in first:
            torch.testing.assert_close(first[tensor], second[tensor], rtol=2**-7, atol=1e-6)
        same = torch.cat([(first[t] == second[t]).reshape(-1) for t in first])
        assert same.float().mean() > 0.99, name
    index = json.loads((tmp_path / "ties" / "two" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(mm.load_weights(base))
    assert all((tmp_path / "ties" / "two" / f).exists() for f in index["weight_map"].values())


@pytest.mark.parametrize("method", sorted(mm.METHOD_PARAMETERS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_files_and_state_dicts_give_the_same(
    tmp_path: Path, method: str, dtype: torch.dtype
) -> None:
    """Files are merged by numpy and state dicts by torch, as on a GPU."""
    folders = mm.save_trio(tmp_path, dtype=dtype)
    values = mm.recipe_parameters(method)
    models = [{"model": folder} for folder in folders[1:]]
    recipe = mm.parse_recipe(
        merge_method=method, base_model=folders[0], models=models, parameters=values
    )
    merge(recipe, tmp_path / "out", MergeOptions(seed=3))
    per_model = dict(values)
    for name, parameter in METHODS[method].parameters.items():
        if parameter.scope != "shared":
            per_model[name] = [values.get(name, parameter.default)] * 2
    weights = [mm.load_weights(folder) for folder in folders]
    from_dicts = merge_dicts(method, weights, per_model, seed=3)
    from_files = mm.load_weights(tmp_path / "out")
    eps = torch.finfo(dtype).eps
    for name, tensor in from_dicts.items():
        torch.testing.assert_close(from_files[name], tensor, rtol=eps, atol=1e-7)


def test_a_wrong_value_is_named_from_any_process(tmp_path: Path) -> None:
    weights = mm.random_weights(0)
    weights["model.layers.1.mlp.up_proj.weight"][3, 1] = torch.nan
    folder = mm.save_model(tmp_path / "bad", weights)
    recipe = mm.parse_recipe(merge_method="passthrough", models=[{"model": folder}])
    with pytest.raises(SharpenError, match=r"layers\.1\.mlp\.up_proj\.weight: nan at \[3, 1\]"):
        merge(recipe, tmp_path / "out", MergeOptions(workers=2))
    assert not (tmp_path / "out").exists()


def test_random_methods_follow_the_seed(tmp_path: Path) -> None:
    base, *others = mm.save_trio(tmp_path)
    recipe = mm.parse_recipe(
        merge_method="dare_ties",
        base_model=base,
        models=[{"model": m, "parameters": {"weight": 0.5, "density": 0.5}} for m in others],
    )
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        merge(recipe, tmp_path / name, MergeOptions(seed=seed))
    a, b, c = (mm.load_weights(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert any(not torch.equal(a[n], c[n]) for n in a)


def test_the_config_of_the_documents_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = mm.random_weights(0)
    mm.save_model(tmp_path / "base_model", base)
    for i, name in enumerate(("math_expert", "code_expert", "writing_expert")):
        mm.save_model(tmp_path / name, mm.tune(base, i + 1))
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
    report = merge(load_recipe("m.yaml"), "out")
    assert report["tensors"] == len(base)
    assert {t.dtype for t in mm.load_weights("out").values()} == {torch.float16}
    assert json.loads(Path("out/config.json").read_text())["torch_dtype"] == "float16"


def test_layer_ranges_make_a_deeper_model(tmp_path: Path) -> None:
    base, math, _ = mm.save_trio(tmp_path, layers=3)
    values = json.loads(Path(base, "config.json").read_text()) | {"layer_types": ["a", "b", "c"]}
    Path(base, "config.json").write_text(json.dumps(values))
    recipe = mm.parse_recipe(
        merge_method="passthrough",
        base_model=base,
        slices=[
            {"sources": [{"model": base, "layer_range": [0, 2]}]},
            {"sources": [{"model": math, "layer_range": [1, 3]}]},
        ],
    )
    merge(recipe, tmp_path / "out")
    out = mm.load_weights(tmp_path / "out")
    first = mm.load_weights(base)
    second = mm.load_weights(math)
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["num_hidden_layers"] == 4 and values["layer_types"] == ["a", "b", "b", "c"]
    at = "model.layers.{}.mlp.up_proj.weight"
    assert torch.equal(out[at.format(1)], first[at.format(1)])
    assert torch.equal(out[at.format(3)], second[at.format(2)])
    assert torch.equal(out["model.embed_tokens.weight"], first["model.embed_tokens.weight"])
    assert torch.equal(out["lm_head.weight"], second["lm_head.weight"])


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    weights = mm.random_weights(0)
    full = mm.save_model(tmp_path / "full", weights)
    tied = {n: t for n, t in mm.tune(weights, 1).items() if n != "lm_head.weight"}
    other = mm.save_model(tmp_path / "tied", tied, tie_word_embeddings=True)
    recipe = mm.parse_recipe(
        merge_method="linear", models=[{"model": other}, {"model": full}], parameters={"weight": 1}
    )
    merge(recipe, tmp_path / "out")
    head = (weights["lm_head.weight"].float() + tied["model.embed_tokens.weight"].float()) / 2
    assert torch.equal(mm.load_weights(tmp_path / "out")["lm_head.weight"], head.bfloat16())
    assert not json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]


def test_vocabularies_are_united(tmp_path: Path) -> None:
    left = mm.random_weights(1, vocab=6)
    right = mm.random_weights(2, vocab=7)
    a = mm.save_model(tmp_path / "a", left)
    b = mm.save_model(tmp_path / "b", right)
    mm.write_tokenizer(tmp_path / "a", ["<unk>", "x", "y", "z", "u"], ("<a>",))
    mm.write_tokenizer(tmp_path / "b", ["<unk>", "y", "x", "w", "v"], ("<a>", "<b>"))
    models = [{"model": a}, {"model": b}]
    recipe = mm.parse_recipe(
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
    rows = mm.load_weights(tmp_path / "out")["model.embed_tokens.weight"]
    assert rows.shape[0] == 16
    one = left["model.embed_tokens.weight"]
    two = right["model.embed_tokens.weight"]
    assert torch.equal(rows[1], ((one[1].float() + two[2].float()) / 2).bfloat16())
    assert torch.equal(rows[3], one[3]) and torch.equal(rows[6], two[3])
    assert torch.equal(rows[8], two[6]) and torch.equal(
        rows[5], ((one[5].float() + two[5].float()) / 2).bfloat16()
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 16


@pytest.mark.parametrize("method", ["average", "slerp", "ties", "dare"])
def test_merge_domain_experts(tmp_path: Path, method: str) -> None:
    base, *experts = mm.save_trio(tmp_path)
    mm.write_tokenizer(tmp_path / "base", ["a", "b"])
    merge_domain_experts(base, experts, method, str(tmp_path / "out"))
    out = mm.load_weights(tmp_path / "out")
    first = mm.load_weights(base)
    assert all(out[n].shape == first[n].shape and out[n].dtype == first[n].dtype for n in first)
    assert all(t.isfinite().all() for t in out.values())
    if method == "average":
        both = [mm.load_weights(e) for e in experts]
        assert torch.equal(
            out["model.norm.weight"], ModelMerger.average_merge(both)["model.norm.weight"]
        )


def test_search_finds_the_better_weights(tmp_path: Path) -> None:
    base, math, code = mm.save_trio(tmp_path)
    wanted = mm.load_weights(math)
    models = [{"model": m, "parameters": {"weight": 0.5}} for m in (math, code)]
    recipe = mm.parse_recipe(merge_method="task_arithmetic", base_model=base, models=models)

    def distance(folder: Path) -> float:
        found = mm.load_weights(folder)
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
    base, *others = mm.save_trio(tmp_path)
    recipe = mm.write_recipe(
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
    dev = str(tmp_path / "dev.jsonl")
    out = str(tmp_path / "best")
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
    assert abilities["overall"] == 0.0 and abilities["calls"]["count"] == 4
    code, _, err = sharpen("merge", "search", str(recipe), out)
    assert code == 2 and "give --dev FILE or --objective" in err
