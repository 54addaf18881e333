"""GRPO on a pico model that guesses: it learns, says what it could not learn from, trains on the
ids that were sampled, and goes on after a kill as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import guessing
import sharpen.scored_rollout as scored_rollout
import sharpen.train.run as run_module
from guessing import accuracy, metrics, tasks, write
from sharpen.config import ConfigError
from sharpen.envs.perturb import Perturbation
from sharpen.evals.baselines import Gold
from sharpen.models.load import ModelConfig, load_model, load_tokenizer
from sharpen.train.config.grpo import GRPOConfig
from sharpen.train.config.learner import LearnerConfig
from sharpen.train.group_source import LocalGroupSource, with_seed
from sharpen.train.grpo import GRPOTrainer
from sharpen.train.learner import Learner
from sharpen.train.losses import Surrogate
from sharpen.train.policy_update import surrogate_loss
from sharpen.train.rl_data import merge_equal_rows
from sharpen.train.task_order import CurriculumOrder
from sharpen.types import Datum, Dialog, SharpenError

pytestmark = pytest.mark.usefixtures("without_reports")


def config(model, data, **more) -> GRPOConfig:
    given = {"base_model": str(model), "train_data": str(data), "device": "cpu", "full": True}
    given |= {"max_steps": 4, "tasks_per_step": 4, "group_size": 4, "max_tokens": 8, "beta": 0.0}
    return GRPOConfig(**(given | {"learning_rate": 1e-3, "save_steps": 1} | more))


def code(folder: Path, text: str, name: str = "score") -> str:
    (folder / "own.py").write_text(text)
    return f"{folder / 'own.py'}:{name}"


def test_it_learns(guesser, tmp_path):
    settings = {"max_steps": 60, "tasks_per_step": 8, "group_size": 8, "updates_per_step": 2}
    settings |= {"save_steps": 60, "max_flat_steps": 99, "beta": 0.02, "seed": 1}
    GRPOTrainer(config(guesser, tasks(tmp_path), **settings), tmp_path / "run").train()
    assert accuracy(guesser) < 0.3 and accuracy(tmp_path / "run" / "final") >= 0.95


LUCK = """
from guessing import failure
from sharpen.types import Dialog, Message, StopReason

class Luck:
    inline, begun = True, 0

    def reset(self, task):
        Luck.begun += 1
        self.task, self.lucky = task, Luck.begun * 7919 % 13 % 2
        return Dialog(task.messages, task.tools, task.id)

    def step(self, message):
        if self.lucky:
            return (), StopReason.ANSWERED
        self.lucky = True
        return (Message("tool", failure(self.task.instruction), name="ask"),), None

def score(task, made):
    right = len(made.turns) == 1 or made.turns[-1].message.content == task.gold["answer"]
    return float(right and made.stop is StopReason.ANSWERED)
"""


@pytest.mark.slow
def test_it_learns_what_to_do_behind_a_failure(pico_folder, tmp_path, monkeypatch):
    """Whether the first answer fails is chance; the reward of the second is what can be learnt.
    What the first one says is never read, and has to stay a letter all the same."""
    start, seen = guessing.guesser(pico_folder, tmp_path, again=True), []
    take_next = LocalGroupSource.next

    def remembering(*given):
        sampled = take_next(*given)
        seen.append([made for group in sampled.groups for made in group.samples])
        return sampled

    monkeypatch.setattr(LocalGroupSource, "next", remembering)
    settings = {"env": code(tmp_path, LUCK, "Luck"), "reward": f"{tmp_path}/own.py:score"}
    settings |= {"variant": "dr_grpo", "beta": 0.02, "learning_rate": 3e-4}
    settings |= {"group_size": 8, "max_tokens": 4, "max_steps": 120, "save_steps": 120, "seed": 1}
    GRPOTrainer(config(start, tasks(tmp_path), **settings), tmp_path / "run").train()

    def again(steps):
        second = [made for step in steps for made in step if len(made.turns) == 2]
        return np.mean([made.score.value for made in second])

    assert again(seen[:20]) < 0.35 and again(seen[-20:]) > 0.5
    said = [made.turns[0].message.content for step in seen[-20:] for made in step]
    assert np.mean([letter in guessing.LETTERS for letter in said]) > 0.95


@pytest.mark.parametrize(
    ("variant", "more"),
    [
        ("dapo", {"minibatches": 2}),
        ("dr_grpo", {"minibatches": 17}),  # of 16 samples
        ("gspo", {"updates_per_step": 2}),
        ("rloo", {"beta": 0.1}),
        ("reinforce++", {"importance_cap": 2.0, "full": False, "lora_r": 4, "beta": 0.1}),
        ("grpo", {"use_advantage": False, "temperature": 0.7, "updates_per_step": 2}),
    ],
)
def test_variants_train_and_their_models_load(guesser, tmp_path, variant, more):
    trainer = GRPOTrainer(
        config(guesser, tasks(tmp_path), variant=variant, max_steps=2, **more), tmp_path / "run"
    )
    before = trainer.train()
    rows = metrics(tmp_path / "run")
    assert before["step"] == 2 and [row["step"] for row in rows] == [1, 2]
    lively = [row for row in rows if not row["skipped"]]
    assert lively and all(row["norm"] > 0 and row["mismatch"] < 1e-5 for row in lively)
    assert ("kl" in lively[0]) == ("beta" in more)
    load_model(ModelConfig(base_model=str(tmp_path / "run" / "final"), device="cpu"))


def test_equal_rows_are_computed_once(guesser):
    chance = np.random.default_rng(0)
    ids = [chance.integers(5, 200, 12).astype(np.int32) for _ in range(3)]
    mask = np.arange(12) > 6

    def row(which, advantage, weight):
        columns = {
            "advantage": np.full(5, advantage, np.float32),
            "old": np.full(5, -5, np.float32),
        }
        return Datum(ids[which], mask, weight=weight, columns=columns)

    rows = [row(0, 1, 0.1), row(1, -1, 0.2), row(0, 1, 0.1), row(0, 0.5, 0.1), row(2, 1, 0.1)]
    fewer = merge_equal_rows([*rows, row(0, 1, 0.3)])
    assert [round(r.weight, 6) for r in fewer] == [0.5, 0.2, 0.1, 0.1]
    weights = []
    for given in ([*rows, row(0, 1, 0.3)], fewer):
        model = load_model(ModelConfig(base_model=str(guesser), device="cpu"))
        learner = Learner(model, LearnerConfig(learning_rate=1e-2, warmup_ratio=0), 1)
        learner.step(given, surrogate_loss(Surrogate(0.9, 9.0), {}))
        weights.append(learner.weights())
    for name, value in weights[0].items():
        assert torch.allclose(value, weights[1][name], atol=1e-5), name


def test_the_samplers_log_probabilities_may_be_the_old_ones(guesser, tmp_path, monkeypatch):
    """On a CPU they are the learner's own, which then need not be computed again."""
    given = {"max_steps": 2, "updates_per_step": 2}
    rows = []
    for name, trust in (("again", False), ("trusted", True)):
        if trust:
            monkeypatch.delattr(Learner, "logprobs")
        settings = config(guesser, tasks(tmp_path), trust_sampler=trust, **given)
        GRPOTrainer(settings, tmp_path / name).train()
        rows.append([(row["loss"], row["norm"]) for row in metrics(tmp_path / name)])
        assert ("mismatch" in metrics(tmp_path / name)[0]) == (not trust)
    assert np.allclose(*rows, atol=1e-4)


def test_dapo_is_what_one_field_says(guesser, tmp_path):
    data = tasks(tmp_path)
    usual, dapo = config(guesser, data), config(guesser, data, variant="dapo", max_tokens=20)
    assert (usual.clip_high, usual.refill_rounds, usual.overlong_buffer) == (0.2, 0, 0)
    assert (dapo.clip_high, dapo.refill_rounds, dapo.overlong_buffer) == (0.28, 3, 4)
    own = config(guesser, data, variant="dapo", refill_rounds=1, clip_high=0.5)
    assert (own.clip_high, own.refill_rounds) == (0.5, 1)


# What is trained on ----------------------------------------------------------------------------

TWO_TURNS = """
from sharpen.types import Dialog, Message, StopReason

class Echo:
    def reset(self, task):
        self.turns = 0
        return Dialog(task.messages, task.tools, task.id)

    def step(self, message):
        self.turns += 1
        if self.turns == 2:
            return (), StopReason.ANSWERED
        return (Message("user", "again: " + message.content),), None

def score(task, trajectory):
    return len(trajectory.turns[0].message.content) + len(trajectory.turns[-1].ids)
"""


def test_trained_ids_are_the_sampled_ids(pico_folder, tmp_path, monkeypatch):
    """An untrained model's bytes are no text: their ids cannot be found again from it."""
    seen, trained = [], []
    rollout, step = scored_rollout.rollout, Learner.step

    def remembering(*given):
        seen.extend(rollout(*given))
        return seen

    monkeypatch.setattr(scored_rollout, "rollout", remembering)
    monkeypatch.setattr(Learner, "step", lambda *a: (trained.extend(a[1]), step(*a))[1])
    own = {"env": code(tmp_path, TWO_TURNS, "Echo"), "reward": f"{tmp_path}/own.py:score"}
    settings = config(pico_folder, tasks(tmp_path), max_steps=1, max_tokens=40, **own)
    GRPOTrainer(settings, tmp_path / "run").train()
    turns = [[list(turn.ids) for turn in made.turns] for made in seen]
    assert any(len(made) == 2 for made in turns)
    sampled = [[i for ids in made for i in ids] for made in turns]
    sampled += [ids for made in turns for ids in made]  # where a turn has a row of its own
    assert trained and all(d.ids[d.mask].tolist() in sampled for d in trained)
    for datum in trained:  # and the learner's own log-probabilities are the sampler's
        assert len(datum.columns["sampler"]) == datum.mask.sum()
    assert metrics(tmp_path / "run")[0]["mismatch"] < 1e-4


def test_flat_groups_are_reported_and_end_the_run(guesser, tmp_path):
    reward = code(tmp_path, "def score(task, made):\n    return 0.25\n")
    settings = config(guesser, tasks(tmp_path), reward=reward, max_steps=9, max_flat_steps=3)
    with pytest.raises(
        SharpenError, match=r"3 steps in a row had only flat rewards, the last of them 0.25"
    ):
        GRPOTrainer(settings, tmp_path / "run").train()
    rows = metrics(tmp_path / "run")
    assert [(row["flat_groups"], row["skipped"], row["trained"]) for row in rows] == [(4, 1, 0)] * 3


def test_flat_groups_are_refilled(guesser, tmp_path):
    """Two of four questions are scored alike for all; further tasks take their place."""
    reward = code(
        tmp_path,
        "def score(task, made):\n    return len(made.turns[0].ids) if task.id in 'ns' else 0.0\n"
        .replace("len(made.turns[0].ids)", "sum(made.turns[0].ids) % 7"),
    )  # fmt: skip
    settings = config(guesser, tasks(tmp_path), reward=reward, refill_rounds=2, max_steps=1)
    GRPOTrainer(settings, tmp_path / "run").train()
    (row,) = metrics(tmp_path / "run")
    assert row["samples"] > 16 and row["flat_groups"] >= 2 and not row["skipped"]


def test_the_curriculum_leaves_what_is_out_of_reach(guesser, tmp_path, monkeypatch):
    body = "float(task.id in 'ns' and made.turns[0].ids[0] % 2)"
    reward = code(tmp_path, f"def score(task, made):\n    return {body}\n")
    drawn, pick = Counter(), CurriculumOrder.pick

    def counting(*given):
        found = pick(*given)
        drawn.update(task.id for task in found)
        return found

    monkeypatch.setattr(CurriculumOrder, "pick", counting)
    more = {"curriculum": True, "tasks_per_step": 1, "max_steps": 240, "max_flat_steps": 99}
    settings = config(guesser, tasks(tmp_path), reward=reward, learning_rate=1e-9, **more)
    GRPOTrainer(settings.model_copy(update={"save_steps": 99}), tmp_path / "run").train()
    assert drawn["n"] + drawn["s"] > 2 * (drawn["e"] + drawn["w"]) > 0


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("[1.0, 2.0] if made.turns[0].ids[0] % 2 else 1.0", "expected a finite number, found "),
        ("float('nan') if made.turns[0].ids[0] % 2 else 1.0", "expected a finite number, found "),
        ("1 / (made.turns[0].ids[0] % 2)", "own.py:2)"),
    ],
)
def test_samples_without_a_reward_are_dropped_and_counted(
    guesser, tmp_path, body, reason, monkeypatch, capsys
):
    monkeypatch.setattr("sharpen.train.display.LINE_EVERY_S", 0.0)
    reward = code(tmp_path, f"def score(task, made):\n    return {body}\n")
    GRPOTrainer(config(guesser, tasks(tmp_path), reward=reward), tmp_path / "run").train()
    rows = [row for row in metrics(tmp_path / "run") if row["dropped"]]
    assert rows and all(row["dropped"] + row["samples"] == 16 for row in rows)
    assert reason in rows[0]["dropped_why"]
    told = f"{rows[0]['dropped']} samples dropped ({rows[0]['dropped_why']})"
    assert told in capsys.readouterr().out


def test_dev_tasks_without_a_score_are_named(guesser, tmp_path, capsys):
    body = "    if task.id == 'n':\n        raise KeyError('gone')\n"
    reward = code(tmp_path, f"def score(task, made):\n{body}    return float(len(made.turns))\n")
    data = tasks(tmp_path)
    more = {"dev_data": str(data), "eval_steps": 1, "max_steps": 1, "min_dev_score": 0.0}
    GRPOTrainer(config(guesser, data, reward=reward, **more), tmp_path / "run").train()
    (row,) = metrics(tmp_path / "run")
    assert row["eval_dropped"] == 1 and "KeyError: 'gone' (" in row["eval_dropped_why"]
    assert f"1 dev tasks dropped ({row['eval_dropped_why']})" in capsys.readouterr().out


def test_a_step_without_any_score_is_an_error(guesser, tmp_path):
    reward = code(tmp_path, "def score(task, made):\n    return float('nan')\n")
    with pytest.raises(SharpenError, match=r"no sample of the step could be scored: reward: .*nan"):
        GRPOTrainer(config(guesser, tasks(tmp_path), reward=reward), tmp_path / "run").train()


def test_long_prompts_and_unwanted_ends_are_reported(guesser, tmp_path):
    data = tasks(tmp_path)
    with open(data, "a") as file:
        for word in ("x" * 9000, "y" * 60):
            row = {"id": word[0], "instruction": word, "gold": {"answer": "A"}, "kind": "exact"}
            file.write(json.dumps(row) + "\n")
    settings = config(guesser, data, tasks_per_step=6, max_steps=1, max_length=60)
    GRPOTrainer(settings, tmp_path / "run").train()
    (row,) = metrics(tmp_path / "run")
    assert row["dropped"] == 8 and "4 context: " in row["dropped_why"]
    assert "4 length: " in row["dropped_why"]  # none hides behind another
    settings = config(guesser, tasks(tmp_path), excluded_stops=("answered",))
    with pytest.raises(SharpenError, match="answered: not to be trained on"):
        GRPOTrainer(settings, tmp_path / "other").train()


# Around the steps ------------------------------------------------------------------------------


def test_evaluation_callback_and_monitor(guesser, tmp_path):
    data, seen = tasks(tmp_path), []

    def evaluate(context):
        assert context.policy.renderer is context.renderer and not context.model.training
        seen.append(context.step)
        return {"own": 0.5}

    settings = config(guesser, data, dev_data=data, eval_steps=2, monitor=True, max_steps=3)
    figures = GRPOTrainer(settings, tmp_path / "run", callback=evaluate).train()
    rows = metrics(tmp_path / "run")
    assert seen == [2, 3] and "metric" not in rows[0] and rows[1]["own"] == 0.5
    assert 0 <= rows[1]["eval_correctness"] <= 1 and figures["metric"] == rows[2]["metric"]
    assert rows[1]["eval_solved"] == rows[1]["eval_correctness"]
    assert all(0 <= row["hacking_rate"] <= 1 for row in rows)


def test_the_best_measured_weights_are_the_result(guesser, tmp_path):
    """Two evaluations, the second worse: `final/` is of the first."""
    values, saved = iter((0.5, 0.25)), []
    settings = config(guesser, tasks(tmp_path), eval_steps=1, max_steps=2)
    trainer = GRPOTrainer(settings, tmp_path / "run", callback=lambda _: next(values))
    save = trainer.save_model
    trainer.save_model = lambda path: (
        saved.append((path.name, trainer.learner.steps_done)),
        save(path),
    )
    assert trainer.train()["best_metric"] == 0.5
    assert saved == [("best", 1)]
    best, final = (
        (tmp_path / "run" / n / "model.safetensors").read_bytes() for n in ("best", "final")
    )
    assert best == final


def test_the_gate_asks_for_tool_accuracy_first(sharpen, pico_folder, tmp_path):
    tool = {"type": "function", "function": {"name": "clock", "description": "", "parameters": {}}}
    gold = {"calls": [{"name": "clock", "arguments": {}}]}
    row = {"id": "t", "instruction": "time?", "tools": [tool], "gold": gold, "kind": "call"}
    data = write(tmp_path / "calls.jsonl", [row])
    command = ["train", "grpo", "--sft-model", str(pico_folder), "--data", data, "--dev-data", data]
    command += ["--max-steps", "1", "--reward", "calls", "device=cpu", "max_tokens=4", "lora_r=2"]
    code, _, err = sharpen(*command, "--output", str(tmp_path / "run"))
    assert code == 2 and err.startswith("error: gate: ") and "--force" in err
    code, out, err = sharpen(*command, "--output", str(tmp_path / "forced"), "--force", "--json")
    assert code == 0, err
    assert "gate: not asked, by --force" in out
    told = json.loads(out.splitlines()[-1])
    assert told["path"] == str(tmp_path / "forced" / "final") and told["step"] == 1


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"group_size": 1}, "group_size"),
        ({"variant": "gpro"}, "variant"),
        ({"batch_size": 8}, "batch_size"),
        ({"lora_dropout": 0.1}, "lora_dropout"),
        ({"temperature": 0.0}, "temperature"),
        ({"groupsize": 4}, "did you mean 'group_size'"),
        ({"importance_cap": 2.0, "trust_sampler": True}, "the sampler's already"),
        ({"importance_cap": 2.0, "async_steps": 1}, "the sampler's already"),
    ],
)
def test_wrong_settings(guesser, given, problem):
    with pytest.raises(ConfigError, match=problem):
        config(guesser, "x.jsonl", **given)


def test_wrong_references(guesser, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    other = tmp_path / "other"
    GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=8, n_layer=1, n_head=1)).save_pretrained(
        other
    )
    load_tokenizer(str(guesser)).save_pretrained(other)
    for beta, problem in ((0.1, "a gpt2, the policy is a llama"), (0.0, "nothing asks for it")):
        settings = config(guesser, tasks(tmp_path), reference_model=str(other), beta=beta)
        with pytest.raises(SharpenError, match=problem):
            GRPOTrainer(settings, tmp_path / f"run-{beta}").train()


def test_no_tasks_is_one_line(guesser, tmp_path):
    with pytest.raises(SharpenError, match=r"empty.jsonl: no tasks"):
        GRPOTrainer(config(guesser, write(tmp_path / "empty.jsonl", [])))


# Stopping and continuing -----------------------------------------------------------------------

PLACES = {
    "rollout": (scored_rollout, "rollout"),
    "reward": (scored_rollout, "score_or_reason"),
    "update": (Learner, "forward_backward"),
    "save": (run_module, "save_checkpoint"),
}


@pytest.fixture(scope="module")
def whole(guesser, tmp_path_factory, without_reports) -> Path:
    """Uninterrupted, with a reference, several updates, refills, evaluations and the monitor."""
    folder = tmp_path_factory.mktemp("whole")
    for name, full in (("full", True), ("lora", False)):
        GRPOTrainer(resumed(guesser, tasks(folder), full), folder / name).train()
    return folder


def resumed(guesser, data, full) -> GRPOConfig:
    more = {"beta": 0.05, "minibatches": 2, "variant": "dapo", "full": full, "lora_r": 4}
    more |= {"dev_data": data, "eval_steps": 2, "monitor": True, "save_steps": 2, "max_steps": 5}
    more |= {"curriculum": not full, "tasks_per_step": 4 if full else 3}
    return config(guesser, data, **more)


@pytest.mark.parametrize(
    ("place", "full", "at"),
    [
        ("rollout", True, (4, 5)), ("reward", False, (30, 60)),
        ("update", False, (5, 3)), ("save", True, (0, 1)),
    ],
)  # fmt: skip
def test_resume_is_bit_identical(guesser, whole, tmp_path, monkeypatch, place, full, at):
    """Stopped twice in one part of a step, the run repeats an uninterrupted one."""
    settings = resumed(guesser, str(whole / "tasks.jsonl"), full)
    whole = whole / ("full" if full else "lora")
    owner, name = PLACES[place]
    original = getattr(owner, name)

    class Killed(BaseException):
        pass

    for last in at:
        calls = iter(range(1000))

        def dying(*given, last=last, calls=calls):
            if next(calls) == last:
                raise Killed
            return original(*given)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, dying)
            with pytest.raises(Killed):
                GRPOTrainer(settings, tmp_path / "parts").train()
    GRPOTrainer(settings, tmp_path / "parts").train()
    assert metrics(tmp_path / "parts") == metrics(whole)
    file = "final/model.safetensors" if full else "final/adapter_model.safetensors"
    assert (tmp_path / "parts" / file).read_bytes() == (whole / file).read_bytes()


KILLER = """
import importlib, os, signal, sys
from sharpen.cli.main import main

module, path, last = sys.argv[1].split(":")
*outer, name = path.split(".")
owner = importlib.import_module(module)
for part in outer:
    owner = getattr(owner, part)
original, left = getattr(owner, name), int(last)

def dying(*given, **more):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*given, **more)

setattr(owner, name, dying)
sys.argv = ["sharpen", *sys.argv[2:]]
main()
"""
KILLS = {
    "rollout": "sharpen.policy.engine:Engine.harvest:1",
    "reward": "sharpen.scored_rollout:score_or_reason:20",
    "update": "sharpen.train.learner:Learner.gather_gradients:2",
    "save": "safetensors.torch:save_file:1",
}


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["grpo", "ppo"])
def test_kill_9_anywhere(guesser, tmp_path, verb):
    """Really killed in rollout, in reward, in update and in save, the same command goes on."""
    data, script = tasks(tmp_path), tmp_path / "killer.py"
    script.write_text(KILLER)
    command = ["train", verb, "--sft-model", str(guesser), "--data", data, "--max-steps", "8"]
    command += ["--save-steps", "1", "--output", "OUT", "device=cpu", "max_tokens=8", "lora_r=4"]
    command += ["tasks_per_step=4", "group_size=4"] if verb == "grpo" else ["num_rollouts=16"]
    whole, parts = ([x.replace("OUT", str(tmp_path / n)) for x in command] for n in ("w", "p"))
    subprocess.run([sys.executable, "-m", "sharpen.cli.main", *whole], check=True)
    for target in KILLS.values():
        done = subprocess.run([sys.executable, str(script), target, *parts], env=os.environ)
        assert done.returncode == -signal.SIGKILL
    subprocess.run([sys.executable, "-m", "sharpen.cli.main", *parts], check=True)
    assert metrics(tmp_path / "p") == metrics(tmp_path / "w")
    files = [tmp_path / n / "final" / "adapter_model.safetensors" for n in ("p", "w")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_perturbed_tasks_are_shown_otherwise_and_scored_as_they_are(guesser, tmp_path):
    """Who says gold's calls in the words that it was shown is right, in the world too."""
    given = {
        "env": "toolworld",
        "perturb": ["rename", "shuffle"],
        "min_dev_score": 0,
        "group_size": 2,
    }
    data = "agent_benchmark/planning:dev"
    trainer = GRPOTrainer(config(guesser, data, **given), tmp_path / "run")
    perturbation = trainer.play_settings.perturbation
    assert perturbation
    chosen = [task for task in trainer.train_tasks if task.id in perturbation.tasks]
    assert 0.3 < len(chosen) / len(trainer.train_tasks) < 0.7
    for task in (chosen[0], next(t for t in trainer.train_tasks if t not in chosen)):
        policy = Gold([task], perturbation.show_message)
        how = with_seed(trainer.play_settings, 0)
        (group,) = scored_rollout.play_and_score(policy, [task], how)
        assert (group.rewards > 0.9).all()
        seen = Dialog(task.messages, task.tools, task.id)
        shown = {tool.name for tool in perturbation.dialog(seen).tools}
        own = {tool.name for tool in task.tools}
        assert shown.isdisjoint(own) if task in chosen else shown == own
    dev = trainer.dev_evaluation  # whatever their ids, dev tasks are shown as they are
    dev.dev_tasks = chosen[:1]
    assert dev.measure(Gold(chosen[:1], lambda _, message: message))["metric"] > 0.9
    with pytest.raises(SharpenError, match="ids of their own"):
        Perturbation([chosen[0], chosen[0]], ["rename"])
