"""Episodes: gold reaches the end state, an environment that raises ends only its own episode, and
a recipe takes a user's reward and environment."""

from __future__ import annotations

from functools import partial

import pytest

from sharpen.config import ConfigError
from sharpen.envs.toolworld import ToolWorld
from sharpen.evals.evaluator import evaluate
from sharpen.pipeline import Recipe, run_recipe
from sharpen.records import write_jsonl
from sharpen.rollout import find_environment, rollout
from sharpen.rows import task_to_row
from sharpen.types import Message, Sampling, StopReason, Task, Turn
from test_agent_reward import Bench


class Gold:
    """Says what gold says, turn by turn."""

    def __init__(self, bench, tasks):
        self.turns = {task.id: bench.gold(task).turns for task in tasks}

    def respond(self, dialogs, sampling):
        done = [sum(m.role == "assistant" for m in d.messages) for d in dialogs]
        said = [self.turns[d.id] for d in dialogs]
        return [
            Turn(turns[n].message if n < len(turns) else Message("assistant", "Done."))
            for n, turns in zip(done, said, strict=True)
        ]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("bench"))


def test_gold_walks_to_the_end_state(bench):
    tasks = [t for t in bench.acting if not t.context and "faults" not in t.gold][:12]
    policy, make = Gold(bench, tasks), partial(ToolWorld, bench.world)
    trajectories = rollout(policy, tasks, make, Sampling(), max_turns=16)
    assert {t.stop for t in trajectories} == {StopReason.ANSWERED}
    found = evaluate(policy, tasks, bench.model, Sampling(), "t", make, 16)
    assert found.figures["task_completion"].mean == 1.0
    short = rollout(policy, tasks, make, Sampling(), max_turns=1)
    assert StopReason.TURNS in {t.stop for t in short}


def test_the_end_state_is_verifiable(bench):
    from dataclasses import replace

    from sharpen.rewards.verifiable import VerifiableRewardCalculator

    task = bench.acting[0]
    gold, empty = bench.gold(task), replace(bench.gold(task), turns=())
    with VerifiableRewardCalculator("tool_state") as reward:
        state = replace(task, kind="tool_state")
        assert reward.score(state, gold).value == 1.0
        assert reward.score(state, empty).value == 0.0


def test_an_environment_that_raises_ends_its_own_episode(bench):
    tasks = bench.acting[:4]

    class Breaking(ToolWorld):
        def step(self, message):
            if self.task.id == tasks[0].id:
                raise OSError("the disk is on fire")
            return super().step(message)

    make = partial(Breaking, bench.world)
    trajectories = rollout(Gold(bench, tasks), tasks, make, Sampling(), max_turns=16)
    assert trajectories[0].stop is StopReason.ENVIRONMENT_ERROR
    assert trajectories[0].metadata["error"] == "OSError: the disk is on fire"
    assert StopReason.ENVIRONMENT_ERROR not in {t.stop for t in trajectories[1:]}


OWN = """
from sharpen.rollout import OneTurn


class World(OneTurn):
    def reset(self, task):
        return super().reset(task)


def score(task, trajectory):
    return {"value": 0.25, "breakdown": {"turns": len(trajectory.turns)}}
"""


def test_a_recipe_takes_a_users_reward_and_environment(pico_folder, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    write_jsonl(tmp_path / "tasks.jsonl", [task_to_row(Task("a", "Say hello."))])
    stage = {"stage": "evaluate", "model": str(pico_folder), "tasks": str(tmp_path / "tasks.jsonl")}
    stage |= {"reward": f"{tmp_path / 'own.py'}:score", "env": f"{tmp_path / 'own.py'}:World"}
    recipe = Recipe(name="own", stages=[{**stage, "max_tokens": 4}])
    results = run_recipe(recipe, tmp_path / "run", say=lambda text: None)
    assert results["evaluate"]["value"]["mean"] == 0.25


def test_unknown_environments_are_named():
    with pytest.raises(ConfigError, match=r"env 'moon': expected toolworld, .* or file.py:Class"):
        find_environment("moon")
