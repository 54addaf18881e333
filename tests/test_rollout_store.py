"""Every scored trajectory of a run is stored within a bounded size, and can be browsed on the
run's page."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from guessing import QUESTIONS, tasks
from sharpen.report.rollouts import read_rollouts, rollout_files, step_of_file
from sharpen.report.runs import write_report
from sharpen.scored_rollout import TrajectoryGroup
from sharpen.train.grpo import GRPOTrainer
from sharpen.train.rollout_store import RolloutStore
from sharpen.types import Message, Score, SharpenError, StopReason, Task, Trajectory, Turn
from test_grpo import config


def group(text: str, count: int = 2) -> TrajectoryGroup:
    """Samples whose ids do not compress."""
    chance, samples = np.random.default_rng(len(text)), []
    for _ in range(count):
        ids = tuple(chance.integers(0, 1 << 30, 2000).tolist())
        turn = Turn(Message("assistant", text), prompt_ids=(1, 2), ids=ids, logprobs=(-0.1234567,))
        score = Score(0.5, {"half": 0.5})
        samples.append(Trajectory("t", (turn,), StopReason.ANSWERED, score))
    return TrajectoryGroup(Task("t", "Say it."), samples, np.full(count, 0.25))


def test_a_run_stores_its_samples_and_its_page_shows_them(guesser, tmp_path):
    data = tasks(tmp_path)
    GRPOTrainer(config(guesser, data, max_steps=2), tmp_path / "run").train()
    rows = list(read_rollouts(tmp_path / "run"))
    assert [row["step"] for row in rows] == [2] * 16 + [1] * 16
    assert {row["task"] for row in rows} == set(QUESTIONS)
    for row in rows:
        (turn,) = row["turns"]
        assert turn["prompt_ids"] and len(turn["ids"]) == len(turn["logprobs"]) > 0
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        assert row["messages"][0]["content"] == row["instruction"]
        assert row["solved"] == (row["parts"]["correctness"] == 1)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    for row in metrics:
        rewards = [sample["reward"] for sample in rows if sample["step"] == row["step"]]
        assert np.mean(rewards) == pytest.approx(row["reward"])
    lively = [row for row in rows if "advantage" in row]
    assert lively and sum(row["advantage"] for row in lively) == pytest.approx(0, abs=1e-3)
    page = write_report(tmp_path / "run").read_text()
    assert page.index("step 2: 4 tasks, mean reward") < page.index("step 1: 4 tasks")
    assert len(re.findall("task [nesw]: . of 4 solved", page)) == 8
    assert page.count("<summary>reward ") == 32


def test_the_size_is_bounded_and_the_oldest_go_first(tmp_path):
    store = RolloutStore(tmp_path, 1)
    for step in range(1, 10):
        store.write(step, [group(f"step {step}", 20)], [None])
    steps = [step_of_file(path) for path in rollout_files(tmp_path)]
    assert steps == list(range(10 - len(steps), 10)) and 1 < len(steps) < 9
    assert sum(path.stat().st_size for path in rollout_files(tmp_path)) <= 1 << 20
    store.write(10, [group("far too long", 400)], [None])
    assert [step_of_file(path) for path in rollout_files(tmp_path)] == [10]  # the newest stays
    assert len(list(read_rollouts(tmp_path, 3))) == 3


def test_what_a_checkpoint_does_not_hold_is_taken_back(tmp_path):
    store = RolloutStore(tmp_path, 1)
    for step in (1, 2, 3):
        store.write(step, [group("x")], [np.array([1.0, -1.0])])
    store.rewind(1)
    assert [row["step"] for row in read_rollouts(tmp_path)] == [1, 1]
    assert [row["advantage"] for row in read_rollouts(tmp_path)] == [1, -1]


def test_odd_texts_and_nothing_at_all(tmp_path):
    store = RolloutStore(tmp_path, 1)
    store.write(1, [group("half \ud800 of a pair")], [None])
    (first, _) = read_rollouts(tmp_path)
    assert first["messages"][1]["content"] == "half ? of a pair"
    RolloutStore(tmp_path / "none", 0).write(1, [group("x")], [None])
    assert not (tmp_path / "none").exists() and not list(read_rollouts(tmp_path / "none"))
    rollout_files(tmp_path)[0].write_bytes(b"no gzip")
    with pytest.raises(SharpenError, match=r"step-000001.jsonl.gz: cannot be read"):
        list(read_rollouts(tmp_path))
