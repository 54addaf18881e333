"""Wrong input of every kind: one line, exit 2, nothing left behind."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import merge_models as mm
from sharpen.cli.main import main
from sharpen.merge import stream

Models = list[str]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["sharpen", "merge", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
        raise SystemExit(0)
    return int(stop.value.code or 0)


def change(folder: str, edit: Callable[[dict], dict]) -> None:
    save_file(edit(mm.load_weights(folder)), Path(folder) / "model.safetensors")


def set_config(folder: str, **values: object) -> None:
    path = Path(folder, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def other_architecture(models: Models) -> dict:
    set_config(models[1], architectures=["Qwen2ForCausalLM"])
    return ties(models)


def missing_tensor(models: Models) -> dict:
    change(models[2], lambda w: {n: t for n, t in w.items() if "1.mlp.up_proj" not in n})
    return ties(models)


def extra_tensor(models: Models) -> dict:
    change(models[2], lambda w: w | {"model.layers.0.extra.weight": torch.ones(2)})
    return ties(models)


def other_shape(models: Models) -> dict:
    change(models[2], lambda w: w | {"model.norm.weight": torch.ones(3).bfloat16()})
    return ties(models)


def other_vocabulary(models: Models) -> dict:
    mm.save_model(Path(models[2]), mm.random_weights(4, vocab=41))
    return ties(models)


def not_a_number(models: Models) -> dict:
    def edit(weights: dict) -> dict:
        weights["model.layers.1.self_attn.k_proj.weight"][3, 5] = torch.nan
        return weights

    change(models[1], edit)
    return ties(models)


def infinite(models: Models) -> dict:
    def edit(weights: dict) -> dict:
        weights["lm_head.weight"][2, 0] = -torch.inf
        return weights

    change(models[2], edit)
    return ties(models)


def truncated(models: Models) -> dict:
    file = Path(models[1], "model.safetensors")
    file.write_bytes(file.read_bytes()[:-10])
    return ties(models)


def no_shard(models: Models) -> dict:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    Path(models[1], "model.safetensors.index.json").write_text(json.dumps(index))
    return ties(models)


def pickled(models: Models) -> dict:
    Path(models[1], "model.safetensors").rename(Path(models[1], "pytorch_model.bin"))
    return ties(models)


def fewer_layers(models: Models) -> dict:
    set_config(models[1], num_hidden_layers=5)
    return ties(models)


def ties(models: Models, **values: object) -> dict:
    base, *others = models
    entries = [{"model": m, "parameters": {"weight": 0.5}} for m in others]
    return {"merge_method": "ties", "base_model": base, "models": entries} | values


def linear(models: Models, **values: object) -> dict:
    return {"merge_method": "linear", "models": [{"model": m} for m in models]} | values


def sliced(models: Models, *ranges: list[int]) -> dict:
    sources = [{"model": m, "layer_range": r} for m, r in zip(models, ranges, strict=False)]
    return {"merge_method": "linear", "slices": [{"sources": sources}], "parameters": {"weight": 1}}


CASES: dict[str, tuple[Callable[[Models], dict], str]] = {
    "other architecture": (other_architecture, "architectures differ"),
    "missing tensor": (missing_tensor, "code: has no tensor model.layers.1.mlp.up_proj.weight"),
    "extra tensor": (extra_tensor, "base: has no tensor model.layers.0.extra.weight"),
    "other shape": (other_shape, "model.norm.weight: shapes differ"),
    "other vocabulary": (other_vocabulary, "set tokenizer_source: union"),
    "nan": (not_a_number, "math: model.layers.1.self_attn.k_proj.weight: nan at [3, 5]"),
    "nan in an average": (
        lambda m: not_a_number(m) and linear(m, parameters={"weight": 1}),
        "math: model.layers.1.self_attn.k_proj.weight: nan at [3, 5]",
    ),
    "nan where values are dropped": (
        lambda m: (
            not_a_number(m)
            | {"merge_method": "dare_ties", "parameters": {"density": 0.01, "rescale": False}}
        ),
        "math: model.layers.1.self_attn.k_proj.weight: nan at [3, 5]",
    ),
    "nan where values are drawn and rescaled": (
        lambda m: not_a_number(m) | {"merge_method": "della", "parameters": {"density": 0.5}},
        "math: model.layers.1.self_attn.k_proj.weight: nan at [3, 5]",
    ),
    "nan where the largest are left out": (
        lambda m: (
            not_a_number(m)
            | {"merge_method": "breadcrumbs", "parameters": {"density": 0.5, "gamma": 0.2}}
        ),
        "math: model.layers.1.self_attn.k_proj.weight: nan at [3, 5]",
    ),
    "overflow": (
        lambda m: linear(m, parameters={"weight": 1e6, "normalize": False}, dtype="float16"),
        "beyond the range of float16",
    ),
    "infinity": (infinite, "code: lm_head.weight: -inf at [2, 0]"),
    "truncated": (truncated, "math/model.safetensors: truncated"),
    "missing shard": (no_shard, "model-00001-of-00002.safetensors: No such file"),
    "pickle": (pickled, "pytorch_model.bin is a pickle"),
    "layers": (fewer_layers, "config.json says 5 layers"),
    "wrong parameter": (
        lambda m: ties(m, parameters={"densty": 0.5}),
        "ties has no parameter 'densty', did you mean 'density'?",
    ),
    "wrong method": (lambda m: ties(m, merge_method="tise"), "did you mean 'ties'?"),
    "wrong value": (lambda m: ties(m, parameters={"density": "much"}), "parameter density"),
    "wrong field": (lambda m: ties(m, base_modle="x"), "did you mean 'base_model'?"),
    "wrong field of a condition": (
        lambda m: ties(m, parameters={"density": [{"value": 1, "filtr": "mlp"}]}),
        "list[Conditional].0.filtr: unknown field, did you mean 'filter'?",
    ),
    "wrong type of tokenizer": (
        lambda m: ties(m, tokenizer="union"),
        "tokenizer: input should be a valid dictionary or instance of TokenizerConfig",
    ),
    "three in slerp": (
        lambda m: {
            "merge_method": "slerp",
            "base_model": m[0],
            "models": [{"model": x} for x in m],
            "parameters": {"t": 0.5},
        },
        "slerp merges exactly 2 models, base included; found 3",
    ),
    "no base": (lambda m: ties(m, base_model=None), "ties needs a base_model"),
    "twice": (lambda m: ties([m[0], m[1], m[1]]), "is named twice"),
    "no model": (lambda m: ties([*m[:2], "/nowhere/at/all"]), "no such model folder"),
    "no weight": (linear, "parameter weight is missing"),
    "zero weights": (lambda m: linear(m, parameters={"weight": 0}), "weights sum to 0"),
    "dtype": (
        lambda m: linear(m, parameters={"weight": 1}, dtype="int8"),
        "dtype: input should be 'bfloat16'",
    ),
    "models and slices": (
        lambda m: sliced(m, [0, 1]) | {"models": [{"model": m[0]}]},
        "either models or slices",
    ),
    "range": (lambda m: sliced(m, [0, 9]), "layer_range [0, 9]"),
    "ranges": (lambda m: sliced(m, [0, 1], [0, 2]), "differ in their number of layers"),
    "template": (
        lambda m: linear(m, parameters={"weight": 1}, chat_template="none"),
        "chat_template 'none'",
    ),
    "tokenizer": (
        lambda m: linear(m, parameters={"weight": 1}, tokenizer_source="union"),
        "has no tokenizer.json",
    ),
    "epsilon": (
        lambda m: ties(m, merge_method="della", parameters={"density": 0.9, "epsilon": 0.2}),
        "epsilon 0.2",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_line_exit_2_and_nothing_left(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make, wanted = CASES[name]
    recipe = mm.write_recipe(tmp_path / "m.yaml", **make(mm.save_trio(tmp_path / "models")))
    (tmp_path / "place").mkdir()
    assert run(monkeypatch, recipe, tmp_path / "place" / "out", "--json") == 2
    shown = capsys.readouterr()
    assert wanted in shown.err and shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1 and "Traceback" not in shown.err and not shown.out
    assert not list((tmp_path / "place").iterdir())


def test_a_full_disk_is_seen_before_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = mm.write_recipe(tmp_path / "m.yaml", **ties(mm.save_trio(tmp_path)))
    usage = stream.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(stream.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert run(monkeypatch, recipe, tmp_path / "out") == 2
    assert "bytes are needed, 1,000 are free" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_older_model_is_not_replaced_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models = mm.save_trio(tmp_path)
    recipe = mm.write_recipe(tmp_path / "m.yaml", **ties(models))
    before = Path(models[1], "model.safetensors").read_bytes()
    assert run(monkeypatch, recipe, models[1]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert Path(models[1], "model.safetensors").read_bytes() == before
    assert run(monkeypatch, recipe, tmp_path / "out") == 0
    assert run(monkeypatch, recipe, tmp_path / "out", "--overwrite") == 0


def test_devices_and_functions_that_do_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = mm.write_recipe(tmp_path / "m.yaml", **ties(mm.save_trio(tmp_path)))
    assert run(monkeypatch, recipe, tmp_path / "out", "--device", "tpu9") == 2
    assert "device 'tpu9'" in capsys.readouterr().err
    (tmp_path / "f.py").write_text("def good(folder):\n    return {'math': 0.5}\n")
    assert run(monkeypatch, recipe, tmp_path / "out", "--evaluate", f"{tmp_path}/f.py:bad") == 2
    assert "has no 'bad'" in capsys.readouterr().err
    arguments = (recipe, tmp_path / "out", "--evaluate", f"{tmp_path}/f.py:good", "--json")
    assert run(monkeypatch, *arguments) == 0
    assert json.loads(capsys.readouterr().out)["abilities"] == {"math": 0.5}


@pytest.mark.slow
def test_killed_while_it_writes_it_leaves_no_model(tmp_path: Path) -> None:
    models = mm.save_trio(tmp_path / "models", hidden=512, vocab=60_000, layers=4)
    recipe = mm.write_recipe(tmp_path / "m.yaml", **ties(models, parameters={"density": 0.5}))
    for delay in (0.0, 0.05, 0.2):
        command = [
            sys.executable,
            "-m",
            "sharpen.cli.main",
            "merge",
            str(recipe),
            str(tmp_path / "out"),
        ]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while not list(tmp_path.glob(".out.*.tmp/model*.safetensors")):
            assert process.poll() is None
            time.sleep(0.002)
        time.sleep(delay)
        process.kill()
        process.wait()
        assert not (tmp_path / "out").exists()
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0
    assert mm.load_weights(tmp_path / "out").keys() == mm.load_weights(models[0]).keys()
