"""Merging on a GPU gives what it gives on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import merge_models as mm
from sharpen.config import parse_config
from sharpen.merge.recipe import MergeConfig
from sharpen.merge.stream import MergeOptions, merge

RECIPES = {
    "linear": {"weight": 1.0},
    "slerp": {"t": 0.3},
    "multislerp": {"weight": 0.5},
    "karcher": {},
    "task_arithmetic": {"weight": 0.5},
    "ties": {"weight": 0.5, "density": 0.5},
    "breadcrumbs_ties": {"weight": 0.5, "density": 0.6, "gamma": 0.1},
    "dare_ties": {"weight": 0.5, "density": 0.5},
    "della": {"weight": 0.5, "density": 0.5},
    "model_stock": {"filter_wise": True},
    "sce": {"select_topk": 0.5},
}


@pytest.mark.gpu
@pytest.mark.parametrize("method", RECIPES)
def test_the_same_on_both_devices(tmp_path: Path, method: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    base, math, code = mm.save_trio(tmp_path, hidden=64, vocab=300)
    based = {} if method in ("linear", "karcher") else {"base_model": base}
    based = {"base_model": math} if method == "slerp" else based
    values = {"merge_method": method, "parameters": RECIPES[method], **based}
    values["models"] = [{"model": m} for m in (math, code)]
    recipe = parse_config(MergeConfig, values, method)
    for device in ("cpu", "cuda"):
        merge(recipe, tmp_path / device, MergeOptions(seed=1, device=device))
    cpu = mm.load_weights(tmp_path / "cpu")
    gpu = mm.load_weights(tmp_path / "cuda")
    for name in cpu:
        torch.testing.assert_close(gpu[name], cpu[name], rtol=2**-6, atol=1e-4)
