"""One adapter through the whole chain: DPO, GRPO and PPO continue the adapter that they start from,
against a frozen copy of it, and save an adapter of the same base."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from peft.tuners.lora import Linear
from safetensors.torch import load_file

from guessing import metrics, tasks
from sharpen.config import Config
from sharpen.models.load import (
    LoRAConfig,
    ModelConfig,
    attach_lora,
    base_of_adapter,
    load_model,
    load_tokenizer,
)
from sharpen.train.config.dpo import DPOConfig
from sharpen.train.config.grpo import GRPOConfig
from sharpen.train.config.ppo import PPOConfig
from sharpen.train.dpo import DPOTrainer
from sharpen.train.grpo import GRPOTrainer
from sharpen.train.learner import Learner, LogprobModel
from sharpen.train.policy_setup import (
    AdapterAsReference,
    BaseAsReference,
    ModelAsReference,
    ReferencePolicy,
    active_adapter,
    prepare_policy,
)
from sharpen.train.ppo import PPOTrainer
from sharpen.types import Datum, SharpenError
from test_dpo import pairs, write

pytestmark = pytest.mark.usefixtures("without_reports")
RANK = 4


@pytest.fixture(scope="module")
def adapter(guesser, tmp_path_factory) -> Path:
    """An adapter that says something, with dropout as SFT leaves it."""
    folder = tmp_path_factory.mktemp("adapter")
    model = load_model(ModelConfig(base_model=str(guesser), device="cpu"))
    torch.manual_seed(0)
    settings = LoRAConfig(lora_r=RANK, lora_alpha=8, lora_dropout=0.5, lora_target_modules=TARGETS)
    model = attach_lora(model, settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(folder)
    load_tokenizer(str(guesser)).save_pretrained(folder)
    return folder


TARGETS = ("q_proj", "v_proj", "down_proj")
RUN = {"device": "cpu", "learning_rate": 1e-3, "save_steps": 1}


def grpo_config(adapter: Path, data: str, **more) -> GRPOConfig:
    settings = {"base_model": str(adapter), "train_data": data, "max_steps": 3, "max_tokens": 8}
    settings |= {"tasks_per_step": 4, "group_size": 4, "beta": 0.1}
    return GRPOConfig(**(RUN | settings | more))


def dpo_config(adapter: Path, data: str, **more) -> DPOConfig:
    settings = {"base_model": str(adapter), "train_data": data, "max_steps": 3}
    settings |= {"batch_size": 8, "gradient_accumulation": 1}
    return DPOConfig(**(RUN | settings | more))


def some_rows() -> list[Datum]:
    chance = np.random.default_rng(0)
    ids = [chance.integers(5, 200, length).astype(np.int32) for length in (12, 20)]
    return [Datum(row, np.arange(len(row)) > 5) for row in ids]


def prepared(config: GRPOConfig | DPOConfig) -> tuple[Learner, ReferencePolicy]:
    setup = prepare_policy(config, with_reference=True)
    assert isinstance(setup.reference, AdapterAsReference) and not setup.merged
    return Learner(setup.model, config, 10), setup.reference


def mean_logprob(logprobs_N, batch, tokens):
    return -logprobs_N.mean()


def test_the_reference_stays_where_the_policy_started(adapter):
    learner, reference = prepared(grpo_config(adapter, "x.jsonl"))
    rows = some_rows()
    before = learner.logprobs(rows)
    for at_start, of_reference in zip(before, reference.logprobs(learner, rows), strict=True):
        np.testing.assert_array_equal(at_start, of_reference)
    for _ in range(3):
        learner.step(rows, mean_logprob)
    after = learner.logprobs(rows)
    assert max(np.abs(a - b).max() for a, b in zip(before, after, strict=True)) > 1e-3
    for at_start, of_reference in zip(before, reference.logprobs(learner, rows), strict=True):
        np.testing.assert_array_equal(at_start, of_reference)
    for here, again in zip(after, learner.logprobs(rows), strict=True):  # switched back
        np.testing.assert_array_equal(here, again)


def test_only_the_policys_adapter_is_trained(adapter):
    learner, _ = prepared(grpo_config(adapter, "x.jsonl"))
    assert learner.trained and all(".default." in name for name in learner.trained)
    optimised = {id(p) for group in learner.optimizer.param_groups for p in group["params"]}
    assert optimised == {id(p) for p in learner.master.values()}
    frozen = [n for n, p in learner.model.named_parameters() if ".reference." in n]
    assert len(frozen) == len(learner.trained)
    own = json.loads((adapter / "adapter_config.json").read_text())
    assert learner.model.peft_config["default"].r == own["r"] == RANK
    assert learner.model.peft_config["default"].lora_dropout == 0
    learner.model.train()  # the dropout of the adapter's own training is gone
    first = LogprobModel(learner.model).score(some_rows(), 999)
    second = LogprobModel(learner.model).score(some_rows(), 999)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_exception_switches_back(adapter):
    learner, _ = prepared(grpo_config(adapter, "x.jsonl"))
    trainable = [n for n, p in learner.model.named_parameters() if p.requires_grad]
    with pytest.raises(KeyError), active_adapter(learner.model, "reference"):
        # nothing is frozen or thawed inside: a sharded model would remember it
        assert [n for n, p in learner.model.named_parameters() if p.requires_grad] == trainable
        raise KeyError
    assert learner.model.active_adapter == "default"
    assert [n for n, p in learner.model.named_parameters() if p.requires_grad] == trainable


def test_both_adapters_take_the_fast_path(adapter, monkeypatch):
    learner, reference = prepared(grpo_config(adapter, "x.jsonl"))

    def slow(*_, **__):
        raise AssertionError("PEFT's own forward was called")

    monkeypatch.setattr(Linear, "forward", slow)
    learner.logprobs(some_rows())
    reference.logprobs(learner, some_rows())


def assert_final_adapter(run: Path, guesser: Path, trained: dict[str, torch.Tensor]) -> None:
    """`final/` is the plain default adapter of the same base, and nothing beside it."""
    final = run / "final"
    assert base_of_adapter(final) == str(guesser)
    assert not (final / "config.json").exists() and not (final / "reference").exists()
    own = json.loads((final / "adapter_config.json").read_text())
    assert own["r"] == RANK and set(own["target_modules"]) == set(TARGETS)
    weights = load_file(final / "adapter_model.safetensors")
    assert {name.replace(".default", "") for name in trained} == set(weights)
    for name, value in trained.items():
        torch.testing.assert_close(weights[name.replace(".default", "")], value, rtol=0, atol=0)


def test_grpo_continues_an_adapter(guesser, adapter, tmp_path, capsys):
    trainer = GRPOTrainer(grpo_config(adapter, tasks(tmp_path)), tmp_path / "run")
    trainer.train()
    assert "its adapter is continued (lora_r 4, lora_alpha 8, " in capsys.readouterr().out
    rows = metrics(tmp_path / "run")
    lively = [row for row in rows if not row["skipped"]]
    # the sampler sees what is trained, and the reference is where it started
    assert lively and all(row["mismatch"] < 1e-5 for row in lively)
    assert lively[0]["kl"] == pytest.approx(0, abs=1e-6) and lively[-1]["kl"] > 1e-6
    assert_final_adapter(tmp_path / "run", guesser, trainer.learner.weights())


def test_dpo_continues_an_adapter(guesser, adapter, tmp_path):
    data = write(tmp_path / "pairs.jsonl", pairs(24))
    settings = dpo_config(adapter, data, max_steps=12, num_epochs=4, learning_rate=3e-3)
    trainer = DPOTrainer(settings, tmp_path / "run")
    trainer.train()
    rows = metrics(tmp_path / "run")
    assert rows[0]["margin"] == 0 and rows[-1]["loss"] < rows[0]["loss"]
    assert_final_adapter(tmp_path / "run", guesser, trainer.learner.weights())
    again = DPOTrainer(dpo_config(tmp_path / "run", data, max_steps=1), tmp_path / "second")
    again.train()  # and so on through the chain
    assert metrics(tmp_path / "second")[0]["margin"] == 0
    assert_final_adapter(tmp_path / "second", guesser, again.learner.weights())


def test_ppo_continues_an_adapter(guesser, adapter, tmp_path):
    settings = {"base_model": str(adapter), "train_data": tasks(tmp_path), "max_steps": 1}
    settings |= {"num_rollouts": 16, "chunk_size": 8, "max_tokens": 8}
    trainer = PPOTrainer(PPOConfig(**(RUN | settings)), tmp_path / "run")
    trainer.train()
    (row,) = metrics(tmp_path / "run")
    assert not row["skipped"] and row["kl"] == pytest.approx(0, abs=1e-5)
    assert_final_adapter(tmp_path / "run", guesser, trainer.learner.weights())


def test_a_continued_adapter_resumes_bit_for_bit(adapter, tmp_path, monkeypatch):
    settings = grpo_config(adapter, tasks(tmp_path))
    GRPOTrainer(settings, tmp_path / "whole").train()
    calls, step = iter(range(99)), Learner.step

    class Killed(BaseException):
        pass

    def dying(*given):
        if next(calls) == 2:
            raise Killed
        return step(*given)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "step", dying)
        with pytest.raises(Killed):
            GRPOTrainer(settings, tmp_path / "parts").train()
    GRPOTrainer(settings, tmp_path / "parts").train()
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    file = "final/adapter_model.safetensors"
    assert (tmp_path / "parts" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


@pytest.mark.parametrize("more", [{"fresh_adapter": True, "lora_r": 2}, {"full": True}])
def test_a_merged_adapter_is_saved_whole(adapter, tmp_path, more):
    """The base of a fresh adapter is on no disk."""
    trainer = GRPOTrainer(grpo_config(adapter, tasks(tmp_path), **more), tmp_path / "run")
    trainer.train()
    expected = ModelAsReference if "full" in more else BaseAsReference
    assert isinstance(trainer.setup.reference, expected)
    assert metrics(tmp_path / "run")[0]["kl"] == pytest.approx(0, abs=1e-6)
    model = load_model(ModelConfig(base_model=str(tmp_path / "run"), device="cpu"))
    assert not hasattr(model, "peft_config")
    rows = some_rows()
    trainer.learner.core.temperature = 1.0
    saved = LogprobModel(model).score(rows, 999)
    for mine, theirs in zip(trainer.learner.logprobs(rows), saved, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"lora_r": 8}, "lora_r is 8 in the settings, but the adapter that is continued has 4"),
        ({"lora_target_modules": ("q_proj",)}, "lora_target_modules is q_proj in the settings"),
        ({"fresh_adapter": True, "load_in_4bit": True}, "fresh_adapter=true merges the adapter"),
        ({"full": True, "parallel": "fsdp2"}, "full=true merges the adapter, which parallel=fsdp2"),
    ],
)
def test_what_does_not_fit_the_adapter_is_said(adapter, monkeypatch, more, problem):
    if "load_in_4bit" in more:  # a quantised base needs a GPU
        plain = {"load_in_4bit": False}
        load = lambda config: load_model(config.model_copy(update=plain))  # noqa: E731
        monkeypatch.setattr("sharpen.train.policy_setup.load_model", load)
    config: Config = grpo_config(adapter, "x.jsonl", **more)
    with pytest.raises(SharpenError, match=problem):
        prepare_policy(config, with_reference=True)  # type: ignore[arg-type]


def test_settings_that_agree_may_be_given(adapter):
    more = {"lora_r": RANK, "lora_alpha": 8, "lora_target_modules": TARGETS[::-1]}
    prepared(grpo_config(adapter, "x.jsonl", **more))


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_processes_continue_an_adapter_like_one(guesser, adapter, tmp_path, parallel):
    """The reference is asked before the first step: switching adapters freezes nothing for good."""
    data = write(tmp_path / "pairs.jsonl", pairs(24))
    common = ["-m", "sharpen.cli.main", "train", "dpo", "--sft-model", str(adapter), "--data", data]
    common += ["device=cpu", "batch_size=6", "gradient_accumulation=1", "token_budget=150"]
    common += ["learning_rate=1e-3", "--output"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    for name, start, more in (("one", [], []), ("two", launcher, [f"parallel={parallel}"])):
        command = [sys.executable, *start, *common, str(tmp_path / name), *more]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = (metrics(tmp_path / name) for name in ("one", "two"))
    assert len(one) == len(two) == 4 and two[0]["margin"] == pytest.approx(0, abs=1e-5)
    for key in ("loss", "norm", "margin"):
        np.testing.assert_allclose(
            [row[key] for row in one], [row[key] for row in two], rtol=1e-3, atol=1e-5
        )
    assert one[-1]["norm"] > 0
    weights = [load_file(tmp_path / n / "final/adapter_model.safetensors") for n in ("one", "two")]
    assert base_of_adapter(tmp_path / "two" / "final") == str(guesser)
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-3, atol=1e-4)
