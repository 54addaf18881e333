"""Reward models: exact gradients, learning, resume, plain folders, calibration, wrong input."""

from __future__ import annotations

import json
import os
import random
import string
import subprocess
import sys

import numpy as np
import pytest
import torch

from sharpen.config import ConfigError
from sharpen.models.load import ModelConfig, load_model
from sharpen.rewards.compose import build_reward
from sharpen.rewards.learned import LearnedReward, calibration, turn_ends
from sharpen.rows import messages_from_wire
from sharpen.train.config.learner import LearnerConfig
from sharpen.train.config.reward_model import RewardModelConfig
from sharpen.train.learner import Learner
from sharpen.train.losses import reward_loss
from sharpen.train.reward_model import RewardModelTrainer
from sharpen.train.values import ValueModel
from sharpen.types import Datum, Dialog, Message, SharpenError, StopReason, Task, Trajectory, Turn


def say(role: str, text: str) -> dict:
    return {"role": role, "content": text}


def word(chance: random.Random, letter: str) -> str:
    """Random letters around one that matters."""
    text = "".join(chance.choices(string.ascii_lowercase[:20], k=chance.randint(6, 10)))
    at = chance.randrange(len(text))
    return text[:at] + letter + text[at:]


def pairs(count: int, seed: int = 0) -> list[dict]:
    """Answers with an X are better than answers with a Y."""
    chance = random.Random(seed)
    return [
        {
            "prompt": [say("user", word(chance, "?"))],
            "chosen": [say("assistant", word(chance, "X"))],
            "rejected": [say("assistant", word(chance, "Y"))],
        }
        for _ in range(count)
    ]


def steps(count: int, seed: int = 0) -> list[dict]:
    """Dialogs of up to four turns, those with an X right."""
    chance, rows = random.Random(seed), []
    for _ in range(count):
        labels = [chance.randint(0, 1) for _ in range(chance.randint(1, 4))]
        messages = []
        for label in labels:
            messages.append(say("user", word(chance, "?")))
            messages.append(say("assistant", word(chance, "X" if label else "Y")))
        rows.append({"messages": messages, "step_labels": labels})
    return rows


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(pico_folder, data: str, **extra) -> RewardModelConfig:
    values = {"base_model": str(pico_folder), "train_data": data, "device": "cpu", "lora_r": 8}
    values |= {"batch_size": 8, "gradient_accumulation": 1, "save_steps": 3, "seed": 1}
    return RewardModelConfig(**{**values, "learning_rate": 3e-3, **extra})


def metrics(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# The model -------------------------------------------------------------------------------------


def datum(length: int, seed: int) -> Datum:
    chance = np.random.default_rng(seed)
    mask = chance.random(length) < 0.3
    mask[0], mask[-1] = False, True
    return Datum(chance.integers(0, 250, length).astype(np.int32), mask)


DATA = [datum(length, seed) for seed, length in enumerate((12, 40, 7, 25, 33, 9))]


def classifier(pico_folder):
    torch.manual_seed(0)
    model = load_model(
        ModelConfig(base_model=str(pico_folder), device="cpu"), "SequenceClassification"
    )
    torch.nn.init.normal_(model.score.weight, std=0.5)
    return model.requires_grad_(True)


@pytest.mark.parametrize("budget", [1, 60, 10_000])
def test_values_stand_at_the_marked_tokens(pico_folder, budget):
    model = classifier(pico_folder)
    learner = Learner(model, LearnerConfig(token_budget=budget), 1, ValueModel(model))
    for found, row in zip(learner.values(DATA), DATA, strict=True):
        ids = torch.tensor(row.ids).long()[None]
        with torch.no_grad():
            every = model.score(model.model(ids).last_hidden_state)[0, :, 0].numpy()
        np.testing.assert_allclose(found, every[row.mask], atol=1e-5)
        assert found[-1] == pytest.approx(model(ids).logits.item(), abs=1e-5)


def test_weights_may_differ_within_a_row(pico_folder):
    model = classifier(pico_folder)
    weights = [np.random.default_rng(i).normal(size=d.mask.sum()) for i, d in enumerate(DATA)]
    rows = [Datum(d.ids, d.mask, weight=w) for d, w in zip(DATA, weights, strict=True)]
    learner = Learner(model, LearnerConfig(token_budget=60), 1, ValueModel(model))
    found = learner.accumulate(rows, lambda v, batch, _: (v * batch.weight_N).sum(), 1.0)
    values = learner.values(DATA)
    wanted = sum(float(v @ w) for v, w in zip(values, weights, strict=True))
    assert found == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("budget", [1, 10_000])
def test_two_passes_give_the_gradient_of_the_pair_loss(pico_folder, tmp_path, budget):
    """The same as one backward pass through both sides with plain transformers."""
    settings = config(pico_folder, write(tmp_path / "pairs.jsonl", pairs(6)), full=True)
    settings = settings.model_copy(
        update={"token_budget": budget, "center_rewards_coefficient": 0.1, "clip_norm": 1e9}
    )
    trainer = RewardModelTrainer(settings, tmp_path / "run")
    rows = trainer.read(settings.train_data)
    trainer.learner = trainer.make_learner(1)
    model, kept = trainer.learner.model, {}
    trainer.learner.before_clip = [
        lambda learner: kept.update({n: p.grad.clone() for n, p in learner.trained.items()})
    ]
    values = [
        model(torch.tensor(side.ids).long()[None]).logits.squeeze() for row in rows for side in row
    ]
    values = torch.stack(values)
    gap, total = values[0::2] - values[1::2], values[0::2] + values[1::2]
    loss = (torch.nn.functional.softplus(-gap) + 0.1 * total**2).mean()
    loss.backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    row = trainer.step(rows)
    assert row["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert row["accuracy"] == (gap > 0).float().mean() and row["step"] == 1
    assert kept.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(kept[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_reward_loss_of_turns_is_cross_entropy():
    values, labels = torch.tensor([0.3, -2.0, 4.0]), torch.tensor([1.0, 0.0, 0.25])
    p = torch.sigmoid(values)
    wanted = -(labels * p.log() + (1 - labels) * (1 - p).log()).mean()
    torch.testing.assert_close(reward_loss(values[:, None], labels)[0], wanted)


# The loop --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcome(pico_folder, tmp_path_factory):
    """A model of all weights and an adapter, trained on the same pairs."""
    folder = tmp_path_factory.mktemp("outcome")
    data, dev = write(folder / "pairs.jsonl", pairs(640)), write(folder / "dev.jsonl", pairs(80, 1))
    for name, full in (("full", True), ("lora", False)):
        rate = 3e-3 if full else 1e-2
        settings = config(pico_folder, data, dev_data=dev, full=full, learning_rate=rate)
        settings = settings.model_copy(update={"eval_steps": 5, "batch_size": 32})
        figures = RewardModelTrainer(settings, folder / name).train()
        (folder / f"{name}.json").write_text(json.dumps(figures))
    return folder


@pytest.mark.parametrize("name", ["full", "lora"])
def test_a_rule_is_learned(outcome, name):
    rows, figures = metrics(outcome / name), json.loads((outcome / f"{name}.json").read_text())
    assert len(rows) == 20 and 0.25 < rows[0]["accuracy"] < 0.75
    assert figures["accuracy"] >= 0.95 and figures["margin"] > 1
    assert rows[-1]["dev_accuracy"] == figures["accuracy"]
    assert rows[4]["dev_loss"] > rows[-1]["dev_loss"]
    sure = json.loads((outcome / name / "calibration.json").read_text())
    assert sum(row["count"] for row in sure["bins"]) == 80 and sure["ece"] == figures["ece"]
    assert (outcome / name / "calibration.png").read_bytes().startswith(b"\x89PNG")


def plain_scores(outcome, pico_folder, name: str, rows: list[dict], side: str, adapter=False):
    """As somebody without Sharpen would do it."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    final = outcome / name / "final"
    tokenizer = AutoTokenizer.from_pretrained(final)
    if adapter:
        base = AutoModelForSequenceClassification.from_pretrained(
            pico_folder, num_labels=1, pad_token_id=tokenizer.pad_token_id
        )
        model = PeftModel.from_pretrained(base, final)
    else:
        model = AutoModelForSequenceClassification.from_pretrained(final)
    texts = [
        tokenizer.apply_chat_template(row["prompt"] + row[side], tokenize=False).rstrip("\n")
        for row in rows
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad():
        return model.eval()(**batch).logits[:, 0].tolist()


@pytest.mark.parametrize("name", ["full", "lora"])
def test_final_is_a_plain_classifier(outcome, pico_folder, name):
    rows = pairs(20, 2)
    chosen, rejected = (
        plain_scores(outcome, pico_folder, name, rows, s, name == "lora")
        for s in ("chosen", "rejected")
    )
    assert np.mean(np.array(chosen) > np.array(rejected)) >= 0.9
    reward = LearnedReward(outcome / name / "final", device="cpu", batch_size=6)
    items = [
        (Task(str(i), row["prompt"][0]["content"]), answered(row["chosen"][0]["content"]))
        for i, row in enumerate(rows)
    ]
    ours = [score.value for score in reward.score_all(items)]
    np.testing.assert_allclose(ours, chosen, atol=1e-4)
    assert reward.score(*items[3]).value == pytest.approx(ours[3], abs=1e-4)
    options = {"path": str(outcome / name / "final"), "device": "cpu"}
    block = {"parts": [{"name": "learned", "options": options}]}
    assert build_reward(block).score(*items[3]).value == pytest.approx(ours[3], abs=1e-4)


def answered(*texts: str) -> Trajectory:
    more = (Message("user", "dcba?ef"),)
    turns = tuple(Turn(Message("assistant", text), results=more) for text in texts)
    return Trajectory("t", turns, StopReason.ANSWERED)


def test_padding_is_never_what_ends_a_turn(pico_folder, tmp_path, outcome):
    """Where a tokenizer pads with its end-of-turn token, plain transformers would read the score
    before it."""
    import shutil

    from transformers import AutoTokenizer

    base = tmp_path / "base"
    shutil.copytree(pico_folder, base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = "<|im_end|>"
    tokenizer.save_pretrained(base)
    data = write(tmp_path / "pairs.jsonl", pairs(8))
    trainer = RewardModelTrainer(
        config(base, data, full=True, max_steps=2), tmp_path / "run" / "full"
    )
    trainer.train()
    rows = pairs(4, 3)
    plain = plain_scores(tmp_path / "run", base, "full", rows, "chosen")
    dialogs = [Dialog(messages_from_wire(row["prompt"] + row["chosen"], "")) for row in rows]
    reward = LearnedReward(tmp_path / "run" / "full" / "final", device="cpu")
    ours = [values[-1] for values in reward.values(dialogs)]
    np.testing.assert_allclose(ours, plain, atol=1e-5)


def test_a_process_model_learns_its_turns(pico_folder, tmp_path):
    data, dev = (
        write(tmp_path / "steps.jsonl", steps(600)),
        write(tmp_path / "d.jsonl", steps(40, 1)),
    )
    settings = config(pico_folder, data, dev_data=dev, full=True, kind="process", batch_size=20)
    settings = settings.model_copy(update={"learning_rate": 1e-2})
    figures = RewardModelTrainer(settings, tmp_path / "run").train()
    rows = metrics(tmp_path / "run")
    assert 0.25 < rows[0]["accuracy"] < 0.75
    assert figures["accuracy"] >= 0.95
    reward = LearnedReward(tmp_path / "run" / "final", device="cpu")
    found = reward.score(Task("t", "abc?"), answered("abcdXabc", "hgfYedcb", "aXbcdefg"))
    assert list(found.parts) == ["turn_1", "turn_2", "turn_3"]
    assert found.value == found.parts["turn_2"] < 0.5
    assert min(found.parts["turn_1"], found.parts["turn_3"]) > 0.5


@pytest.mark.parametrize(("kind", "full"), [("outcome", False), ("process", True)])
def test_resume_is_bit_identical(pico_folder, tmp_path, monkeypatch, kind, full):
    rows = pairs(24) if kind == "outcome" else steps(24)
    settings = config(pico_folder, write(tmp_path / "rows.jsonl", rows), kind=kind, full=full)
    settings = settings.model_copy(update={"num_epochs": 3})
    RewardModelTrainer(settings, tmp_path / "whole").train()
    original = Learner.step

    class Killed(Exception):
        pass

    for last in (4, 8):

        def dying(self, datums, loss, last=last):
            if self.steps_done == last:
                raise Killed
            return original(self, datums, loss)

        with monkeypatch.context() as patch:
            patch.setattr(Learner, "step", dying)
            with pytest.raises(Killed):
                RewardModelTrainer(settings, tmp_path / "parts").train()
    RewardModelTrainer(settings, tmp_path / "parts").train()
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    assert [row["step"] for row in metrics(tmp_path / "whole")] == list(range(1, 10))
    name = "final/model.safetensors" if full else "final/adapter_model.safetensors"
    assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


# Calibration -----------------------------------------------------------------------------------


def test_calibration_counts_how_often_the_sure_are_right():
    logit = np.log(0.8 / 0.2)
    exact = calibration(np.array([logit] * 80 + [-logit] * 20))
    assert exact["ece"] == pytest.approx(0) and len(exact["bins"]) == 1
    assert exact["bins"][0] == {"confidence": pytest.approx(0.8), "accuracy": 0.8, "count": 100}
    too_sure = calibration(np.array([logit] * 50 + [-logit] * 50 + [0.0, 1000.0, 1000.0]))
    assert [row["count"] for row in too_sure["bins"]] == [1, 100, 2]
    assert too_sure["ece"] == pytest.approx((0.3 * 100 + 0.5) / 103)


def test_turn_ends():
    mask = np.array([0, 1, 1, 0, 0, 1, 0, 1, 1], bool)
    assert turn_ends(Datum(np.zeros(9, np.int32), mask)).tolist() == [2, 5, 8]


# Wrong input -----------------------------------------------------------------------------------

SAME = {"prompt": [say("user", "a")], "chosen": [say("assistant", "b")]}


@pytest.mark.parametrize(
    ("rows", "extra", "problem"),
    [
        ([], {}, r"rows.jsonl: no row to train on \(of 0\)"),
        ([*pairs(1), SAME | {"rejected": SAME["chosen"]}], {}, "rows.jsonl:2: chosen and rejected"),
        ([SAME], {}, "rows.jsonl:1: rejected: expected a non-empty list"),
        (pairs(3), {"max_length": 20}, r"no row to train on \(of 3\)"),
        (steps(1), {}, "rows.jsonl:1: prompt: expected a non-empty list"),
        ([{"messages": [say("user", "a"), say("assistant", "b")]}], {"kind": "process"},
         "rows.jsonl:1: step_labels: expected 1 numbers from 0 to 1, one per assistant turn"),
        ([{"messages": [say("user", "a"), say("assistant", "b") | {"weight": 0}, say("user", "c"),
                        say("assistant", "d")], "step_labels": [0, 1]}], {"kind": "process"},
         "step_labels: expected 1 numbers from 0 to 1"),
        ([steps(1)[0] | {"step_labels": [1] * 9}], {"kind": "process"}, "step_labels: expected"),
        ([steps(1)[0] | {"step_labels": ["good"]}], {"kind": "process"}, "step_labels: expected"),
    ],
)  # fmt: skip
def test_wrong_rows_are_one_line(pico_folder, tmp_path, rows, extra, problem):
    data = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(SharpenError, match=problem) as caught:
        RewardModelTrainer(config(pico_folder, data, **extra), tmp_path / "run").train()
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def test_long_pairs_are_counted(pico_folder, tmp_path, capsys):
    long = pairs(1)[0] | {"chosen": [say("assistant", "a" * 500)]}
    data = write(tmp_path / "rows.jsonl", [*pairs(5), long])
    trainer = RewardModelTrainer(config(pico_folder, data, max_length=200), tmp_path / "run")
    assert len(trainer.read(data)) == 5 and "1 of 6 rows left out" in capsys.readouterr().out


def test_what_is_no_reward_model_is_refused(pico_folder, outcome, tmp_path):
    data = write(tmp_path / "pairs.jsonl", pairs(2))
    with pytest.raises(SharpenError, match="not a reward model"):
        LearnedReward(pico_folder, device="cpu")
    with pytest.raises(SharpenError, match="an adapter; merge it"):
        RewardModelTrainer(config(outcome / "lora" / "final", data), tmp_path / "run").train()
    with pytest.raises(ConfigError, match="lora_dropout"):
        config(pico_folder, "x.jsonl", lora_dropout=0.1)


def test_the_command(sharpen, pico_folder, tmp_path):
    data, output = write(tmp_path / "pairs.jsonl", pairs(16)), tmp_path / "run"
    command = [
        "train",
        "reward",
        "--base-model",
        str(pico_folder),
        "--data",
        data,
        "--dev-data",
        data,
    ]
    command += ["--output", str(output), "--max-steps", "3", "--save-steps", "2", "--seed", "7"]
    code, out, err = sharpen(*command, "--json", "device=cpu", "lora_r=2", "batch_size=4")
    assert code == 0, err
    told = json.loads(out.splitlines()[-1])
    assert told["path"] == str(output / "final") and told["steps"] == 3 and told["accuracy"] >= 0
    assert "seed: 7" in (output / "config.yaml").read_text()
    code, out, err = sharpen("train", "reward", "--data", str(tmp_path / "gone.jsonl"))
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_processes_equal_one(pico_folder, tmp_path, parallel):
    data = write(tmp_path / "pairs.jsonl", pairs(21))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    common = ["-m", "sharpen.cli.main", "train", "reward", "--base-model", str(pico_folder)]
    common += ["--data", data, "--max-steps", "4", "--output"]
    settings = ["device=cpu", "batch_size=5", "gradient_accumulation=1", "token_budget=150"]
    settings += ["lora_r=4", "lora_alpha=8", "learning_rate=1e-3"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    for start, name, more in (([], "one", []), (launcher, "two", [f"parallel={parallel}"])):
        command = [sys.executable, *start, *common, str(tmp_path / name), *settings, *more]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = (metrics(tmp_path / name) for name in ("one", "two"))
    for key in ("loss", "norm", "margin"):
        np.testing.assert_allclose(
            [row[key] for row in one], [row[key] for row in two], rtol=1e-4, atol=1e-6
        )
    rows = pairs(6, 5)
    scores = [plain_scores(tmp_path, pico_folder, n, rows, "chosen", True) for n in ("one", "two")]
    np.testing.assert_allclose(*scores, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("full", [True, False])
def test_packed_values_equal_padded_ones(pico_folder, tmp_path, full):
    """In bf16 on a GPU, where rows lie end to end; and a rule is learned there."""
    data = write(tmp_path / "pairs.jsonl", pairs(640))
    found, losses = [], []
    for packing in ("off", "auto"):
        settings = config(pico_folder, data, full=full, learning_rate=3e-3 if full else 1e-2)
        given = {"device": "cuda", "packing": packing, "batch_size": 32, "token_budget": 700}
        trainer = RewardModelTrainer(settings.model_copy(update=given), tmp_path / packing)
        figures = trainer.train()
        assert trainer.learner.packed == (packing == "auto") and figures["accuracy"] >= 0.95
        losses.append(metrics(tmp_path / packing)[0]["loss"])
        fresh = trainer.make_learner(1)
        rows = [side for row in trainer.read(data)[:20] for side in row]
        found.append(np.concatenate(fresh.values(rows)))
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    np.testing.assert_allclose(found[0], found[1], atol=0.02)
    assert np.std(found[0]) > 0.01
    reward = LearnedReward(tmp_path / "auto" / "final")
    assert reward.model.device.type == "cuda"
    good, bad = (reward.score(Task("t", "ab?"), answered(t)).value for t in ("acXdb", "acYdb"))
    assert good > bad
