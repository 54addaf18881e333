"""The learner: right gradients, no dependence on the split, exact resume, guards."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpen.models.load import LoRAConfig, ModelConfig, attach_lora, load_model
from sharpen.render import Renderer
from sharpen.rows import dialog_to_row
from sharpen.train.batching import apportion, epoch_order, micro_batches
from sharpen.train.checkpoint import list_checkpoints
from sharpen.train.config.learner import LearnerConfig
from sharpen.train.config.sft import AgentSFTConfig
from sharpen.train.learner import Learner
from sharpen.train.losses import learning_rate, selected_logprobs
from sharpen.train.run import Interrupted
from sharpen.train.sft import AgentSFTTrainer, token_mean
from sharpen.types import Datum, SharpenError


def datum(length: int, seed: int) -> Datum:
    chance = np.random.default_rng(seed)
    mask = chance.random(length) < 0.4
    mask[length // 2] = True
    return Datum(chance.integers(0, 250, length).astype(np.int32), mask)


DATA = [datum(length, seed) for seed, length in enumerate((12, 40, 7, 25, 33, 9, 40, 18))]


def fresh(pico_folder, full: bool = True, **settings) -> Learner:
    model = load_model(ModelConfig(base_model=str(pico_folder), device="cpu"))
    torch.manual_seed(0)
    model = model.requires_grad_(True) if full else attach_lora(model, LoRAConfig(lora_r=4))
    return Learner(
        model, LearnerConfig(**{"learning_rate": 1e-3, "warmup_ratio": 0.0, **settings}), 10
    )


def test_selected_logprobs_equal_log_softmax():
    torch.manual_seed(0)
    hidden, head = (
        torch.randn(5000, 16, dtype=torch.float64),
        torch.randn(50, 16, dtype=torch.float64),
    )
    targets, slopes = torch.randint(0, 50, (5000,)), torch.randn(5000)
    ours = [t.clone().float().requires_grad_() for t in (hidden, head)]
    plain = [t.clone().float().requires_grad_() for t in (hidden, head)]
    found = selected_logprobs(ours[0], ours[1], targets)
    wanted = torch.log_softmax(plain[0] @ plain[1].T, -1).gather(-1, targets[:, None]).squeeze(-1)
    torch.testing.assert_close(found, wanted)
    (found * slopes).sum().backward()
    (wanted * slopes).sum().backward()
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-3)


def confident_tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, a head and targets whose probabilities go from 0.1 to 0.9999."""
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(500, 64, generator=generator) / 8
    targets = torch.randint(0, 500, (600,), generator=generator)
    scale = torch.linspace(4, 16, 600)[:, None]
    hidden = head[targets] * scale + torch.randn(600, 64, generator=generator) * 0.1
    return hidden.bfloat16(), head.bfloat16(), targets


def gradients(logprobs_of, hidden: torch.Tensor, head: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of the summed log-probabilities by hidden states and head, in fp64."""
    inputs = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
    logprobs_of(*inputs).sum().backward()
    return [tensor.grad.double() for tensor in inputs]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("chunk", [256, 1 << 28])
def test_gradients_of_confident_tokens_survive_bf16(compiled, chunk, monkeypatch):
    """By confidence: over all tokens the unsure ones hide the error of the sure ones."""
    monkeypatch.setattr("sharpen.train.losses.MAX_CHUNK_LOGITS", chunk)
    hidden, head, targets = confident_tokens()

    def plain(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        logits = hidden @ head.T
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        return logits.log_softmax(-1).gather(-1, targets[:, None])

    exact = gradients(plain, hidden.double(), head.double())
    usual = gradients(plain, hidden, head)
    ours = gradients(lambda *inputs: selected_logprobs(*inputs, targets, compiled), hidden, head)
    probability = plain(hidden.double(), head.double()).exp()[:, 0]
    bounds = (0.0, 0.9, 0.99, 0.999, 1.0)
    for low, high in itertools.pairwise(bounds):
        rows = (probability > low) & (probability <= high)
        assert rows.sum() > 20
        size = exact[0][rows].norm()
        error = (ours[0][rows] - exact[0][rows]).norm() / size
        usual_error = (usual[0][rows] - exact[0][rows]).norm() / size
        assert error < 0.1
        assert error < 1.2 * usual_error + 0.005
    head_error = (ours[1] - exact[1]).norm() / exact[1].norm()
    usual_head_error = (usual[1] - exact[1]).norm() / exact[1].norm()
    assert head_error < 1.2 * usual_head_error + 0.005


@pytest.mark.parametrize("full", [True, False])
def test_loss_and_gradients_equal_plain_transformers(pico_folder, full):
    """Padded to one batch, labels -100 where nothing is trained: the loss every other trainer
    computes."""
    learner = fresh(pico_folder, full)
    learner.model.eval()
    value = learner.accumulate(DATA, token_mean, float(sum(d.mask[1:].sum() for d in DATA)))
    found = {n: p.grad.clone() for n, p in learner.trained.items()}
    learner.model.zero_grad()
    width = max(len(d.ids) for d in DATA)
    tokens, labels = (
        torch.zeros(len(DATA), width, dtype=torch.long),
        torch.full((len(DATA), width), -100),
    )
    attention = torch.zeros_like(tokens)
    for row, d in enumerate(DATA):
        tokens[row, : len(d.ids)] = torch.tensor(d.ids)
        attention[row, : len(d.ids)] = 1
        labels[row, : len(d.ids)][torch.tensor(d.mask)] = torch.tensor(d.ids[d.mask]).long()
    output = learner.model(input_ids=tokens, attention_mask=attention, labels=labels)
    output.loss.backward()
    assert abs(value - output.loss.item()) < 1e-5
    for name, parameter in learner.trained.items():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_a_step_does_not_depend_on_its_split(pico_folder):
    reports, weights = [], []
    for budget in (10_000, 90, 1):
        learner = fresh(pico_folder, token_budget=budget)
        reports.append([learner.step(DATA, token_mean) for _ in range(3)])
        weights.append(torch.cat([p.detach().flatten() for p in learner.trained.values()]))
    for other in (1, 2):
        for a, b in zip(reports[0], reports[other], strict=True):
            assert abs(a.loss - b.loss) < 1e-5 and a.trained == b.trained and a.tokens == b.tokens
        torch.testing.assert_close(weights[0], weights[other], rtol=1e-3, atol=2e-5)


def test_learning_lowers_the_loss(pico_folder):
    learner = fresh(pico_folder, learning_rate=5e-3)
    before = learner.mean_loss(DATA)
    for _ in range(10):
        learner.step(DATA, token_mean)
    assert learner.mean_loss(DATA) < before - 0.5


def test_half_precision_keeps_small_updates(pico_folder):
    """Half-precision weights alone would round such a step away; the fp32 master copies add it
    up."""
    model = load_model(ModelConfig(base_model=str(pico_folder), device="cpu", dtype="float16"))
    learner = Learner(
        model.requires_grad_(True),
        LearnerConfig(learning_rate=1e-6, warmup_ratio=0, lr_scheduler="constant"),
        10,
    )
    name = "model.layers.0.mlp.up_proj.weight"
    start = learner.master[name].clone()
    for _ in range(3):
        learner.step(DATA, token_mean)
    moved = (learner.master[name] - start).abs()
    assert 2e-6 < float(moved.median()) < 4e-6
    assert learner.trained[name].dtype == torch.float16


def test_nan_steps_are_skipped_and_then_stop(pico_folder):
    learner = fresh(pico_folder)
    before = {n: p.clone() for n, p in learner.trained.items()}

    def broken(logprobs, batch, tokens):
        return token_mean(logprobs, batch, tokens) * float("nan")

    assert learner.step(DATA, broken).skipped
    assert all(torch.equal(before[n], p) for n, p in learner.trained.items())
    assert not learner.step(DATA, token_mean).skipped
    assert learner.step(DATA, broken).skipped and learner.step(DATA, broken).skipped
    with pytest.raises(SharpenError, match="3 steps in a row"):
        learner.step(DATA, broken)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.integers(1, 2000))
def test_micro_batches_hold_everything_once(lengths, budget):
    batches = micro_batches(lengths, budget)
    assert sorted(i for b in batches for i in b) == list(range(len(lengths)))
    assert all(len(b) == 1 or max(lengths[i] for i in b) * len(b) <= budget for b in batches)


def test_epoch_order():
    kinds = ["tool_selection"] * 70 + ["timing_decision"] * 20 + ["other"] * 10
    assert sorted(epoch_order(kinds, 0, 0)) == list(range(100))
    assert epoch_order(kinds, 0, 0) == epoch_order(kinds, 0, 0) != epoch_order(kinds, 0, 1)
    weighted = epoch_order(kinds, 0, 0, {"selection": 0.5, "timing": 0.5, "retrieval": 0.3})
    counts = {k: sum(kinds[i] == k for i in weighted) for k in set(kinds)}
    assert counts == {"tool_selection": 45, "timing_decision": 45, "other": 10}
    assert {i for i in weighted if kinds[i] == "timing_decision"} == set(range(70, 90))


@settings(max_examples=50)
@given(
    st.dictionaries(st.text(max_size=3), st.floats(0.01, 1), min_size=1, max_size=5),
    st.integers(0, 500),
)
def test_apportioned_counts_add_up(weights, total):
    fractions = {n: w / sum(weights.values()) for n, w in weights.items()}
    counts = apportion(fractions, total)
    assert sum(counts.values()) == total
    assert all(abs(counts[n] - fractions[n] * total) <= 1 for n in counts)


def test_learning_rate_shapes():
    rates = [learning_rate(s, 100, 1.0, "cosine", 10) for s in range(100)]
    assert rates[0] == 0.1 and rates[9] == rates[10] == 1.0 and rates[-1] < 0.01
    assert learning_rate(55, 100, 1.0, "linear", 10) == 0.5
    assert learning_rate(55, 100, 1.0, "constant", 10) == 1.0


def test_scorer_equals_the_learner_and_does_not_depend_on_batches(pico_folder, tmp_path):
    from sharpen.data.generate.starter import starter_dialogs
    from sharpen.train.scoring import ModelScorer, dev_loss

    rows = starter_dialogs("train", 6)
    scorer = ModelScorer.load(str(pico_folder), "cpu")
    found = scorer.losses(rows)
    scorer.token_budget = 1
    assert np.allclose(found, scorer.losses(rows), atol=1e-5)
    data = list(scorer.renderer.render(rows))
    learner = fresh(pico_folder)
    assert abs(learner.mean_loss([data[2]]) - found[2]) < 1e-5
    path = tmp_path / "dev.jsonl"
    path.write_text("".join(json.dumps(dialog_to_row(d)) + "\n" for d in rows))
    assert abs(dev_loss(pico_folder, path, "cpu") - learner.mean_loss(data)) < 1e-5


# The SFT loop ----------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path):
    from sharpen.data.generate.starter import starter_dialogs

    path = tmp_path / "train.jsonl"
    path.write_text(
        "".join(json.dumps(dialog_to_row(d)) + "\n" for d in starter_dialogs("train", 24))
    )
    return path


def config(pico_folder, data, **extra) -> AgentSFTConfig:
    values = {
        "base_model": str(pico_folder),
        "train_data": str(data),
        "device": "cpu",
        "lora_r": 4,
        "lora_alpha": 8,
    }
    values |= {
        "max_length": 2000,
        "batch_size": 4,
        "gradient_accumulation": 1,
        "num_epochs": 1,
        "save_steps": 2,
    }
    return AgentSFTConfig(**{**values, "learning_rate": 1e-3, **extra})


def losses(folder) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows]


def test_sft_trains_and_its_adapter_loads(pico_folder, data, tmp_path):
    trainer = AgentSFTTrainer(
        config(pico_folder, data, dev_data=str(data), eval_steps=3), tmp_path / "run"
    )
    figures = trainer.train()
    assert [s for s, _ in losses(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert figures["best_dev_loss"] is not None
    model = load_model(ModelConfig(base_model=str(tmp_path / "run" / "final"), device="cpu"))
    assert model.peft_config["default"].r == 4
    tokenizer = Renderer(trainer.renderer.tokenizer)
    assert tokenizer.template is None
    assert len(list_checkpoints(tmp_path / "run" / "checkpoints")) == 2


def stopped_after(step: int):
    """A trainer's loop that dies without warning behind `step` steps."""

    class Killed(Exception):
        pass

    original = Learner.step

    def dying(self, datums, loss):
        if self.steps_done == step:
            raise Killed
        return original(self, datums, loss)

    return Killed, dying


@pytest.mark.parametrize("full", [False, True])
def test_resume_is_bit_identical(pico_folder, data, tmp_path, monkeypatch, full):
    settings = config(pico_folder, data, full=full, lora_dropout=0.1, num_epochs=2)
    AgentSFTTrainer(settings, tmp_path / "whole").train()
    for step in (3, 9):
        killed, dying = stopped_after(step)
        with monkeypatch.context() as patch:
            patch.setattr(Learner, "step", dying)
            with pytest.raises(killed):
                AgentSFTTrainer(settings, tmp_path / "parts").train()
    AgentSFTTrainer(settings, tmp_path / "parts").train()
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    name = "model.safetensors" if full else "adapter_model.safetensors"
    assert (tmp_path / "parts" / "final" / name).read_bytes() == (
        tmp_path / "whole" / "final" / name
    ).read_bytes()


def test_death_between_checkpoint_and_metrics_loses_no_row(
    pico_folder, data, tmp_path, monkeypatch
):
    """Killed right behind a save, every step still has exactly one row."""
    import sharpen.train.run as checkpoint

    class Killed(Exception):
        pass

    saving = checkpoint.save_checkpoint

    def dying(*given):
        saving(*given)
        raise Killed

    settings = config(pico_folder, data)
    AgentSFTTrainer(settings, tmp_path / "whole").train()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_checkpoint", dying)
        with pytest.raises(Killed):
            AgentSFTTrainer(settings, tmp_path / "run").train()
    AgentSFTTrainer(settings, tmp_path / "run").train()
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_damaged_checkpoint_falls_back(pico_folder, data, tmp_path, monkeypatch, capsys):
    settings = config(pico_folder, data)
    AgentSFTTrainer(settings, tmp_path / "whole").train()
    killed, dying = stopped_after(5)
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "step", dying)
        with pytest.raises(killed):
            AgentSFTTrainer(settings, tmp_path / "run").train()
    newest = list_checkpoints(tmp_path / "run" / "checkpoints")[-1] / "state.safetensors"
    flipped = bytearray(newest.read_bytes())
    flipped[-5] ^= 1
    newest.write_bytes(flipped)
    AgentSFTTrainer(settings, tmp_path / "run").train()
    assert "damaged, trying the one before it" in capsys.readouterr().out
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_signal_saves_and_says_so(pico_folder, data, tmp_path, monkeypatch):
    settings = config(pico_folder, data, save_steps=100)
    AgentSFTTrainer(settings, tmp_path / "whole").train()
    original = Learner.step

    def interrupting(self, datums, loss):
        if self.steps_done == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, datums, loss)

    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "step", interrupting)
        with pytest.raises(Interrupted, match="SIGTERM") as caught:
            AgentSFTTrainer(settings, tmp_path / "run").train()
    assert caught.value.exit_code == 143
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    AgentSFTTrainer(settings, tmp_path / "run").train()
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_long_rows_are_counted_never_cut(pico_folder, data, tmp_path, capsys):
    lengths = sorted(
        len(d.ids) for d in Renderer(trainer_tokenizer(pico_folder)).render(dialogs(data))
    )
    trainer = AgentSFTTrainer(config(pico_folder, data, max_length=lengths[10]), tmp_path / "run")
    rows = trainer.prepare_datasets().rows
    assert max(len(d.ids) for d in rows) <= lengths[10]
    assert f"{24 - len(rows)} of 24 rows left out" in capsys.readouterr().out
    with pytest.raises(SharpenError, match=r"no row to train on \(of 24"):
        AgentSFTTrainer(
            config(pico_folder, data, max_length=10), tmp_path / "run"
        ).prepare_datasets()
    assert not (tmp_path / "run").exists()


def trainer_tokenizer(folder):
    from sharpen.models.load import load_tokenizer

    return load_tokenizer(str(folder))


def dialogs(path):
    from sharpen.records import read_jsonl
    from sharpen.rows import dialog_from_row

    return [dialog_from_row(row.value) for row in read_jsonl(path)]


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"train_data": "gone.jsonl"}, "gone.jsonl': neither a file nor"),
        ({"base_model": "nobody"}, "known names"),
    ],
)
def test_bad_input(pico_folder, data, tmp_path, extra, problem):
    with pytest.raises(SharpenError, match=problem):
        AgentSFTTrainer(config(pico_folder, data, **extra), tmp_path / "run").train()


def test_a_full_disk_is_refused_before_the_first_step(pico_folder, data, tmp_path, monkeypatch):
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(SharpenError, match="checkpoints need about"):
        AgentSFTTrainer(config(pico_folder, data), tmp_path / "run").train()


@pytest.mark.slow
def test_kill_9_at_any_time(pico_folder, data, tmp_path):
    """Killed at many moments, saves included, the command goes on by itself and repeats the
    uninterrupted losses."""
    settings = [
        "lora_r=4",
        "lora_alpha=8",
        "batch_size=2",
        "gradient_accumulation=1",
        "learning_rate=1e-3",
    ]
    command = [
        sys.executable,
        "-m",
        "sharpen.cli.main",
        "train",
        "sft",
        "--base-model",
        str(pico_folder),
    ]
    command += ["--data", str(data), "--epochs", "3", "--save-steps", "1", *settings, "--output"]
    subprocess.run([*command, str(tmp_path / "whole")], check=True, capture_output=True)
    kills, done = 0, False
    for attempt in range(60):
        process = subprocess.Popen(
            [*command, str(tmp_path / "killed")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        before = len(losses_or_none(tmp_path / "killed"))
        while process.poll() is None and len(losses_or_none(tmp_path / "killed")) < before + 2:
            time.sleep(0.02)
        time.sleep(0.013 * (attempt % 7))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        elif process.returncode == 0:
            done = True
            break
        process.wait()
    assert done and kills >= 5
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


def losses_or_none(folder) -> list:
    path = folder / "metrics.jsonl"
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []
