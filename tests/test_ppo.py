"""PPO on a pico model that guesses: it learns with its critic, over several turns, and resumes with
both learners."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import sharpen.scored_rollout as scored_rollout
import sharpen.train.run as run_module
from guessing import accuracy, metrics, tasks
from sharpen.config import ConfigError
from sharpen.train.advantages import gae, whiten
from sharpen.train.config.ppo import PPOConfig
from sharpen.train.learner import Learner
from sharpen.train.ppo import PPOTrainer
from sharpen.types import Message, SharpenError, StopReason, Trajectory, Turn
from test_grpo import TWO_TURNS, code

pytestmark = pytest.mark.usefixtures("without_reports")


def config(model, data, **more) -> PPOConfig:
    given = {"base_model": str(model), "train_data": str(data), "device": "cpu", "full": True}
    given |= {"max_steps": 4, "num_rollouts": 16, "chunk_size": 8, "max_tokens": 8}
    given |= {"learning_rate": 1e-3, "critic_learning_rate": 1e-3, "save_steps": 1}
    return PPOConfig(**(given | more))


def test_it_learns(guesser, tmp_path):
    more = {"max_steps": 40, "num_rollouts": 64, "chunk_size": 32, "save_steps": 40}
    settings = config(guesser, tasks(tmp_path), **more, max_flat_steps=99)
    PPOTrainer(settings, tmp_path / "run").train()
    assert accuracy(guesser) < 0.3 and accuracy(tmp_path / "run" / "final") >= 0.95
    rows = [row for row in metrics(tmp_path / "run") if not row["skipped"]]
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-5) and rows[-1]["kl"] > 0.1
    assert rows[-1]["value_loss"] < rows[0]["value_loss"]


def test_credit_runs_through_all_turns_of_an_episode(pico_folder, tmp_path, monkeypatch):
    """The score comes with the last token; what lies between the turns takes no part."""
    seen = []
    add_credit = PPOTrainer.add_credit

    def remembering(self, samples, scores, state):
        reference = [r + 0.1 for r in self.learner.logprobs(samples.rows)]
        monkeypatch.setattr(self.setup.reference, "logprobs", lambda *_: reference)
        found, figures = add_credit(self, samples, scores, state)
        seen.append((found, samples.sample_of_row, scores, figures))
        return found, figures

    monkeypatch.setattr(PPOTrainer, "add_credit", remembering)
    own = {"env": code(tmp_path, TWO_TURNS, "Echo"), "reward": f"{tmp_path}/own.py:score"}
    settings = config(pico_folder, tasks(tmp_path), max_steps=1, max_tokens=20, **own, gamma=0.9)
    PPOTrainer(settings, tmp_path / "run").train()
    ((rows, owners, scores, figures),) = seen
    advantages, returns = [], []
    for number, score in enumerate(scores):
        own_rows = [rows[i] for i in np.flatnonzero(owners == number)]
        values = np.concatenate([row.columns["value"] for row in own_rows])
        rewards = np.full(len(values), 0.02 * 0.1)  # the reference is e^0.1 likelier everywhere
        rewards[-1] += score
        found = gae(rewards, values, 0.9, 0.95)
        advantages, returns = [*advantages, *found[0]], [*returns, *found[1]]
    columns = [np.concatenate([row.columns[n] for row in rows]) for n in ("advantage", "return")]
    np.testing.assert_allclose(columns[0], whiten(np.array(advantages)), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(columns[1], returns, rtol=1e-4, atol=1e-4)
    assert all(len(row.columns["value"]) == row.mask.sum() < len(row.ids) for row in rows)
    assert figures["kl"] < 0


def test_adaptive_kl_whitened_rewards_and_lora(guesser, tmp_path):
    more = {"kl_target": 0.5, "kl_horizon": 100, "whiten_rewards": True, "full": False, "lora_r": 4}
    trainer = PPOTrainer(config(guesser, tasks(tmp_path), **more, max_steps=2), tmp_path / "run")
    trainer.train()
    rows = metrics(tmp_path / "run")
    assert rows[0]["kl_coef"] == pytest.approx(0.02 * (1 - 0.2 * 16 / 100))
    assert rows[1]["kl_coef"] < rows[0]["kl_coef"]
    names = [name for name in trainer.critic.trained if "score" in name]
    assert names and float(trainer.critic.trained[names[0]].detach().abs().max()) > 0
    assert (tmp_path / "run" / "final" / "adapter_model.safetensors").is_file()


def test_a_flat_step_changes_nothing(guesser, tmp_path):
    reward = code(tmp_path, "def score(task, made):\n    return 1.0\n")
    settings = config(guesser, tasks(tmp_path), reward=reward, max_steps=9, max_flat_steps=2)
    with pytest.raises(SharpenError, match="2 steps in a row had only flat rewards"):
        PPOTrainer(settings, tmp_path / "run").train()
    assert [row["skipped"] for row in metrics(tmp_path / "run")] == [True, True]


def test_fewer_samples_than_chunks_and_words_that_never_end(guesser, tmp_path):
    body = "    ids = made.turns[0].ids\n    return 'none' if ids[0] % 2 else ids[0]"
    reward = code(tmp_path, f"def score(task, made):\n{body}\n")
    more = {"reward": reward, "max_steps": 1, "chunk_size": 1, "overlong_buffer": 1}
    trainer = PPOTrainer(config(guesser, tasks(tmp_path), **more), tmp_path / "run")
    trainer.train()
    (row,) = metrics(tmp_path / "run")
    assert row["dropped"] > 0 and not row["skipped"]
    turns = (Turn(Message("assistant", "on and on"), ids=(1,) * 8),)
    cut = Trajectory("a", turns, StopReason.TOKENS)
    assert trainer.play_settings.shape(cut) == -1


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"tasks_per_step": 4}, "and num_rollouts .16. are two names of one setting"),
        ({"clip": 0.1, "clip_range": 0.2}, "and clip_range .0.2. are two names of one setting"),
        ({"group_size": 4}, "group_size"),
        ({"kl_coef": -1}, "kl_coef"),
    ],
)
def test_wrong_settings(guesser, given, problem):
    with pytest.raises(ConfigError, match=problem):
        config(guesser, "x.jsonl", **given)


def test_a_configs_own_values_are_the_same_config(guesser):
    given = config(guesser, "x.jsonl")
    assert PPOConfig(**given.model_dump()) == given
    assert (given.tasks_per_step, given.minibatches, given.updates) == (16, 2, 4)


def test_the_command(sharpen, guesser, tmp_path):
    command = ["train", "ppo", "--sft-model", str(guesser), "--data", tasks(tmp_path)]
    command += ["--output", str(tmp_path / "run"), "--max-steps", "1", "--json", "device=cpu"]
    done, out, err = sharpen(*command, "num_rollouts=8", "max_tokens=4", "lora_r=2")
    assert done == 0, err
    assert json.loads(out.splitlines()[-1])["step"] == 1


PLACES = {
    "rollout": (scored_rollout, "rollout", 3),
    "update": (Learner, "forward_backward", 11),  # of the critic
    "save": (run_module, "save_checkpoint", 1),
}


@pytest.fixture(scope="module")
def whole(guesser, tmp_path_factory, without_reports) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    PPOTrainer(resumed(guesser, tasks(folder)), folder / "run").train()
    return folder


def resumed(guesser, data: str) -> PPOConfig:
    return config(guesser, data, kl_target=0.5, dev_data=data, eval_steps=2, save_steps=2)


@pytest.mark.parametrize("place", PLACES)
def test_resume_is_bit_identical(guesser, whole, tmp_path, monkeypatch, place):
    settings = resumed(guesser, str(whole / "tasks.jsonl"))
    owner, name, last = PLACES[place]
    original, calls = getattr(owner, name), iter(range(1000))

    class Killed(BaseException):
        pass

    def dying(*given):
        if next(calls) == last:
            raise Killed
        return original(*given)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, dying)
        with pytest.raises(Killed):
            PPOTrainer(settings, tmp_path / "parts").train()
    PPOTrainer(settings, tmp_path / "parts").train()
    assert metrics(tmp_path / "parts") == metrics(whole / "run")
    file = "final/model.safetensors"
    assert (tmp_path / "parts" / file).read_bytes() == (whole / "run" / file).read_bytes()
