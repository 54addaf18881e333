"""Preference optimisation: losses against TRL's, exact steps, pairs from samples, rounds, resume,
learning, wrong input."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sharpen.config import ConfigError
from sharpen.envs.one_turn import OneTurn
from sharpen.models.load import ModelConfig, load_model
from sharpen.models.pico import build_pico
from sharpen.policy.local import LocalPolicy
from sharpen.render import Renderer
from sharpen.rollout import rollout
from sharpen.rows import preference_from_row, preference_to_row, task_from_row
from sharpen.train.config.dpo import DPOConfig
from sharpen.train.config.sft import AgentSFTConfig
from sharpen.train.dpo import DPOTrainer
from sharpen.train.learner import Learner
from sharpen.train.preference_rows import pair_rows, tokenizer_hash
from sharpen.train.preferences import generate_preference_pairs
from sharpen.train.sft import AgentSFTTrainer
from sharpen.types import (
    Datum,
    Dialog,
    Message,
    Sampling,
    Score,
    SharpenError,
    StopReason,
    Task,
    ToolCall,
    ToolSpec,
    Turn,
)

HERE = Path(__file__).parent
ORACLE = HERE.parent / ".venv-oracle" / "bin" / "python"
LOSSES = ("sigmoid", "hinge", "ipo", "kto", "orpo", "simpo")


def say(role: str, text: str) -> dict:
    return {"role": role, "content": text}


def pair(prompt: str, chosen: str, rejected: str) -> dict:
    row = {"prompt": [say("user", prompt)], "chosen": [say("assistant", chosen)]}
    return row | {"rejected": [say("assistant", rejected)]}


def pairs(count: int, seed: int = 0) -> list[dict]:
    """Answers with an X are better than answers with a Y."""
    chance = random.Random(seed)
    word = lambda: "".join(chance.choices("abcdefgh", k=chance.randint(2, 9)))  # noqa: E731
    return [pair(word() + "?", "X" + word(), "Y" + word()) for _ in range(count)]


def write(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(base, data: str, **extra) -> DPOConfig:
    values = {"base_model": str(base), "train_data": data, "device": "cpu", "lora_r": 4}
    values |= {
        "lora_alpha": 8,
        "batch_size": 8,
        "gradient_accumulation": 1,
        "save_steps": 3,
        "seed": 1,
    }
    return DPOConfig(**{**values, "learning_rate": 3e-3, **extra})


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory) -> Path:
    """Another random model of the same kind: a reference that says something else."""
    folder = tmp_path_factory.mktemp("models") / "other"
    build_pico(folder, seed=1)
    return folder


def ready(settings: DPOConfig, folder: Path):
    """A trainer with its learner before the first step, and its pairs."""
    trainer = DPOTrainer(settings, folder)
    rows = trainer.read_rows(settings.train_data).rows
    trainer.prepare()
    kept: dict = {}
    trainer.learner.before_clip = [
        lambda learner: kept.update({n: p.grad.clone() for n, p in learner.trained.items()})
    ]
    return trainer, trainer.add_reference(rows, "reference"), kept


# Losses ----------------------------------------------------------------------------------------

# ours → TRL's trainer and settings
PARITY = {
    "sigmoid": ({}, "dpo", {"loss_type": "sigmoid"}),
    "hinge": ({"loss_type": "hinge"}, "dpo", {"loss_type": "hinge"}),
    "ipo": ({"loss_type": "ipo"}, "dpo", {"loss_type": "ipo"}),
    "with sft": ({"sft_weight": 0.4}, "dpo",
                 {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.4]}),
    "smoothed": ({"reference_free": True, "label_smoothing": 0.1}, "cpo",
                 {"loss_type": "sigmoid", "label_smoothing": 0.1, "cpo_alpha": 0.0}),
    "free hinge": ({"reference_free": True, "loss_type": "hinge"}, "cpo",
                   {"loss_type": "hinge", "cpo_alpha": 0.0}),
    "kto": ({"loss_type": "kto", "desirable_weight": 1.3, "undesirable_weight": 0.7}, "kto",
            {"loss_type": "kto", "desirable_weight": 1.3, "undesirable_weight": 0.7}),
    "simpo": ({"loss_type": "simpo", "gamma": 0.7, "label_smoothing": 0.1}, "cpo",
              {"loss_type": "simpo", "simpo_gamma": 0.7, "label_smoothing": 0.1, "cpo_alpha": 0.0}),
    "orpo": ({"loss_type": "orpo"}, "orpo", {}),
}  # fmt: skip


def parity_settings(name, pico_folder, other_folder, data, **more) -> DPOConfig:
    ours = PARITY[name][0]
    settings = config(pico_folder, data, beta=0.3, full=True, clip_norm=1e9, **ours, **more)
    asked = {"reference_model": str(other_folder)} if settings.needs_reference else {}
    return settings.model_copy(update=asked)


def shortened(row: Datum) -> Datum:
    """With one token before the answer: TRL's ORPO also trains on the prompt, ours on what the
    assistant said, and the two are one where the prompt is a single token."""
    start = int(row.mask.argmax()) - 1
    return Datum(row.ids[start:], row.mask[start:], row.id)


@pytest.fixture(scope="module")
def told(pico_folder, other_folder, tmp_path_factory) -> dict:
    """TRL's answers, all from one process."""
    work = tmp_path_factory.mktemp("trl")
    data, jobs = write(work / "pairs.jsonl", pairs(7)), {}
    for name, (_, trainer, theirs) in PARITY.items():
        settings = parity_settings(name, pico_folder, other_folder, data)
        rows = DPOTrainer(settings, work / "none").read_rows(data).rows
        rows = [[shortened(side) for side in row] if name == "orpo" else row for row in rows]
        wire = []
        for row in rows:
            start = int(row[0].mask.argmax())
            answers = [side.ids[start:].tolist() for side in row[:2]]
            row = {"prompt": row[0].ids[:start].tolist()}
            wire.append(row | dict(zip(("chosen", "rejected"), answers, strict=True)))
        job = {"method": "preference", "trainer": trainer, "settings": {"beta": 0.3, **theirs}}
        job["settings"]["per_device_train_batch_size"] = 2
        job |= {"model": str(pico_folder), "reference": str(other_folder), "adapter": ""}
        jobs[name] = job | {"rows": wire, "whole": str(work / f"{name}.safetensors")}
    (work / "jobs.json").write_text(json.dumps(jobs))
    command = [str(ORACLE), str(HERE / "support" / "oracle_trl.py"), str(work / "jobs.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = json.loads((work / "answer.json").read_text())
    return {name: (losses[name], load_file(jobs[name]["whole"])) for name in jobs} | {"data": data}


@pytest.mark.slow
@pytest.mark.parametrize("name", PARITY)
@pytest.mark.parametrize("budget", [100_000, 60])
def test_loss_and_gradients_are_those_of_trl(
    told, pico_folder, other_folder, tmp_path, name, budget
):
    settings = parity_settings(name, pico_folder, other_folder, told["data"], token_budget=budget)
    trainer, rows, kept = ready(settings, tmp_path / "run")
    if name == "orpo":
        rows = [type(r)([shortened(side) for side in r.sides], r.reference) for r in rows]
    loss, gradients = told[name]
    assert trainer.step(rows)["loss"] == pytest.approx(loss, rel=1e-5)
    assert kept.keys() == gradients.keys()
    for key, gradient in kept.items():
        torch.testing.assert_close(gradient, gradients[key], rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_does_not_depend_on_how_it_is_cut(pico_folder, other_folder, tmp_path, loss):
    data, found = write(tmp_path / "pairs.jsonl", pairs(6)), []
    asked = {} if loss in ("orpo", "simpo") else {"reference_model": str(other_folder)}
    for budget in (10_000, 1):
        settings = config(pico_folder, data, loss_type=loss, token_budget=budget, **asked)
        trainer, rows, kept = ready(settings, tmp_path / str(budget))
        found.append((trainer.step(rows), kept))
    (one, whole), (two, cut) = found
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-5) and one["step"] == 1
    for name, gradient in whole.items():
        torch.testing.assert_close(gradient, cut[name], rtol=1e-3, atol=1e-6, msg=name)
    assert any(gradient.abs().max() > 0 for gradient in whole.values())


def test_the_reference_is_the_adapter_switched_off(pico_folder, tmp_path):
    """The loss of an adapter that says something, against plain transformers and PEFT."""
    settings = config(pico_folder, write(tmp_path / "pairs.jsonl", pairs(5)), beta=0.7)
    trainer, rows, _ = ready(settings, tmp_path / "run")
    model = trainer.learner.model
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    ratios = []
    for row in rows:
        for side in row.sides:
            ids, answer = torch.tensor(side.ids).long()[None], torch.tensor(side.mask[1:])
            with torch.no_grad():
                now = model(ids).logits
                with model.disable_adapter():
                    before = model(ids).logits
            picked = [
                x.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[answer].sum()
                for x in (now, before)
            ]
            ratios.append(picked[0] - picked[1])
    gap = torch.stack(ratios).view(-1, 2) @ torch.tensor([1.0, -1.0])
    wanted, row = torch.nn.functional.softplus(-0.7 * gap).mean(), trainer.step(rows)
    assert row["loss"] == pytest.approx(wanted.item(), rel=1e-4)
    assert row["margin"] == pytest.approx(0.7 * gap.mean().item(), rel=1e-3, abs=1e-4)
    assert row["margin"] == pytest.approx(row["chosen_reward"] - row["rejected_reward"])
    assert row["accuracy"] == (gap > 0).float().mean() and row["chosen_logp"] < 0


# Rows ------------------------------------------------------------------------------------------


def test_only_the_answer_carries_loss(pico_tokenizer):
    """Not what the assistant said in the prompt, and not what a tool says within the answer."""
    call = {"name": "f", "arguments": {"x": 1}}
    row = {
        "prompt": [say("user", "ask"), say("assistant", "earlier"), say("user", "again")],
        "chosen": [
            {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
            say("tool", "result"),
            say("assistant", "good"),
        ],
        "rejected": [say("assistant", "bad")],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    chosen, rejected = pair_rows([preference_from_row(row, "here")], Renderer(pico_tokenizer))[0]
    said = pico_tokenizer.decode(chosen.ids[chosen.mask])
    written = '<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>'
    assert said == f"{written}<|im_end|>good<|im_end|>"
    assert pico_tokenizer.decode(rejected.ids[rejected.mask]) == "bad<|im_end|>"
    assert "earlier" in pico_tokenizer.decode(rejected.ids)


class Scripted:
    """Says what it is told to, text after text, as ids."""

    def __init__(self, renderer: Renderer, texts: list[str]):
        self.renderer, self.texts = renderer, iter(texts)

    def respond(self, dialogs: list[Dialog], sampling: Sampling):
        turns = []
        for dialog in dialogs:
            ids = tuple(self.renderer.tokenizer.encode(next(self.texts) + "<|im_end|>"))
            prompt = tuple(self.renderer.prompt(dialog))
            turns.append(Turn(self.renderer.parse(ids), prompt_ids=prompt, ids=ids))
        return turns


class TwoTurns(OneTurn):
    """A call is answered once."""

    def step(self, message):
        if message.tool_calls:
            return (Message("tool", "42", name="f"),), None
        return (), StopReason.ANSWERED


class Gold:
    """1 where the answer is gold's; some answers cannot be scored."""

    def score(self, task, trajectory):
        said = trajectory.turns[-1].message.content
        if said == "boom":
            raise ValueError("no idea")
        return Score(float(said == task.gold["answer"]), {"failed": float(said == "fail")})


CALL = '<tool_call>{"name":"f","arguments":{}}</tool_call>'


def test_pairs_are_sampled_scored_and_keep_their_ids(pico_tokenizer, capsys):
    renderer, tool = Renderer(pico_tokenizer), ToolSpec("f")
    tasks = [Task(name, f"do {name}", (tool,), {"answer": "42"}) for name in "abc"]
    texts = [CALL, CALL, "boom", "fail"]  # a pair
    texts += ["41", "40", "41", "fail"]  # a tie
    texts += ["boom", "42", "fail", "boom"]  # one score
    texts += ["42", "41"]  # the first two, behind what the tool said
    found = generate_preference_pairs(
        Scripted(renderer, texts), tasks, Gold(), TwoTurns, 4, Sampling(temperature=1.0)
    )
    out = capsys.readouterr().out
    assert "of 3 tasks with 4 samples each: 1 pairs, 1 ties, 1 without two scored samples" in out
    assert "6 samples have no score" in out and "mean score 0.33" in out
    (made,) = found
    assert (made.id, made.chosen_score, made.rejected_score) == ("a", 1.0, 0.0)
    assert made.prompt == (Message("user", "do a"),) and made.tools == (tool,)
    call = Message("assistant", tool_calls=(ToolCall("f"),))
    assert made.chosen == (call, Message("tool", "42", name="f"), Message("assistant", "42"))
    again = preference_from_row(json.loads(json.dumps(preference_to_row(made))))
    assert again == made
    kept = pair_rows([again], renderer)[0]
    fresh = pair_rows([preference_from_row(preference_to_row(made) | {"metadata": {}})], renderer)
    for side, other in zip(kept, fresh[0], strict=True):
        assert side.ids.tolist() == other.ids.tolist() and (side.mask == other.mask).all()
    # ids win over the text beside them, but only for the tokenizer that they are of
    changed = preference_to_row(made)
    changed["metadata"]["sampled"]["chosen"]["ids"][-2] = pico_tokenizer.encode("9")[0]
    row = pair_rows([preference_from_row(changed)], renderer)[0][0]
    assert pico_tokenizer.decode(row.ids).endswith("49<|im_end|>")
    changed["metadata"]["sampled"]["tokenizer"] = "another"
    row = pair_rows([preference_from_row(changed)], renderer)[0][0]
    assert pico_tokenizer.decode(row.ids).endswith("42<|im_end|>")
    assert "1 pairs were sampled with another tokenizer" in capsys.readouterr().out


def test_what_a_model_samples_is_what_trains(pico_folder, tmp_path):
    """On ids that no text gives back: a random model samples broken UTF-8."""
    data = write(tmp_path / "tasks.jsonl", [{"id": c, "instruction": c} for c in "abcdef"])
    reward = lambda task, t: float(len(t.turns[0].ids)) + t.turns[0].ids[0] / 1000  # noqa: E731
    scorer = type("Length", (), {"score": staticmethod(reward)})()
    settings = config(pico_folder, data, max_tokens=5, max_steps=2, num_samples=3)
    trained, original = [], Learner.step
    trainer = DPOTrainer(settings, tmp_path / "run", scorer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "step", lambda s, d, loss: trained.extend(d) or original(s, d, loss))
        trainer.train()
    policy = LocalPolicy(load_model(ModelConfig(base_model=str(pico_folder))), trainer.renderer)
    tasks = random.Random("1:0").sample([Task(c, c) for c in "abcdef"], 6)
    repeated = [task for task in tasks for _ in range(3)]
    made = rollout(policy, repeated, OneTurn, Sampling(5, 1.0, seed=1009))
    sampled = {(*turn.prompt_ids, *turn.ids) for one in made for turn in one.turns}
    assert len(trained) >= 16 and {tuple(d.ids.tolist()) for d in trained} <= sampled
    assert all(d.mask.sum() == len(d.ids) - int(d.mask.argmax()) for d in trained)
    again = [turn.message.content for one in made for turn in one.turns]
    assert any("�" in text for text in again)


# Runs ------------------------------------------------------------------------------------------

LETTERS, ANSWERS = "abcd", "ABCD"
REWARD = "def score(task, t):\n    return float(t.turns[-1].message.content == task.gold['is'])\n"


def letter_tasks(folder: Path, lengths=range(17, 25)) -> str:
    """Which of four answers belongs to the letter that is repeated here?"""
    (folder / "reward.py").write_text(REWARD)
    return write(
        folder / "tasks.jsonl",
        [
            {"id": f"{c}{n}", "instruction": c * n, "gold": {"is": ANSWERS[i * 3 % 4]}}
            for i, c in enumerate(LETTERS)
            for n in lengths
        ],
    )


@pytest.fixture(scope="module")
def guesser(pico_folder, tmp_path_factory) -> Path:
    """A run that taught pico to answer with any of the four, most often with a wrong one."""
    folder = tmp_path_factory.mktemp("guesser")
    rows = [
        {"messages": [say("user", c * n), say("assistant", answer)]}
        for i, c in enumerate(LETTERS)
        for n in (17, 21)
        for answer in ANSWERS + 2 * ANSWERS[(i * 3 + 1) % 4]
    ]
    settings = AgentSFTConfig(
        **{"base_model": str(pico_folder), "train_data": write(folder / "sft.jsonl", rows)},
        **{"device": "cpu", "full": True, "learning_rate": 5e-3, "batch_size": 48},
        **{"gradient_accumulation": 1, "num_epochs": 60, "lora_dropout": 0.0},
    )
    AgentSFTTrainer(settings, folder / "run").train()
    return folder / "run"


def online(guesser: Path, data: str, **extra) -> DPOConfig:
    reward = str(Path(data).with_name("reward.py")) + ":score"
    given = {"reward": reward, "max_tokens": 3, "num_samples": 8, "rounds": 2, "full": True}
    return config(guesser, data, **{**given, **extra})


def accuracy(base: Path, data: str) -> float:
    """Of greedy answers."""
    renderer = DPOTrainer(config(base, data)).renderer
    policy = LocalPolicy(load_model(ModelConfig(base_model=str(base), device="cpu")), renderer)
    tasks = [task_from_row(json.loads(line)) for line in Path(data).read_text().splitlines()]
    turns = policy.respond([OneTurn().reset(task) for task in tasks], Sampling(3))
    right = [t.message.content == task.gold["is"] for t, task in zip(turns, tasks, strict=True)]
    return float(np.mean(right))


def test_a_task_is_learned_from_the_models_own_samples(guesser, tmp_path):
    data = letter_tasks(tmp_path)
    assert accuracy(guesser, data) < 0.3
    given = {"rounds": 12, "num_epochs": 3, "num_samples": 16, "batch_size": 32}
    settings = online(guesser, data, **given, beta=0.5, learning_rate=1e-3)
    DPOTrainer(settings, tmp_path / "run").train()
    assert accuracy(tmp_path / "run", data) >= 0.95
    rows = metrics(tmp_path / "run")
    assert rows[-1]["round"] > 3 and rows[0]["loss"] > rows[-1]["loss"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize(
    ("extra", "deaths"),
    [
        ({"num_epochs": 2}, {"step": (1, 4), "rollout": (1,)}),
        ({"update_reference": True, "loss_type": "ipo"}, {"step": (2,), "reference": (1,)}),
        ({"loss_type": "kto", "tasks_per_round": 12, "full": False}, {"step": (3,)}),
    ],
)
def test_resume_is_bit_identical(guesser, tmp_path, monkeypatch, extra, deaths):
    """Killed within a step, while sampling the second round, while asking the reference."""
    from sharpen import scored_rollout
    from sharpen.train import dpo

    data = letter_tasks(tmp_path, range(17, 21))
    settings = online(guesser, data, save_steps=1, **extra)
    whole = DPOTrainer(settings, tmp_path / "whole").train()
    places = {
        "step": (Learner, "step"),
        "rollout": (scored_rollout, "rollout"),
        "reference": (dpo, "write_json"),
    }
    for name, times in deaths.items():
        for last in times:
            calls, (owner, attribute) = [0], places[name]
            original = getattr(owner, attribute)

            def dying(*given, calls=calls, last=last, original=original):
                calls[0] += 1
                if calls[0] == last:
                    raise Killed
                return original(*given)

            with monkeypatch.context() as patch:
                patch.setattr(owner, attribute, dying)
                with pytest.raises(Killed):
                    DPOTrainer(settings, tmp_path / "parts").train()
    assert DPOTrainer(settings, tmp_path / "parts").train() == whole
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    assert {row["round"] for row in metrics(tmp_path / "whole")} == {1, 2}
    names = ["pairs-1.jsonl", "pairs-2.jsonl", "reference.json", "reference-2.json"]
    full = "model" if settings.full else "adapter_model"
    for name in [*names, f"final/{full}.safetensors"]:
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    # a file that a run is already behind cannot be made again
    (tmp_path / "parts" / "pairs-2.jsonl").unlink()
    with pytest.raises(SharpenError, match=r"pairs-2.jsonl: gone, and the run is past it"):
        DPOTrainer(settings, tmp_path / "parts").train()


def test_the_best_dev_figure_decides_what_final_is(guesser, tmp_path):
    """By the callback's metric: step 1 of 3 is the best."""
    values, saved = iter((0.5, 0.25, 0.4)), []
    data = write(tmp_path / "pairs.jsonl", pairs(24))
    settings = config(guesser, data, max_steps=3, eval_steps=1)
    trainer = DPOTrainer(settings, tmp_path / "run", callback=lambda _: next(values))
    save = trainer.save_model
    trainer.save_model = lambda path: (
        saved.append((path.name, trainer.learner.steps_done)),
        save(path),
    )
    trainer.train()
    assert saved == [("best", 1)]
    best, final = (
        (tmp_path / "run" / n / "adapter_model.safetensors").read_bytes() for n in ("best", "final")
    )
    assert best == final


def test_dev_figures(guesser, tmp_path):
    data, count = letter_tasks(tmp_path, range(17, 21)), lambda context: {"seen": 7}
    settings = online(guesser, data, dev_data=data, rounds=1, eval_steps=1)
    figures = DPOTrainer(settings, tmp_path / "run", callback=count).train()
    best = max(row["dev_reward"] for row in metrics(tmp_path / "run"))
    assert best == pytest.approx(accuracy(tmp_path / "run", data)) and "dev_reward" in figures
    assert all(row["seen"] == 7 for row in metrics(tmp_path / "run"))
    assert (tmp_path / "run" / "pairs.jsonl").is_file()


# Wrong input -----------------------------------------------------------------------------------

SAME = pair("a", "b", "b")
LATE = {"prompt": [say("user", "a"), say("assistant", "b")], "chosen": [say("user", "c")]}
SPANS = {"tokenizer": "", "chosen": {"ids": [1, 2, 3], "turns": [[1, 2], [2, 4]]}}
BROKEN = pair("a", "b", "c") | {"metadata": {"sampled": SPANS}}
TASK = {"id": "t", "instruction": "do", "gold": {"is": "A"}}


@pytest.mark.parametrize(
    ("rows", "extra", "problem"),
    [
        ([], {}, r"rows.jsonl: no pair to train on \(of 0\)"),
        ([*pairs(1), SAME], {}, "rows.jsonl:2: chosen and rejected are the same"),
        ([LATE | {"rejected": pairs(1)[0]["chosen"]}], {}, "rows.jsonl:1: chosen: expected a turn"),
        ([{"prompt": [say("user", "a")]}], {}, "rows.jsonl:1: chosen: expected a non-empty list"),
        ([BROKEN], {}, "rows.jsonl:1: metadata.sampled: expected ids"),
        (pairs(3), {"max_length": 20}, r"no pair to train on \(of 3, 3 over max_length 20\)"),
        (pairs(3), {"rounds": 2}, "rounds=2: needs tasks"),
        (pairs(1), {"loss_type": "kto"}, "kto compares each pair with another"),
        ([TASK, *pairs(1)], {}, "rows.jsonl:2: instruction: expected text"),
        ([TASK], {"parallel": "fsdp2"}, "parallel=fsdp2: cannot sample pairs"),
        ([TASK], {"reward": "nosuch"}, "reward 'nosuch': expected"),
        ([TASK], {"env": "nosuch"}, "env 'nosuch': expected"),
    ],
)  # fmt: skip
def test_wrong_rows_are_one_line(pico_folder, tmp_path, rows, extra, problem):
    from sharpen.models.load import load_tokenizer

    data = write(tmp_path / "rows.jsonl", rows)
    if rows == [BROKEN]:
        own = tokenizer_hash(load_tokenizer(str(pico_folder)))
        data = str(tmp_path / "rows.jsonl")
        Path(data).write_text(json.dumps(BROKEN).replace('""', f'"{own}"'))
    with pytest.raises(SharpenError, match=problem) as caught:
        DPOTrainer(config(pico_folder, data, **extra), tmp_path / "run").train()
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"loss_type": "dpo"}, "loss_type"),
        ({"loss_type": "hinge", "label_smoothing": 0.1}, "label_smoothing: hinge has none"),
        ({"loss_type": "kto", "reference_free": True}, "reference_free: kto is about"),
        ({"loss_type": "orpo", "reference_model": "x"}, "reference_model: this loss has no"),
        ({"update_reference": True, "reference_model": "x"}, "update_reference: the reference"),
        ({"lora_dropout": 0.1}, "lora_dropout"),
        ({"beta": 0}, "beta"),
    ],
)
def test_wrong_settings(extra, problem):
    with pytest.raises(ConfigError, match=problem):
        config("x", "x.jsonl", **extra)


def test_long_pairs_are_named(pico_folder, tmp_path, capsys):
    rows = [*pairs(3), *(pair("a" * 500, "b", f"c{n}") for n in range(7))]
    data = write(tmp_path / "rows.jsonl", rows)
    trainer = DPOTrainer(config(pico_folder, data, max_length=200), tmp_path / "run")
    assert len(trainer.read_rows(data).rows) == 3
    out = capsys.readouterr().out
    assert "rows.jsonl:4: 521 and 522 tokens, over max_length (200): left out" in out
    assert "7 of 10 pairs left out" in out and out.count("\n") == 6


def test_a_reference_of_another_kind_is_refused(pico_folder, tmp_path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    other = tmp_path / "other"
    shutil.copytree(pico_folder, other)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 259}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    Qwen2ForCausalLM(Qwen2Config(**shape)).save_pretrained(other)
    data = write(tmp_path / "rows.jsonl", pairs(2))
    settings = config(pico_folder, data, reference_model=str(other))
    with pytest.raises(SharpenError, match=r"reference_model .*: a qwen2, the policy is a llama"):
        DPOTrainer(settings, tmp_path / "run").train()


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({}, "reference: a log-probability of the reference is not finite"),
        ({"reference_free": True}, "3 steps in a row had a loss"),
    ],
)
def test_a_model_of_nan_is_said(pico_folder, tmp_path, extra, problem):
    from safetensors.torch import save_file

    base = tmp_path / "base"
    shutil.copytree(pico_folder, base)
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    data = write(tmp_path / "rows.jsonl", pairs(32))
    with pytest.raises(SharpenError, match=problem):
        DPOTrainer(config(base, data, **extra), tmp_path / "run").train()


@pytest.mark.parametrize(
    ("body", "problem", "advice"),
    [
        ("return 0.5", "of 16 tasks with 8 samples each: 0 pairs, 16 ties, mean score 0.50;",
         "raise num_samples"),
        ("return float('nan')", "16 without two scored samples; 128 samples have no score",
         "look at the reward"),
        ("raise KeyError('x')", "128 samples have no score, 128 of them by reward: .*KeyError",
         "look at the reward"),
    ],
)  # fmt: skip
def test_rewards_that_tell_nothing_apart(guesser, tmp_path, body, problem, advice):
    data = letter_tasks(tmp_path, range(17, 21))
    (tmp_path / "reward.py").write_text(f"def score(task, t):\n    {body}\n")
    with pytest.raises(SharpenError, match=problem) as caught:
        DPOTrainer(online(guesser, data), tmp_path / "run").train()
    assert "\n" not in str(caught.value) and advice in str(caught.value)


def test_the_command(sharpen, guesser, tmp_path):
    data, output = letter_tasks(tmp_path, range(17, 21)), tmp_path / "run"
    command = ["train", "dpo", "--sft-model", str(guesser), "--data", data, "--output", str(output)]
    command += ["--beta", "0.3", "--num-samples", "6", "--max-steps", "2", "--json"]
    more = ["device=cpu", f"reward={tmp_path}/reward.py:score", "max_tokens=3", "lora_r=2"]
    code, out, err = sharpen(*command, *more)
    assert code == 0, err
    told = json.loads(out.splitlines()[-1])
    assert told["path"] == str(output / "final") and told["steps"] == 2 and "margin" in told
    saved = (output / "config.yaml").read_text()
    assert "beta: 0.3" in saved and "num_samples: 6" in saved and str(guesser) in saved
    code, _, err = sharpen(*command, "--base-model", "pico")
    assert code == 2 and err.startswith("error: --base-model and --sft-model")


@pytest.mark.slow
def test_a_killed_run_continues(guesser, tmp_path):
    """kill -9 at several places; the same command goes on to the same weights."""
    data = letter_tasks(tmp_path, range(17, 21))
    command = [sys.executable, "-m", "sharpen.cli.main", "train", "dpo"]
    command += ["--sft-model", str(guesser), "--data", data, "--save-steps", "2"]
    command += ["--epochs", "6", "device=cpu", "full=true"]
    command += [f"reward={tmp_path}/reward.py:score", "max_tokens=3", "rounds=3", "batch_size=8"]
    command += ["gradient_accumulation=1", "num_samples=8", "learning_rate=1e-3", "--output"]
    subprocess.run([*command, str(tmp_path / "whole")], check=True, capture_output=True)
    parts, deaths = tmp_path / "parts", 0
    for seen in ("pairs-1.jsonl", "metrics.jsonl", "pairs-2.jsonl", "reference-3.json"):
        process = subprocess.Popen(
            [*command, str(parts)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while process.poll() is None and not (parts / seen).exists():
            time.sleep(0.01)
        time.sleep(0.1)
        deaths += process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert deaths >= 3
    subprocess.run([*command, str(parts)], check=True, capture_output=True)
    assert metrics(parts) == metrics(tmp_path / "whole")
    final = "final/model.safetensors"
    assert (parts / final).read_bytes() == (tmp_path / "whole" / final).read_bytes()


@pytest.mark.slow
def test_two_processes_equal_one(guesser, tmp_path):
    """The first of them samples, both train."""
    data = letter_tasks(tmp_path, range(17, 21))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    common = ["-m", "sharpen.cli.main", "train", "dpo", "--sft-model", str(guesser), "--data", data]
    common += ["--dev-data", data, "device=cpu", f"reward={tmp_path}/reward.py:score", "rounds=2"]
    common += ["max_tokens=3", "num_samples=8", "batch_size=6", "gradient_accumulation=1"]
    common += ["token_budget=150", "lora_r=4", "lora_alpha=8", "learning_rate=1e-3", "--output"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    for start, name in (([], "one"), (launcher, "two")):
        command = [sys.executable, *start, *common, str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = (metrics(tmp_path / name) for name in ("one", "two"))
    assert len(one) == len(two) > 2
    for key in ("loss", "norm", "margin", "chosen_logp"):
        np.testing.assert_allclose(
            [row[key] for row in one], [row[key] for row in two], rtol=1e-4, atol=1e-6
        )
    for name in ("pairs-1.jsonl", "pairs-2.jsonl"):
        assert (tmp_path / "one" / name).read_text() == (tmp_path / "two" / name).read_text()
