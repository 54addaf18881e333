"""LoRA adapters and task vectors as parts of a merge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import merge_models as mm
from sharpen.config import parse_config
from sharpen.merge.adapters import merge_adapters, open_reference
from sharpen.merge.checkpoint import open_model
from sharpen.merge.recipe import MergeConfig
from sharpen.merge.stream import merge
from sharpen.merge.vectors import load_task_vector, write_task_vector
from sharpen.types import SharpenError

PLACES = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")


def adapter(folder: Path, base: str, seed: int, rank: int = 4, **config: object) -> Path:
    folder.mkdir(parents=True)
    random = torch.Generator().manual_seed(seed)
    weights = mm.load_weights(base)
    tensors = {}
    for place in PLACES:
        rows, columns = weights[f"{place}.weight"].shape
        name = f"base_model.model.{place}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, columns, generator=random) * 0.1
        tensors[f"{name}.lora_B.weight"] = torch.randn(rows, rank, generator=random) * 0.1
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "base_model_name_or_path": base}
    values |= {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(values | config))
    return folder


def update(folder: Path, place: str, scale: float) -> torch.Tensor:
    stored = mm.load_weights(folder)
    name = f"base_model.model.{place}"
    return scale * stored[f"{name}.lora_B.weight"] @ stored[f"{name}.lora_A.weight"]


def passed(model: str, out: Path, **values: object) -> dict:
    recipe = {"merge_method": "passthrough", "models": [{"model": model}], **values}
    merge(parse_config(MergeConfig, recipe, "test"), out)
    return mm.load_weights(out)


@pytest.mark.parametrize(
    "config, scale",
    [({}, 2.0), ({"use_rslora": True}, 4.0), ({"alpha_pattern": {"q_proj": 4}}, 1.0)],
)
def test_an_adapter_is_merged_while_the_base_is_read(
    tmp_path: Path, config: dict, scale: float
) -> None:
    base = mm.save_trio(tmp_path)[0]
    lora = adapter(tmp_path / "lora", base, 1, **config)
    merged = passed(f"{base}+{lora}", tmp_path / "out")
    before = mm.load_weights(base)
    name = f"{PLACES[0]}.weight"
    wanted = (before[name].float() + update(lora, PLACES[0], scale)).bfloat16()
    torch.testing.assert_close(merged[name], wanted, rtol=2**-7, atol=1e-4)
    assert not torch.equal(merged[name], before[name])
    assert torch.equal(merged["lm_head.weight"], before["lm_head.weight"])
    alone = passed(str(lora), tmp_path / "alone")
    assert all(torch.equal(alone[n], merged[n]) for n in merged)


def test_dora_and_saved_modules(tmp_path: Path) -> None:
    base = mm.save_trio(tmp_path)[0]
    lora = adapter(tmp_path / "lora", base, 1, use_dora=True)
    stored = mm.load_weights(lora)
    before = mm.load_weights(base)
    length = torch.rand(16) + 0.5
    stored[f"base_model.model.{PLACES[0]}.lora_magnitude_vector"] = length
    stored["base_model.model.lm_head.weight"] = torch.ones(mm.VOCAB, 16)
    save_file(stored, lora / "adapter_model.safetensors")
    merged = passed(f"{base}+{lora}", tmp_path / "out")
    rows = merged[f"{PLACES[0]}.weight"].float().norm(dim=1)
    torch.testing.assert_close(rows, length, rtol=2**-7, atol=1e-3)
    assert torch.equal(merged["lm_head.weight"], torch.ones(mm.VOCAB, 16).bfloat16())
    assert before["lm_head.weight"].shape == merged["lm_head.weight"].shape


def test_adapters_of_one_base_in_any_method(tmp_path: Path) -> None:
    base = mm.save_trio(tmp_path)[0]
    one = adapter(tmp_path / "one", base, 1)
    two = adapter(tmp_path / "two", base, 2)
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": base,
        "models": [{"model": str(x), "parameters": {"weight": 0.5}} for x in (one, two)],
        "dtype": "float32",
    }
    merge(parse_config(MergeConfig, recipe, "test"), tmp_path / "out")
    name = f"{PLACES[1]}.weight"
    wanted = mm.load_weights(base)[name].float() + sum(
        update(x, PLACES[1], 1.0) for x in (one, two)
    )
    torch.testing.assert_close(
        mm.load_weights(tmp_path / "out")[name], wanted, rtol=0.02, atol=2e-3
    )


def test_adapters_merge_by_svd(tmp_path: Path) -> None:
    base = mm.save_trio(tmp_path)[0]
    one = adapter(tmp_path / "one", base, 1)
    two = adapter(tmp_path / "two", base, 2, rank=3)
    report = merge_adapters([one, two], tmp_path / "whole", rank=8, weights=[0.7, 0.3])
    assert report["energy_kept"] == pytest.approx(1.0) and report["modules"] == 2
    for place in PLACES:
        wanted = 0.7 * update(one, place, 2.0) + 0.3 * update(two, place, 8 / 3)
        torch.testing.assert_close(
            update(tmp_path / "whole", place, 1.0), wanted, rtol=1e-4, atol=1e-5
        )
        low = merge_adapters([one, two], tmp_path / f"low{place}", rank=2, weights=[0.7, 0.3])
        best = torch.linalg.svd(wanted).S
        left = (update(tmp_path / f"low{place}", place, 1.0) - wanted).square().sum()
        torch.testing.assert_close(left, best[2:].square().sum(), rtol=1e-3, atol=1e-5)
        assert 0 < low["energy_kept"] < 1
    config = json.loads((tmp_path / "whole" / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == 8
    assert config["target_modules"] == ["down_proj", "q_proj"]


@pytest.mark.parametrize("share, sparse", [(1.0, False), (0.05, True)])
def test_a_task_vector_brings_the_tuned_model_back(
    tmp_path: Path, share: float, sparse: bool
) -> None:
    base, _, _ = mm.save_trio(tmp_path)
    weights = mm.load_weights(base)
    tuned = mm.tune(weights, 9)
    random = torch.Generator().manual_seed(0)
    for name, tensor in tuned.items():
        keep = torch.rand(tensor.shape, generator=random) < share
        tuned[name] = torch.where(keep, tensor, weights[name])
    other = mm.save_model(tmp_path / "tuned", tuned)
    file = tmp_path / "v.safetensors"
    report = write_task_vector(open_model(base), open_model(other), file)
    assert (report["sparse"] > 0) == sparse
    back = passed(f"{base}+{file}", tmp_path / "out")
    assert all(torch.equal(back[n], tuned[n]) for n in tuned)
    vector = load_task_vector(file)
    assert all(torch.equal(vector[n], tuned[n].float() - weights[n].float()) for n in tuned)
    if sparse:
        assert file.stat().st_size < sum(t.numel() * 4 for t in tuned.values())


def test_what_cannot_be_laid_over_a_model(tmp_path: Path) -> None:
    base, math, _ = mm.save_trio(tmp_path)
    lora = adapter(tmp_path / "lora", base, 1)
    mm.save_model(tmp_path / "small", mm.random_weights(0, hidden=8))
    for text, reason in (
        (f"{base}+{math}", "is not an adapter folder"),
        (f"{base}+{tmp_path}/no.safetensors", "no such task vector"),
        (f"{tmp_path}/small+{lora}", "does not fit"),
    ):
        with pytest.raises(SharpenError, match=reason):
            open_reference(text)
    values = json.loads((lora / "adapter_config.json").read_text())
    (lora / "adapter_config.json").write_text(
        json.dumps(values | {"base_model_name_or_path": "x/y"})
    )
    with pytest.raises(SharpenError, match="'x/y' is not a folder"):
        open_reference(str(lora))
    assert open_reference(str(lora), base).where == f"{base}+{lora}"


@pytest.mark.slow
def test_the_same_as_peft(tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    base = mm.save_model(tmp_path / "base", mm.random_weights(0))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for name, extra in {
        "plain": {},
        "rs": {"use_rslora": True},
        "dora": {"use_dora": True},
    }.items():
        config = peft.LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=["q_proj", "down_proj"],
            init_lora_weights=False,
            **extra,
        )
        tuned = peft.get_peft_model(
            AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config
        )
        tuned.save_pretrained(tmp_path / name)
        wanted = tuned.merge_and_unload().state_dict()
        merged = passed(f"{base}+{tmp_path / name}", tmp_path / f"out-{name}", dtype="float32")
        for key, tensor in merged.items():
            torch.testing.assert_close(
                tensor, wanted[key].bfloat16().float(), rtol=2**-7, atol=1e-3
            )
    assert model.config.num_hidden_layers == 2
