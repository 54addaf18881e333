"""Our merges against mergekit's on the same models. mergekit lives in .venv-oracle, which
`scripts/oracle.sh` makes; without it these tests fail."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
import yaml

import merge_models as mm
from sharpen.config import parse_config
from sharpen.merge.recipe import MergeConfig
from sharpen.merge.stream import MergeOptions, merge

pytestmark = pytest.mark.slow
ORACLE = Path(__file__).parents[1] / ".venv-oracle" / "bin" / "python"
MERGEKIT = """
import json, sys, yaml
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
for config, out in json.load(open(sys.argv[1])):
    run_merge(MergeConfiguration.model_validate(yaml.safe_load(open(config))), out,
              MergeOptions(copy_tokenizer=False, quiet=True, random_seed=1, write_model_card=False))
"""
W = {"parameters": {"weight": 0.3}}
W2 = {"parameters": {"weight": 0.6}}
WIDE = {
    "dtype": "float32",
    "out_dtype": "bfloat16",
}  # mergekit's own half-precision steps are noise


def cases(base: str, math: str, code: str) -> dict[str, dict]:
    two = [{"model": math, **W}, {"model": code, **W2}]
    plain = [{"model": math}, {"model": code}]
    prose = {"model": str(Path(base).with_name("prose")), "parameters": {"weight": 0.5}}
    three = {"models": [*two, prose], "base_model": base, "parameters": {"density": 0.5}}
    gradient = {
        "density": [0.2, 0.8],
        "weight": [{"filter": "mlp", "value": [0.1, 0.9]}, {"value": 0.4}],
    }
    slices = [
        {"sources": [{"model": math, "layer_range": [0, 2]}]},
        {"sources": [{"model": code, "layer_range": [1, 3]}]},
    ]
    halves = [
        {"sources": [{"model": m, "layer_range": [0, 2]} for m in (math, code)]},
        {"sources": [{"model": m, "layer_range": [2, 3]} for m in (math, code)]},
    ]
    t = {
        "t": [
            {"filter": "self_attn", "value": [0, 0.5, 1]},
            {"filter": "mlp", "value": 0.2},
            {"value": 0.5},
        ]
    }
    return {
        "ties_three": {"merge_method": "ties", **three},
        "breadcrumbs_three": {"merge_method": "breadcrumbs_ties", **three},
        "linear": {
            "merge_method": "linear",
            "models": [*two, {"model": base, "parameters": {"weight": 1}}],
        },
        "linear_sum": {"merge_method": "linear", "models": two, "parameters": {"normalize": False}},
        "slerp": {
            "merge_method": "slerp",
            "models": plain,
            "base_model": math,
            "parameters": {"t": 0.3},
        },
        "slerp_near": {
            "merge_method": "slerp",
            "models": [{"model": base}, {"model": code}],
            "base_model": base,
            "parameters": t,
        },
        "task_arithmetic": {
            "merge_method": "task_arithmetic",
            "models": two,
            "base_model": base,
            "parameters": {"lambda": 0.9},
        },
        "task_normalized": {
            "merge_method": "task_arithmetic",
            "models": two,
            "base_model": base,
            "parameters": {"normalize": True},
        },
        "passthrough": {"merge_method": "passthrough", "slices": slices},
        "passthrough_scaled": {
            "merge_method": "passthrough",
            "slices": slices,
            "parameters": {"scale": [{"filter": "o_proj", "value": 0.5}]},
        },
        "slices": {"merge_method": "slerp", "slices": halves, "base_model": math, "parameters": t},
        "nearswap": {
            "merge_method": "nearswap",
            "models": [{"model": math}],
            "base_model": base,
            "parameters": {"t": 0.005},
        },
        "ties": {
            "merge_method": "ties",
            "models": two,
            "base_model": base,
            "parameters": {"density": 0.5},
        },
        "ties_gradient": {
            "merge_method": "ties",
            "models": plain,
            "base_model": base,
            "parameters": gradient,
        },
        "ties_sum": {
            "merge_method": "ties",
            "models": two,
            "base_model": base,
            "parameters": {"density": 0.3, "normalize": False, "int8_mask": True},
        },
        "ties_wide": {
            "merge_method": "ties",
            "models": two,
            "base_model": base,
            "parameters": {"density": 0.5},
            **WIDE,
        },
        "breadcrumbs": {
            "merge_method": "breadcrumbs",
            "models": two,
            "base_model": base,
            "parameters": {"density": 0.6, "gamma": 0.05},
        },
        "breadcrumbs_ties": {
            "merge_method": "breadcrumbs_ties",
            "models": two,
            "base_model": base,
            "parameters": {"density": 0.6},
        },
        "breadcrumbs_wide": {
            "merge_method": "breadcrumbs_ties",
            "models": two,
            "base_model": base,
            "parameters": {"density": 0.6},
            **WIDE,
        },
        "sce": {
            "merge_method": "sce",
            "models": plain,
            "base_model": base,
            "parameters": {"select_topk": 0.5},
            **WIDE,
        },
        "sce_all": {"merge_method": "sce", "models": plain, "base_model": base, **WIDE},
        "model_stock": {"merge_method": "model_stock", "models": plain, "base_model": base, **WIDE},
        "model_stock_rows": {
            "merge_method": "model_stock",
            "models": plain,
            "base_model": base,
            "parameters": {"filter_wise": True},
            **WIDE,
        },
        "multislerp": {"merge_method": "multislerp", "models": two, **WIDE},
        "multislerp_base": {
            "merge_method": "multislerp",
            "models": two,
            "base_model": base,
            **WIDE,
        },
        "karcher": {"merge_method": "karcher", "models": plain, **WIDE},
    }


def drawn(base: str, math: str, code: str) -> dict[str, dict]:
    two = [{"model": math, **W}, {"model": code, **W2}]
    return {
        name: {
            "merge_method": name,
            "models": two,
            "base_model": base,
            "parameters": {"density": 0.4},
        }
        for name in ("dare_linear", "dare_ties", "della_linear", "della")
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return mm.save_trio(tmp_path_factory.mktemp("models"), layers=3, hidden=96, vocab=700)


@pytest.fixture(scope="module")
def theirs(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case merged by mergekit, in one process."""
    return by_mergekit(tmp_path_factory.mktemp("half"), cases(*models) | drawn(*models))


@pytest.fixture(scope="module")
def wide_theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    models = mm.save_trio(folder / "models", layers=3, hidden=96, vocab=700, dtype=torch.float32)
    values = {n: {k: v for k, v in c.items() if k not in WIDE} for n, c in cases(*models).items()}
    return by_mergekit(folder, values)


def by_mergekit(folder: Path, values: dict[str, dict]) -> Path:
    assert ORACLE.exists(), f"{ORACLE} is missing: run scripts/oracle.sh"
    jobs = []
    for name, value in values.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(value))
        jobs.append([str(folder / f"{name}.yaml"), str(folder / name)])
    (folder / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run(
        [str(ORACLE), "-c", MERGEKIT, str(folder / "jobs.json")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def ours(theirs: Path, name: str, out: Path, **options: int) -> dict:
    values = yaml.safe_load((theirs / f"{name}.yaml").read_text())
    merge(parse_config(MergeConfig, values, name), out, MergeOptions(**options))
    return mm.load_weights(out)


def rounding(got: dict, wanted: dict) -> torch.Tensor:
    """Places that differ by more than the rounding of bfloat16; where terms cancel, that of the
    terms."""
    assert got.keys() == wanted.keys()
    assert all(got[n].dtype == wanted[n].dtype for n in got)
    return torch.cat(
        [
            ((got[n].double() - t.double()).abs() > 2**-7 * t.double().abs() + 1e-7).reshape(-1)
            for n, t in wanted.items()
        ]
    )


def test_the_same_bits_where_nothing_is_summed_over_a_tensor(theirs: Path, tmp_path: Path) -> None:
    for name in (
        "linear",
        "linear_sum",
        "task_arithmetic",
        "task_normalized",
        "passthrough",
        "passthrough_scaled",
        "nearswap",
    ):
        got = ours(theirs, name, tmp_path / name)
        wanted = mm.load_weights(theirs / name)
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[n], wanted[n]) for n in got), name


@pytest.mark.parametrize(
    "name",
    [
        "slerp",
        "slerp_near",
        "slices",
        "multislerp",
        "multislerp_base",
        "karcher",
        "model_stock",
        "model_stock_rows",
        "sce_all",
    ],
)
def test_equal_to_rounding(theirs: Path, tmp_path: Path, name: str) -> None:
    got = ours(theirs, name, tmp_path / "out")
    wanted = mm.load_weights(theirs / name)
    assert not rounding(got, wanted).any()
    same = torch.cat([(got[n] == wanted[n]).reshape(-1) for n in got])
    assert same.float().mean() > 0.999


@pytest.mark.parametrize(
    "name", ["ties", "ties_sum", "ties_three", "breadcrumbs", "breadcrumbs_three"]
)
def test_equal_bits_but_for_ties_at_the_threshold(
    theirs: Path, tmp_path: Path, models: list[str], name: str
) -> None:
    """Of several changes of exactly the threshold's size mergekit keeps any, by an unstable sort;
    everything else is the same bits."""
    base, *others = (mm.load_weights(m) for m in (*models, Path(models[0]).with_name("prose")))
    value = yaml.safe_load((theirs / f"{name}.yaml").read_text())["parameters"]
    got = ours(theirs, name, tmp_path / "out")
    wanted = mm.load_weights(theirs / name)
    for tensor, mine in got.items():
        at_limit = torch.zeros_like(mine, dtype=torch.bool)
        for other in others:
            size = (other[tensor] - base[tensor]).abs()
            order = size.float().reshape(-1).sort().values
            keep = max(1, int(value["density"] * len(order)))
            top = int(value.get("gamma", 0.01) * len(order)) if "breadcrumbs" in name else 0
            bottom = max(0, len(order) - keep - top)
            for place in (bottom - 1, bottom, bottom + keep - 1, bottom + keep):
                if 0 <= place < len(order):
                    at_limit |= size.float() == order[place]
        assert torch.equal(mine[~at_limit], wanted[tensor][~at_limit]), tensor
        assert at_limit.float().mean() < 0.3


@pytest.mark.parametrize(
    "name",
    [
        "ties",
        "ties_gradient",
        "ties_sum",
        "breadcrumbs",
        "breadcrumbs_ties",
        "sce",
        "task_arithmetic",
        "nearswap",
    ],
)
def test_equal_in_float32_where_no_two_changes_are_alike(
    wide_theirs: Path, tmp_path: Path, name: str
) -> None:
    got = ours(wide_theirs, name, tmp_path / "out")
    wanted = mm.load_weights(wide_theirs / name)
    for tensor, mine in got.items():
        torch.testing.assert_close(mine, wanted[tensor], rtol=2e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["dare_linear", "dare_ties", "della_linear", "della"])
def test_the_same_statistics_where_values_are_drawn(
    theirs: Path, tmp_path: Path, models: list[str], name: str
) -> None:
    base = mm.load_weights(models[0])["model.embed_tokens.weight"].double()
    got = ours(theirs, name, tmp_path / "out", seed=3)["model.embed_tokens.weight"].double() - base
    wanted = mm.load_weights(theirs / name)["model.embed_tokens.weight"].double() - base
    for measure in (lambda d: (d == 0).double().mean(), lambda d: d.abs().mean(), torch.std):
        assert measure(got).item() == pytest.approx(measure(wanted).item(), rel=0.03)
    assert not torch.equal(got, wanted)
