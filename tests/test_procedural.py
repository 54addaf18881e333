"""Procedural tasks: the same bytes for a name, gold is right, the splits do not meet."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from itertools import islice

import pytest

from sharpen.calls import compact_json
from sharpen.config import ConfigError
from sharpen.data.sources import read_rows, read_tasks
from sharpen.envs.toolworld import ToolWorld
from sharpen.kinds import KindEnvironment
from sharpen.models.load import ModelConfig
from sharpen.policy.local import LocalPolicy
from sharpen.rewards.verifiable import VerifiableRewardCalculator
from sharpen.rollout import rollout
from sharpen.types import Message, Sampling, SharpenError, StopReason, Trajectory, Turn
from sharpen.world.gold import gold_trajectory

ARITHMETIC = "procedural/arithmetic:train?levels=0-5&count=120&seed=3"
TOOLS = "procedural/tools:train?levels=0-5&count=20&seed=3"


def digest(name: str) -> str:
    return hashlib.sha256(b"\n".join(row.raw for row in read_rows(name))).hexdigest()[:16]


def test_a_name_gives_the_same_bytes():
    assert digest(ARITHMETIC) == "20d0de4173860c2a"
    assert digest(ARITHMETIC) != digest(ARITHMETIC.replace("seed=3", "seed=4"))
    code = f"from test_procedural import *; print(digest({TOOLS!r}))"
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    elsewhere = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True
    )
    assert digest(TOOLS) == elsewhere.stdout.strip(), elsewhere.stderr


@pytest.mark.parametrize("split", ["train", "test", "ood"])
@pytest.mark.parametrize("source", [ARITHMETIC, TOOLS.replace("count=20", "count=10")])
def test_gold_solves_and_nothing_fails(source, split):
    with VerifiableRewardCalculator() as reward:
        for task in read_tasks(source.replace("train", split)):
            gold = gold_trajectory(task)
            assert gold and reward.score(task, gold).parts["correctness"] == 1, task
            for said in ("", "I do not know."):
                turns = (Turn(Message("assistant", said)),)
                empty = Trajectory(task.id, turns, StopReason.ANSWERED)
                assert reward.score(task, empty).parts["correctness"] == 0, task


def test_arithmetic_is_right():
    for task in read_tasks(ARITHMETIC):
        expression = "".join(c for c in task.instruction if c in "0123456789+-*() ")
        assert str(eval(expression.strip())) == task.gold["answer"]
    counted = Counter(task.difficulty for task in read_tasks(ARITHMETIC))
    assert counted == {f"arithmetic {level}": 20 for level in range(6)}


def test_splits_do_not_meet():
    found = {
        split: {
            compact_json([task.gold["answer"], *numbers(task.instruction)])
            for task in read_tasks(f"procedural/arithmetic:{split}?levels=1&count=200&seed=1")
        }
        for split in ("train", "test", "ood")
    }
    assert not found["train"] & found["test"] and not found["train"] & found["ood"]
    far = [
        n
        for task in read_tasks("procedural/arithmetic:ood?count=50")
        for n in numbers(task.instruction)
    ]
    assert min(far) > 20
    tools = {
        split: {t.gold["categories"][0] for t in read_tasks(f"procedural/tools:{split}?count=12")}
        for split in ("train", "ood")
    }
    assert not tools["train"] & tools["ood"]


def numbers(text: str) -> list[int]:
    kept = "".join(c if c.isdigit() else " " for c in text)
    return [int(part) for part in kept.split()]


def test_tool_tasks_start_in_the_tool_world():
    levels = {0: 1, 1: 1, 3: 4, 5: 8}
    for level, offered in levels.items():
        for task in islice(read_tasks(f"procedural/tools:train?levels={level}&count=3"), 3):
            world = ToolWorld()
            assert len(world.reset(task).tools) == offered
            assert len(task.gold["calls"]) == (2 if level == 5 else 1)
            for call in task.gold["calls"] if level == 1 else ():
                assert task.instruction.startswith(f"Call {call['name']}")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("procedural/poetry:train", "expected procedural/arithmetic|tools:train|test|ood"),
        ("procedural/arithmetic:dev", "expected procedural/arithmetic"),
        ("procedural/arithmetic:train?levels=0-6", "levels 0-6: there are 0 to 5"),
        ("procedural/arithmetic:train?levels=3-1", "levels 3-1"),
        ("procedural/arithmetic:train?level=1", "did you mean"),
        ("procedural/arithmetic:train?count=x", "count"),
        ("procedural/arithmetic:test?count=400", "only"),
    ],
)
def test_wrong_names_are_one_line(name, said):
    with pytest.raises((SharpenError, ConfigError)) as caught:
        list(read_tasks(name))
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tokens"), [("arithmetic", 32), ("tools", 64)])
def test_a_small_model_is_right_now_and_then_at_level_0(smollm2_tokenizer, kind, tokens):
    """Without training there is something to learn from, and something left to learn."""
    policy = LocalPolicy.load(ModelConfig(base_model="smollm2-135m"))
    tasks = list(read_tasks(f"procedural/{kind}:train?count=16"))
    with VerifiableRewardCalculator() as reward:
        trajectories = rollout(policy, tasks, KindEnvironment, Sampling(tokens), max_turns=1)
        parts = [reward.score(*pair).parts for pair in zip(tasks, trajectories, strict=True)]
    right = sum(part["correctness"] for part in parts)
    print(f"{kind}: {right:g} of {len(tasks)}")
    assert 1 <= right < len(tasks)
