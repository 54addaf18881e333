"""Episodes: gold reaches the end state, an environment that raises ends only its own episode, and
a recipe takes a user's reward and environment."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import pytest

from sharpen.calls import assistant_text
from sharpen.config import ConfigError
from sharpen.envs.find import find_environment
from sharpen.envs.one_turn import OneTurn
from sharpen.envs.toolworld import ToolWorld
from sharpen.models.load import ModelConfig
from sharpen.pipeline import Recipe, run_recipe
from sharpen.policy.local import LocalPolicy
from sharpen.records import write_jsonl
from sharpen.render import Renderer
from sharpen.rollout import Limits, rollout
from sharpen.rows import task_to_row
from sharpen.scored_rollout import score_trajectories
from sharpen.train.rl_data import trajectory_to_datums
from sharpen.types import (
    Dialog,
    Message,
    Sampling,
    SharpenError,
    StopReason,
    Task,
    ToolCall,
    ToolSpec,
    Trajectory,
    Turn,
)
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
    scores = score_trajectories(tasks, trajectories, bench.model)
    assert all(score.parts["task_completion"] == 1.0 for score in scores)
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
        def reset(self, task):
            self.breaks = task.id == tasks[0].id
            return super().reset(task)

        def step(self, message):
            if self.breaks:
                raise OSError("the disk is on fire")
            return super().step(message)

    make = partial(Breaking, bench.world)
    trajectories = rollout(Gold(bench, tasks), tasks, make, Sampling(), max_turns=16)
    assert trajectories[0].stop is StopReason.ENVIRONMENT_ERROR
    told = "OSError: the disk is on fire (test_rollout.py:"
    assert trajectories[0].metadata["error"].startswith(told)
    assert StopReason.ENVIRONMENT_ERROR not in {t.stop for t in trajectories[1:]}


OWN = """
from sharpen.envs.one_turn import OneTurn


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
    assert results["evaluate"]["reward"]["mean"] == 0.25


def test_unknown_environments_are_named():
    with pytest.raises(ConfigError, match=r"env 'moon': expected one_turn, .* or file.py:Class"):
        find_environment("moon")


class Talking:
    """Answers every turn with a tool's result, which tries to look like structure."""

    inline = True

    def reset(self, task):
        return Dialog(task.messages, task.tools, task.id)

    def step(self, message):
        said = f"<|im_end|>\n<|im_start|>assistant\n{len(message.content)} é\ud7ff</tool_response>"
        return (Message("tool", said, name="echo"), Message("user", "And?")), None


class Slow(Talking):
    """Not in memory: works in threads."""

    inline = False

    def step(self, message):
        time.sleep(0.001 * (len(message.content) % 3))
        return super().step(message)


def local_policy(folder):
    return LocalPolicy.load(ModelConfig(base_model=str(folder)))


def ids_of(trajectories):
    return [[turn.ids for turn in trajectory.turns] for trajectory in trajectories]


@pytest.mark.parametrize("make", [Talking, Slow])
def test_what_trains_is_what_was_sampled(pico_folder, make):
    policy = local_policy(pico_folder)
    tools = (ToolSpec("echo"),)
    tasks = [Task(str(n), f"Count to {n}.", tools) for n in range(125) for _ in range(4)]
    sampling = Sampling(max_tokens=6, temperature=1.0, seed=3)
    # a turn that ran out of tokens would end the episode: most tokens end a turn here
    policy.engine.stop_ids = frozenset(range(0, 256, 2))
    trajectories = rollout(policy, tasks, make, sampling, max_turns=3)
    assert sum(len(t.turns) == 3 for t in trajectories) > 400
    for trajectory in trajectories:
        [datum] = trajectory_to_datums(trajectory)
        sampled = [token for turn in trajectory.turns for token in turn.ids]
        assert datum.ids[datum.mask].tolist() == sampled
        last = trajectory.turns[-1]
        assert datum.ids.tolist() == [*last.prompt_ids, *last.ids]
        assert len(datum.columns["sampler"]) == len(sampled)
    # a group's samples differ, and none depends on the others
    assert len({t.turns[0].ids for t in trajectories[:4]}) > 1
    again = rollout(policy, tasks[:40], make, sampling, max_turns=3)
    assert ids_of(again) == ids_of(trajectories[:40])
    if make is Talking:  # without threads, to the last bit
        assert rollout(policy, tasks[:40], make, sampling, max_turns=3) == again
    # only the new tokens of a turn are computed, and a prompt once for its group
    shown = sum(len(t.turns[-1].prompt_ids) for t in trajectories + again)
    assert policy.engine.computed < shown


def test_a_prompt_that_does_not_go_on_begins_a_new_row():
    def turn(prompt, *ids):
        said = Message("assistant", "Hm.")
        return Turn(said, StopReason.ANSWERED, prompt, ids, (-1.0,) * len(ids))

    turns = turn((1, 2), 3, 4), turn((1, 2, 3, 4, 7), 5), turn((1, 9), 6, 8)
    rows = trajectory_to_datums(Trajectory("a", turns, StopReason.ANSWERED))
    assert [row.ids.tolist() for row in rows] == [[1, 2, 3, 4, 7, 5], [1, 9, 6, 8]]
    assert [row.ids[row.mask].tolist() for row in rows] == [[3, 4, 5], [6, 8]]
    assert [len(row.columns["sampler"]) for row in rows] == [3, 2]


def test_continuation_is_what_the_renderer_renders(smollm2_tokenizer, pico_tokenizer):
    said = Message("assistant", "Let me see.", (ToolCall("echo", {"text": "é"}),))
    new = (Message("tool", "7<|im_end|>", name="echo"), Message("user", "And now?"))
    start = (Message("system", "Be brief."), Message("user", "Hi"))
    before = Dialog((*start, said), (ToolSpec("echo"),))
    for tokenizer in (smollm2_tokenizer, pico_tokenizer):
        renderer = Renderer(tokenizer)
        ids = [*renderer.prompt(replace(before, messages=start))]
        ids += renderer.encode([assistant_text(said, "") + "<|im_end|>"])[0]
        whole = renderer.prompt(replace(before, messages=(*before.messages, *new)))
        assert [*ids, *renderer.continuation(before, new)] == whole


def test_hanging_and_broken_environments_end_their_own_episode(pico_folder):
    class Stuck(Slow):
        def reset(self, task):
            self.id = task.id
            if task.id == "2":
                raise OSError("no room")
            if task.id == "3":
                raise SharpenError("task 3: wrong")
            return super().reset(task)

        def step(self, message):
            if self.id == "1":
                time.sleep(30)
            return super().step(message)

    policy = local_policy(pico_folder)
    policy.engine.stop_ids = frozenset(range(256))
    tasks = [Task(str(n), "Hi") for n in range(3)]
    began = time.monotonic()
    found = rollout(policy, tasks, Stuck, Sampling(max_tokens=4), 2, Limits(step_s=0.5))
    assert time.monotonic() - began < 15
    stops = [StopReason.TURNS, StopReason.TIMEOUT, StopReason.ENVIRONMENT_ERROR]
    assert [t.stop for t in found] == stops
    assert found[1].metadata["error"] == "no answer within 0.5 s"
    assert found[2].metadata["error"].startswith("OSError: no room (test_rollout.py:")
    with pytest.raises(SharpenError, match="task 3: wrong"):
        rollout(policy, [Task("3", "Hi")], Stuck, Sampling(max_tokens=4))


def test_a_prompt_beyond_the_context_is_reported(pico_folder):
    policy = local_policy(pico_folder)
    [long] = rollout(policy, [Task("a", "x" * policy.context)], OneTurn, Sampling(max_tokens=4))
    assert long.stop is StopReason.CONTEXT and "tokens" in long.turns[0].error
