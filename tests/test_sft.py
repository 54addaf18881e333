"""SFT's settings: warm-up, plain text, LoRA's kin, coresets, streams, metrics, trackers."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from sharpen.data.generate.starter import starter_dialogs
from sharpen.models.load import LoRAConfig, ModelConfig, attach_lora, load_model, load_tokenizer
from sharpen.render import Renderer
from sharpen.rows import dialog_to_row
from sharpen.train.config.learner import LearnerConfig
from sharpen.train.config.sft import AgentSFTConfig
from sharpen.train.display import Display, flops_per_token
from sharpen.train.learner import Learner
from sharpen.train.sft import AgentSFTTrainer, token_mean
from sharpen.train.trackers import Trackers
from sharpen.types import Datum, RowError, SharpenError

KINDS = ("tool_selection", "multi_step_planning", "timing_decision")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    found = [replace(d, task_type=KINDS[i % 3]) for i, d in enumerate(starter_dialogs("train", 24))]
    path.write_text("".join(json.dumps(dialog_to_row(d)) + "\n" for d in found))
    return path


def config(pico_folder, data, **extra) -> AgentSFTConfig:
    values = {"base_model": str(pico_folder), "train_data": str(data), "device": "cpu"}
    values |= {"lora_r": 4, "batch_size": 4, "gradient_accumulation": 1, "num_epochs": 1}
    return AgentSFTConfig(**{**values, "learning_rate": 1e-3, "max_length": 2000, **extra})


def metrics(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_warmup_comes_first_and_is_of_its_focus(pico_folder, data, tmp_path):
    warm = {"enabled": True, "data_source": f"{data}", "samples": 8}
    warm["focus"] = ["basic_planning_structure"]
    settings = config(pico_folder, data, warmup=warm)
    rows = AgentSFTTrainer(settings, tmp_path / "run").prepare_datasets()
    assert rows.total == 2 + 6
    first = [row.task_type for step in range(2) for row in rows.step_rows(step)]
    assert set(first) == {"multi_step_planning"}
    rest = [row.id for step in range(2, 8) for row in rows.step_rows(step)]
    assert len(set(rest)) == 24
    AgentSFTTrainer(settings, tmp_path / "run").train()
    assert [row["step"] for row in metrics(tmp_path / "run")] == list(range(1, 9))


def test_plain_text_trains_on_every_token(pico_folder, tmp_path):
    renderer = Renderer(load_tokenizer(str(pico_folder)))
    text = "To be, or not to be, that is the question. <|im_end|> " * 4
    whole = renderer.plain(text, "here", 10_000)
    assert len(whole) == 1 and whole[0].mask.all()
    assert whole[0].ids[-1] == renderer.tokenizer.eos_token_id
    assert (whole[0].ids[:-1] != renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")).all()
    pieces = renderer.plain(text, "here", 50)
    assert max(len(p.ids) for p in pieces) <= 50
    trained = [p.ids[1:][p.mask[1:]] for p in pieces]
    np.testing.assert_array_equal(np.concatenate(trained), whole[0].ids[1:])
    with pytest.raises(RowError, match="here: text"):
        renderer.plain("  ", "here", 50)
    path = tmp_path / "text.jsonl"
    path.write_text(json.dumps({"text": text}) + "\n")
    trainer = AgentSFTTrainer(config(pico_folder, path, max_length=64), tmp_path / "run")
    trainer.train()
    tokens = sum(len(row.ids) for row in trainer.data.rows)
    assert tokens >= len(whole[0].ids)


@pytest.mark.parametrize("variant", [{}, {"use_dora": True}, {"use_rslora": True}])
def test_lora_and_its_kin_learn(pico_folder, variant):
    model = load_model(ModelConfig(base_model=str(pico_folder), device="cpu"))
    torch.manual_seed(0)
    model = attach_lora(model, LoRAConfig(lora_r=4, lora_alpha=8, lora_dropout=0.0, **variant))
    chance = np.random.default_rng(0)
    rows = [Datum(chance.integers(0, 250, 30).astype(np.int32), np.ones(30, bool))]
    plain = -torch.log_softmax(
        model(torch.tensor(rows[0].ids).long()[None]).logits[0, :-1].float(), -1
    )
    wanted = plain.gather(-1, torch.tensor(rows[0].ids[1:]).long()[:, None]).mean()
    learner = Learner(model, LearnerConfig(learning_rate=1e-2, warmup_ratio=0), 20)
    reports = [learner.step(rows, token_mean) for _ in range(12)]
    assert abs(reports[0].loss - wanted.item()) < 1e-4
    assert reports[-1].loss < reports[0].loss - 0.1
    names = {n.split(".")[-2] for n, _ in model.named_parameters() if "magnitude" in n}
    assert bool(names) == bool(variant.get("use_dora"))


def test_fused_lora_equals_peft(pico_folder):
    from sharpen.models.lora import FusedLinear, fuse_lora

    model = load_model(ModelConfig(base_model=str(pico_folder), device="cpu"))
    model = attach_lora(model, LoRAConfig(lora_r=4, lora_dropout=0.0))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    tokens = torch.randint(0, 250, (2, 20))

    def run():
        model.zero_grad()
        logits = model(tokens).logits
        logits.square().mean().backward()
        return logits, {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}

    before, fused = run(), run() if fuse_lora(model) else None
    assert any(type(m) is FusedLinear for m in model.modules())
    torch.testing.assert_close(before[0], fused[0])
    for name in before[1]:
        torch.testing.assert_close(before[1][name], fused[1][name])
    with model.disable_adapter():
        assert not torch.allclose(model(tokens).logits, fused[0])


def test_lora_plus_moves_b_faster(pico_folder):
    moved = {}
    for ratio in (1.0, 8.0):
        model = load_model(ModelConfig(base_model=str(pico_folder), device="cpu"))
        torch.manual_seed(0)
        model = attach_lora(model, LoRAConfig(lora_r=4, lora_dropout=0.0))
        settings = LearnerConfig(learning_rate=1e-3, warmup_ratio=0, lora_plus_ratio=ratio)
        learner = Learner(model, settings, 10)
        start = {n: p.detach().clone() for n, p in learner.trained.items()}
        learner.step([Datum(np.arange(30, dtype=np.int32), np.ones(30, bool))], token_mean)
        moved[ratio] = {n: (p - start[n]).abs().max().item() for n, p in learner.trained.items()}
    b = [moved[8.0][n] / moved[1.0][n] for n in moved[1.0] if "lora_B" in n and moved[1.0][n]]
    np.testing.assert_allclose(b, 8.0, rtol=1e-3)
    a = [abs(moved[8.0][n] - moved[1.0][n]) for n in moved[1.0] if "lora_A" in n]
    assert max(a) < 1e-6


def test_8bit_adamw_needs_its_library(pico_folder):
    model = load_model(ModelConfig(base_model=str(pico_folder), device="cpu"))
    with pytest.raises(SharpenError, match=r"adamw_8bit: needs a CUDA device"):
        Learner(model.requires_grad_(True), LearnerConfig(optimizer="adamw_8bit"), 1)


def test_a_coreset_is_trained_on_alone(pico_folder, data, tmp_path, capsys):
    settings = config(pico_folder, data, use_coreset_selection=True, coreset_target_size=8)
    rows = AgentSFTTrainer(settings, tmp_path).prepare_datasets()
    assert len(rows.rows) == 8 and rows.total == 2
    assert "coreset (hybrid): 8 of 24 rows" in capsys.readouterr().out
    gradient = {"coreset_strategy": "gradient", "dev_data": str(data)}
    rows = AgentSFTTrainer(settings.model_copy(update=gradient), tmp_path).prepare_datasets()
    assert len(rows.rows) == 8
    with pytest.raises(SharpenError, match="coreset_strategy=gradient: needs dev_data"):
        AgentSFTTrainer(
            settings.model_copy(update={"coreset_strategy": "gradient"}), tmp_path
        ).prepare_datasets()
    easy_first = settings.model_copy(update={"coreset_strategy": "curriculum"})
    rows = AgentSFTTrainer(easy_first, tmp_path).prepare_datasets()
    taken = [row.id for step in range(2) for row in rows.step_rows(step)]
    assert taken == [row.id for row in rows.rows]


def test_a_stream_replays_earlier_rounds(pico_folder, data, tmp_path):
    settings = config(
        pico_folder, data, use_online_continual=True, continual_replay_ratio=0.5, batch_size=2
    )
    trainer = AgentSFTTrainer(settings, tmp_path / "run")
    rows = trainer.prepare_datasets()
    kinds = [[row.task_type for row in phase.rows] for phase in rows.phases]
    assert [len(k) for k in kinds] == [8, 12, 12]  # a round a task type, half as many replayed
    assert set(kinds[0]) == {KINDS[0]} and set(kinds[1]) == set(KINDS[:2])
    trainer.train()
    assert (tmp_path / "run" / "replay.json").is_file()
    later = settings.model_copy(update={"continual_buffer": str(tmp_path / "run" / "replay.json")})
    rows = AgentSFTTrainer(later, tmp_path / "later").prepare_datasets()
    assert len(rows.phases[0].rows) == 12  # the first round of a later run replays too


def test_a_metric_chooses_the_best_and_stops(pico_folder, data, tmp_path):
    (tmp_path / "m.py").write_text(
        "seen = []\n\n\ndef metric(context):\n"
        "    seen.append(context.step)\n    return -len(seen)\n"
    )
    settings = config(pico_folder, data, metric=f"{tmp_path / 'm.py'}:metric", eval_steps=1)
    settings = settings.model_copy(update={"patience": 2})
    figures = AgentSFTTrainer(settings, tmp_path / "run").train()
    rows = metrics(tmp_path / "run")
    assert [row["metric"] for row in rows] == [-1, -2, -3]
    assert figures["best_metric"] == -1


def test_tensorboard_has_every_step(pico_folder, data, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    AgentSFTTrainer(config(pico_folder, data, report_to=["tensorboard"]), tmp_path / "run").train()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    found = [e.value for e in events.Scalars("loss")]
    np.testing.assert_allclose(found, [row["loss"] for row in metrics(tmp_path / "run")], rtol=1e-6)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_services_take_the_rows(tmp_path, monkeypatch, name):
    pytest.importorskip(name, exc_type=ImportError)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    with Trackers([name], tmp_path, {"seed": 0}) as trackers:
        trackers.log({"step": 1, "loss": 2.0, "skipped": False})
    assert name == "trackio" or any(tmp_path.rglob("*.wandb"))  # trackio writes to its own cache


def test_a_tracker_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SharpenError, match="report_to: wandb is not installed; pip install wandb"):
        Trackers(["wandb"], tmp_path, {})


def test_the_display_says_loss_speed_memory_and_time(pico_folder, capsys):
    model = load_model(ModelConfig(base_model=str(pico_folder), device="cpu")).requires_grad_(True)
    count = sum(p.numel() for p in model.parameters())
    assert flops_per_token(model) <= 6 * count
    with Display(10, 0, flops_per_token(model), "cpu") as display:
        display.show({"step": 4, "loss": 1.25, "tokens": 100, "dev_loss": 2.0}, always=True)
    line = capsys.readouterr().out
    assert "step 4/10: loss 1.2500, dev_loss 2.0000" in line
    assert "tokens/s" in line and "GiB" in line and "s left" in line


@pytest.mark.parametrize("name", ["rtx3060", "development", "production", "7b"])
def test_presets_train(pico_folder, data, tmp_path, name):
    """Every one-card preset runs as it is, but for the model and what needs a GPU."""
    from sharpen.cli.train import load_settings as preset

    values = preset(name, ["load_in_4bit=false", "load_in_8bit=false", "compile=false"])
    values |= {"base_model": str(pico_folder), "train_data": str(data), "max_steps": 2}
    values |= {"coreset_target_size": 8, "device": "cpu"}
    AgentSFTTrainer(AgentSFTConfig(**values), tmp_path / "run").train()
    assert len(metrics(tmp_path / "run")) == 2


def test_a_preset_of_several_cards_says_how_to_start():
    from sharpen.cli.train import load_settings as preset

    with pytest.raises(
        SharpenError, match=r"14b: is made for 2 cards; torchrun --nproc_per_node 2"
    ):
        preset("14b", [])
