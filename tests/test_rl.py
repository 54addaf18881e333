"""The specification's trainers: one constructor for DPO, PPO and GRPO, and R1-style training."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from guessing import LETTERS, QUESTIONS, metrics, tasks, write
from sharpen import AgentRewardConfig, AgentRewardModel, AgentRLTrainer, RLTrainingConfig
from sharpen.config import ConfigError
from sharpen.models.load import (
    LoRAConfig,
    ModelConfig,
    attach_lora,
    base_of_adapter,
    load_model,
    load_tokenizer,
)
from sharpen.train.config.specification import R1TrainingConfig
from sharpen.train.rl import R1Reward, R1StyleTrainer
from sharpen.types import Message, Score, SharpenError, StopReason, Task, Trajectory, Turn

pytestmark = pytest.mark.usefixtures("without_reports")

RUN = {"device": "cpu", "max_steps": 2, "max_tokens": 8, "lora_r": 4, "learning_rate": 1e-3}
RUN |= {"eval_steps": 1}
OWN = {
    "grpo": {"grpo_config": {"group_size": 4, "beta": 0.1}, "settings": RUN},
    "ppo": {"ppo_config": {"num_rollouts": 16, "chunk_size": 8}, "settings": RUN},
    "dpo": {"settings": {**RUN, "num_samples": 8}},
}


class Letters:
    """1 for the right letter: a reward model as any object with `score`."""

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        return Score(float(trajectory.turns[-1].message.content == task.gold["answer"]))


def trainer_of(algorithm, guesser, tmp_path, evaluate=None, sft="") -> AgentRLTrainer:
    config = RLTrainingConfig(algorithm=algorithm, train_data=tasks(tmp_path), **OWN[algorithm])
    output = tmp_path / "run"
    return AgentRLTrainer(config, str(guesser), sft, Letters(), output=output, evaluate=evaluate)


@pytest.mark.parametrize("algorithm", OWN)
def test_one_constructor_for_all(guesser, tmp_path, algorithm):
    if algorithm == "dpo":
        pytest.importorskip("sharpen.train.dpo")
    seen = []

    def evaluate(context):
        turns = context.policy.respond([], None)
        seen.append(context.step)
        return {"answers": len(turns)}

    trainer = trainer_of(algorithm, guesser, tmp_path, evaluate)
    assert trainer.model is None
    figures = trainer.train()
    rows = metrics(tmp_path / "run")
    assert figures and seen and all("answers" in row for row in rows)
    trainer.save_model(tmp_path / "saved")
    load_model(ModelConfig(base_model=str(tmp_path / "saved"), device="cpu"))
    assert sum(p.numel() for p in trainer.model.parameters()) > 0


def test_pairs_are_scored_by_gold(guesser, tmp_path):
    pytest.importorskip("sharpen.train.dpo")
    trainer = trainer_of("grpo", guesser, tmp_path)
    rows = trainer.generate_preference_pairs(list(QUESTIONS), num_samples=12)
    right = dict(zip(QUESTIONS, LETTERS, strict=True))
    assert rows and all(row["chosen_score"] > row["rejected_score"] for row in rows)
    for row in rows:
        assert row["chosen"][-1]["content"] == right[row["prompt"][-1]["content"]]
    with pytest.raises(SharpenError, match=r"no task of .* says this; give a Task"):
        trainer.generate_preference_pairs(["unheard of"])


def test_the_specs_defaults_and_wrong_settings(guesser, tmp_path):
    config = RLTrainingConfig()
    assert config.algorithm == "dpo" and config.dpo_config["loss_type"] == "sigmoid"
    assert config.ppo_config["num_rollouts"] == 128 and config.grpo_config["group_size"] == 4
    with pytest.raises(ConfigError, match="algorithm"):
        RLTrainingConfig(algorithm="sft")
    wrong = RLTrainingConfig(algorithm="grpo", grpo_config={"groupsize": 2})
    with pytest.raises(ConfigError, match=r"grpo_config: groupsize: .*'group_size'"):
        AgentRLTrainer(wrong, str(guesser), "", AgentRewardModel(AgentRewardConfig()))


def test_an_adapter_of_another_base_is_refused(guesser, pico_folder, tmp_path):
    model = load_model(ModelConfig(base_model=str(guesser), device="cpu"))
    attach_lora(model, LoRAConfig(lora_r=4)).save_pretrained(tmp_path / "adapter")
    load_tokenizer(str(guesser)).save_pretrained(tmp_path / "adapter")
    trainer = trainer_of("grpo", guesser, tmp_path, sft=str(tmp_path / "adapter"))
    trainer.train()
    assert base_of_adapter(tmp_path / "run" / "final") == str(guesser)
    with pytest.raises(SharpenError, match=r"an adapter of .*, not of"):
        trainer_of("grpo", pico_folder, tmp_path, sft=str(tmp_path / "adapter"))


# R1 --------------------------------------------------------------------------------------------


def said(text: str) -> Trajectory:
    return Trajectory("t", (Turn(Message("assistant", text), ids=(1,)),), StopReason.ANSWERED)


def test_rewards_are_mostly_about_being_right():
    question = Task("t", "What is 17 + 25?", gold={"answer": "42"}, kind="math")
    thought = "<think>Step 1: 17 + 25 = 42, because 17 + 20 = 37 and 37 + 5 = 42.</think>"
    texts = ("no idea", f"{thought} so \\boxed{{41}}", "42", f"{thought} so \\boxed{{42}}")
    config = R1TrainingConfig(train_data="x.jsonl")
    values = [R1Reward(config).score(question, said(text)).value for text in texts]
    assert all(a < b for a, b in pairwise(values)) and values[1] <= 0.1 and values[3] > 0.9
    heavier = R1TrainingConfig(train_data="x.jsonl", format_reward_weight=0.5, shaping=False)
    assert R1Reward(heavier).score(question, said("42")).value == pytest.approx(0.5)


def r1_config(guesser, tmp_path, **more) -> R1TrainingConfig:
    rows = [
        {"id": w, "instruction": w, "gold": {"answer": str(n)}, "kind": "math"}
        for n, w in enumerate(QUESTIONS)
    ]
    run = {"device": "cpu", "max_steps": 2, "lora_r": 4, "tasks_per_step": 4, "eval_steps": 1}
    given = {"model_name": str(guesser), "train_data": write(tmp_path / "sums.jsonl", rows)}
    given |= {"num_samples_per_prompt": 4, "max_response_length": 12, "settings": run | more}
    return R1TrainingConfig(prompt="{question}", **given)


def test_r1_is_grpo_with_the_monitor_on(guesser, tmp_path):
    trainer = R1StyleTrainer(r1_config(guesser, tmp_path, max_flat_steps=9), tmp_path / "run")
    settings = trainer.trainer.config
    assert (settings.group_size, settings.clip, settings.beta) == (4, 10.0, 0.001)
    trainer.train()
    rows = metrics(tmp_path / "run")
    assert len(rows) == 2 and all("hacking_rate" in row for row in rows)
    assert {"reward_correctness", "reward_format"} <= rows[0].keys()


def test_r1_steps_on_the_callers_questions(guesser, tmp_path):
    trainer = R1StyleTrainer(r1_config(guesser, tmp_path), tmp_path / "run")
    row = trainer.train_step(["n", "e"], ["1", "2"])
    assert row["samples"] == 8 and trainer.trainer.learner.steps_done == 1
    with pytest.raises(ValueError, match="zip"):
        trainer.train_step(["n"], [])


def test_the_prompt_asks_for_thoughts_and_keeps_braces(guesser, tmp_path):
    given = r1_config(guesser, tmp_path, curriculum=True).model_dump(exclude={"prompt"})
    trainer = R1StyleTrainer(R1TrainingConfig(**given), tmp_path / "run")
    assert all("<think>" in task.instruction for task in trainer.trainer.order.pick(4))
    text = trainer.put_into_prompt(Task("t", "{x} = ?")).instruction
    assert text.startswith("{x} = ?") and "<think>" in text and "\\boxed{answer}" in text


def test_an_alarm_stands_in_the_row(guesser, tmp_path, monkeypatch, capsys):
    """The reward rises and the held-out metric does not: the monitor's verdict is recorded."""
    from sharpen.rewards.hacking import Finding, HackingMonitor

    found = Finding("reward_without_progress", 0.99, "step 2: reward +0.4, held_out -0.1")
    monkeypatch.setattr(
        HackingMonitor, "update", lambda self, step, *_, **__: found if step == 2 else None
    )
    settings = r1_config(guesser, tmp_path, max_flat_steps=9)
    R1StyleTrainer(settings, tmp_path / "run").train()
    rows = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert "alarm" not in rows[0] and rows[1]["alarm"] == found.evidence
    assert "reward hacking?" in capsys.readouterr().out
