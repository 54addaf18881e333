"""Estimates: parameter counts are exact, memory is plausible against what was measured."""

from __future__ import annotations

import pytest

from sharpen.config import ConfigError, load_config
from sharpen.models.estimate import SPEC_TABLE, Estimate, Preset, estimate, find_shape
from sharpen.models.load import LoRAConfig, ModelConfig, attach_lora, load_model
from sharpen.pipeline import load_recipe, recipe_path
from sharpen.types import SharpenError


def test_parameter_counts_are_exact(pico_folder):
    model = load_model(ModelConfig(base_model=str(pico_folder), device="cpu"))
    shape = find_shape(str(pico_folder))
    assert shape.parameters() == sum(p.numel() for p in model.parameters())
    assert shape.parameters() == find_shape("pico").parameters()
    settings = LoRAConfig(lora_r=8)
    trainable, _ = attach_lora(model, settings).get_nb_trainable_parameters()
    assert shape.lora_parameters(8, settings.lora_target_modules) == trainable


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("smollm2-135m", 0.134515),
        ("Qwen/Qwen2.5-0.5B-Instruct", 0.494033),
        ("Qwen/Qwen2.5-7B-Instruct", 7.615617),
    ],
)
def test_published_sizes(model, billions):
    assert round(find_shape(model).parameters() / 1e9, 6) == billions


@pytest.mark.parametrize("name", ["rtx3060", "development", "production", "7b", "14b", "32b"])
def test_presets_fit_their_cards(name):
    needs = estimate(load_config(Preset, recipe_path(name)))
    assert needs.note.startswith("fits") and needs.hours > 0
    with pytest.raises(ConfigError, match="a preset of training settings"):
        load_recipe(name)


def test_measured_activations_are_bracketed():
    """A 16k-token step of a 7B shape was measured at 85-117 GB without and 26 GB with
    checkpointing."""
    plain = Preset(batch_size=4, max_length=4096)
    checkpointed = plain.model_copy(update={"gradient_checkpointing": True})
    assert 80 < estimate(plain).total_gib < 125
    assert 20 < estimate(checkpointed).total_gib < 35


def test_estimates_move_the_right_way():
    base: Estimate = estimate(Preset())
    assert estimate(Preset(load_in_4bit=True)).total_gib < base.total_gib
    assert estimate(Preset(batch_size=8)).total_gib > base.total_gib
    assert estimate(Preset(lora_r=0)).trainable == base.parameters > base.trainable
    assert estimate(Preset(method="dpo")).hours > base.hours
    assert estimate(Preset(card="RTX3060")).note.startswith("does NOT fit")


def test_unknown_card_and_model():
    with pytest.raises(SharpenError, match="known cards are"):
        estimate(Preset(card="A1000"))
    with pytest.raises(SharpenError, match="neither a model folder nor a known shape"):
        estimate(Preset(base_model="nobody/nothing"))


def test_specification_table_has_its_rows(sharpen):
    assert [(row[0], row[2], row[3]) for row in SPEC_TABLE] == [
        ("SFT", 60, 8),
        ("DPO", 70, 4),
        ("PPO", 140, 12),
    ]
    code, out, _ = sharpen("estimate", "--table", "--json")
    assert code == 0 and "~140 GB" in out and '"spec_hours": 12' in out.splitlines()[-1]
