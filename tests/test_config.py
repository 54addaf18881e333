"""Configs: strict, overridable, and every mistake reported at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sharpen.cli.settings_page import list_settings, settings_page
from sharpen.config import Config, ConfigError, load_config
from sharpen.rewards.compose import RewardConfig
from sharpen.train.config.dpo import DPOConfig
from sharpen.train.config.grpo import GRPOConfig
from sharpen.train.config.ppo import PPOConfig
from sharpen.train.config.reward_model import RewardModelConfig
from sharpen.train.config.sft import AgentSFTConfig, WarmupConfig
from sharpen.train.config.specification import R1TrainingConfig, RLTrainingConfig
from sharpen.train.methods import METHODS


class Inner(Config):
    rate: float = 0.1


class Outer(Config):
    name: str
    lora_r: int = 8
    inner: Inner = Inner()
    many: tuple[Inner, ...] = ()


def write(tmp_path, text: str):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return path


def test_file_interpolation_and_overrides(tmp_path):
    path = write(
        tmp_path, "name: x\nlora_r: 4\ninner: {rate: 0.5}\nmany: [{rate: '${inner.rate}'}]"
    )
    config = load_config(Outer, path, ["lora_r=16", "many.0.rate=2", "name=a=b"])
    assert (config.name, config.lora_r, config.many[0].rate) == ("a=b", 16, 2.0)
    assert load_config(Outer, path).many[0].rate == 0.5


def test_all_errors_on_one_line(tmp_path):
    path = write(tmp_path, "lora_rr: 4\ninner: {rat: 1}\nmany: [{rate: hot}]")
    with pytest.raises(ConfigError) as caught:
        load_config(Outer, path)
    text = str(caught.value)
    assert "\n" not in text
    assert "name: missing" in text
    assert "lora_rr: unknown field, did you mean 'lora_r'?" in text
    assert "inner.rat: unknown field, did you mean 'rate'?" in text
    assert "many.0.rate" in text and "'hot'" in text


def test_direct_construction_explains_too():
    with pytest.raises(ConfigError, match=r"Outer: .*did you mean 'lora_r'"):
        Outer(name="x", lora=3, lorar=4)


def test_configs_are_frozen_and_hashed():
    a, b = Outer(name="x"), Outer(name="x", lora_r=9)
    assert a.hash() == Outer(name="x").hash() != b.hash()
    with pytest.raises(Exception, match="frozen"):
        a.lora_r = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "overrides", "complaint"),
    [
        ("a: [1", [], r"c\.yaml:1:6: not YAML"),
        ("a:\n  - b\n c: d", [], r"c\.yaml:3"),
        ("- 1", [], "expected a mapping"),
        ("name: ${gone}", [], "gone"),
        ("name: x", ["lora_r"], "expected key=value"),
        ("name: x", ["=3"], "expected key=value"),
        ("name: x", ["lora_r=[1"], "overrides|c.yaml"),
    ],
)
def test_broken_input_is_one_line(tmp_path, text, overrides, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_config(Outer, write(tmp_path, text), overrides)
    assert "\n" not in str(caught.value)


def test_missing_and_binary_files(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_config(Outer, tmp_path / "gone.yaml")
    path = tmp_path / "b.yaml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(Outer, path)


# The settings of training ------------------------------------------------------------------------


TRAINING_CONFIGS = (
    AgentSFTConfig,
    RewardModelConfig,
    DPOConfig,
    GRPOConfig,
    PPOConfig,
    RLTrainingConfig,
    R1TrainingConfig,
    WarmupConfig,
    RewardConfig,
)


@pytest.mark.parametrize("config_class", TRAINING_CONFIGS)
def test_every_setting_has_a_description(config_class):
    for name, field in config_class.model_fields.items():
        assert field.description and field.description.endswith("."), name


@pytest.mark.parametrize("method", list(METHODS))
def test_the_table_has_every_setting_once(method):
    names = [setting.name for setting in list_settings(method)]
    assert len(names) == len(set(names))
    fields = set(METHODS[method].load_config_class().model_fields)
    assert {name.partition(".")[0] for name in names} == fields


def test_the_page_of_settings_is_current():
    page = Path(__file__).parents[1] / "docs" / "settings.md"
    assert page.read_text("utf-8") == settings_page(), (
        "run `python -m sharpen.cli.settings_page > docs/settings.md`"
    )


def test_both_names_of_a_setting(tmp_path):
    ours = PPOConfig(tasks_per_step=16, clip=0.3)
    assert PPOConfig(num_rollouts=16, clip_range=0.3) == ours  # type: ignore[call-arg]
    assert load_config(PPOConfig, write(tmp_path, "num_rollouts: 16"), ["clip_range=0.3"]) == ours
    assert load_config(PPOConfig, write(tmp_path, "tasks_per_step: 16"), ["clip=0.3"]) == ours
    assert PPOConfig(num_rollouts=16, **ours.model_dump()) == ours
    assert (ours.num_rollouts, ours.clip_range, ours.minibatches) == (16, 0.3, 1)
    with pytest.raises(ConfigError, match=r"tasks_per_step \(16\) and num_rollouts \(8\) are two"):
        PPOConfig(num_rollouts=8, tasks_per_step=16)  # type: ignore[call-arg]
    r1 = R1TrainingConfig(train_data="x", model_name="pico", clip_ratio=3.0)  # type: ignore[call-arg]
    assert (r1.base_model, r1.clip, r1.kl_coef) == ("pico", 3.0, 0.001)


@pytest.mark.parametrize(
    ("config_class", "setting"),
    [
        (GRPOConfig, {"batch_size": 1}),
        (GRPOConfig, {"gradient_accumulation": 1}),
        (GRPOConfig, {"lora_dropout": 0.0}),
        (PPOConfig, {"group_size": 1}),
        (PPOConfig, {"beta": 0.0}),
        (PPOConfig, {"minibatches": 2}),
        (DPOConfig, {"train_data": "x", "lora_dropout": 0.0}),
        (RewardModelConfig, {"train_data": "x", "lora_dropout": 0.0}),
    ],
)
def test_a_method_has_only_its_own_settings(config_class, setting):
    with pytest.raises(ConfigError, match="unknown field"):
        config_class(**setting)


@pytest.mark.parametrize(
    ("given", "filled_in"),
    [
        ({}, (0.2, 0, 0)),
        ({"clip": "3e-4"}, (3e-4, 0, 0)),
        ({"variant": "dapo", "max_tokens": 100}, (0.28, 3, 20)),
        ({"variant": "dapo", "clip": 0.4, "refill_rounds": None}, (0.4, 3, 51)),
        ({"variant": "dapo", "clip_high": 0.3, "refill_rounds": 0, "overlong_buffer": 0},
         (0.3, 0, 0)),
    ],
)  # fmt: skip
def test_a_run_shows_what_its_variant_fills_in(given, filled_in):
    config = GRPOConfig(**given)
    saved = yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))
    assert (saved["clip_high"], saved["refill_rounds"], saved["overlong_buffer"]) == filled_in
    assert GRPOConfig(**saved) == config


def test_wrong_settings_do_not_bring_errors_of_what_depends_on_them():
    with pytest.raises(ConfigError) as caught:
        GRPOConfig(clip="hot", max_tokens=0, variant="dap")  # type: ignore[arg-type]
    text = str(caught.value)
    assert "clip: " in text and "max_tokens: " in text and "variant: " in text
    assert "clip_high" not in text and "refill_rounds" not in text and "overlong" not in text


def test_settings_are_checked_without_torch():
    code = (
        "import sys; from sharpen.train.methods import METHODS\n"
        "[method.load_config_class() for method in METHODS.values()]\n"
        "import sharpen.train.config.specification\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
