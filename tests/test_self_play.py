"""Self-play: proposals count once they were executed, and pay where the solver passes half the
time; a real pico plays both roles."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext

import pytest

import sharpen.train.online as online
from sharpen.models.load import ModelConfig
from sharpen.policy.local import LocalPolicy
from sharpen.records import write_jsonl
from sharpen.rollout import rollout
from sharpen.rows import task_to_row
from sharpen.train.config.grpo import GRPOConfig
from sharpen.train.group_source import LocalGroupSource
from sharpen.train.grpo import GRPOTrainer
from sharpen.train.self_play import PROPOSE, SelfPlay
from sharpen.types import (
    Message,
    Sampling,
    Score,
    SharpenError,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
    Turn,
)
from sharpen.world.episode import shipped_world
from sharpen.world.phrases import speak_value
from sharpen.world.state import seeded_rng


class Solver:
    """Says `answers` in turn, whatever it is asked."""

    def __init__(self, *answers: str):
        self.answers, self.asked = answers, 0

    def respond(self, dialogs, sampling):
        said = [self.answers[(self.asked + i) % len(self.answers)] for i in range(len(dialogs))]
        self.asked += len(dialogs)
        return [Turn(Message("assistant", text)) for text in said]


PROGRAMS = Task("p", "Write a program.", kind=PROPOSE)


def said(message: Message | str) -> Trajectory:
    message = Message("assistant", message) if isinstance(message, str) else message
    return Trajectory("p", (Turn(message),), StopReason.ANSWERED)


def block(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```"


@pytest.mark.parametrize(
    ("answers", "value"),
    [
        (("42", "41"), 1.0),
        (("42", "41", "40", "7"), 0.5),
        (("42",), 0.0),
        (("no idea",), 0.0),
        (("It is \\boxed{42}", "The answer is 7."), 1.0),
    ],
)
def test_a_program_pays_where_the_solver_passes_half_the_time(answers, value):
    play = SelfPlay(Solver(*answers), Sampling())
    found = play.score(PROGRAMS, said(block("print(6 * 7)")))
    assert found.value == value and found.parts["valid"] == 1
    learnable = play.learnable()
    assert bool(learnable) == (0 < found.parts["pass_rate"] < 1)
    for task in learnable:
        assert task.gold == {"answer": "42"} and "print(6 * 7)" in task.instruction
        assert play.score(task, said("42")).parts["correctness"] == 1
        assert play.score(task, said("")).value == 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no program"),
        ("I would rather not.", "no program"),
        (block("print("), "not a program"),
        (block("import random\nprint(random.random())"), "it imports something"),
        (block("print(object())"), "something else each time"),
        (block("print(hash('x') % 2)"), "it uses hash"),
        (block("1 / 0"), "it fails: .*ZeroDivisionError"),
        (block("x = 1"), "does not print one line"),
        (block("print(1)\nprint(2)"), "does not print one line"),
        (block("print(1)  #" + "x" * 1000), "no program"),
    ],
)
def test_what_cannot_be_verified_is_worth_nothing(text, why):
    solver = Solver("1", "2")
    play = SelfPlay(solver, Sampling())
    found = play.score(PROGRAMS, said(text))
    assert found.value == 0 and re.search(why, found.feedback), found.feedback
    assert not solver.asked and not play.verified


def test_a_second_time_is_worth_nothing():
    play = SelfPlay(Solver("3", "4"), Sampling())
    assert play.score(PROGRAMS, said(block("print(1 + 2)"))).value == 1
    again = play.score(PROGRAMS, said(block("# other words\nprint(1+2)")))
    assert (again.value, again.feedback) == (0, "proposed before")
    other = SelfPlay(Solver("3", "4"), Sampling())
    other.load_state(json.loads(json.dumps(play.state())))
    assert other.score(PROGRAMS, said(block("print(1 + 2)"))).value == 0
    assert other.learnable() == play.learnable() and len(other.learnable()) == 1
    assert "This one was right" in other.propose(1)[0].instruction


def tool_proposal(play: SelfPlay) -> tuple[Task, ToolCall]:
    """A proposer's task and a call that succeeds in its episode."""
    world = shipped_world()
    for task in play.propose(40):
        episode = world.episode(task.gold["categories"], task.gold["seed"]) if task.tools else None
        for spec in task.tools:
            tool = world.tool(spec.name)
            call = episode.sample(tool, seeded_rng("t", task.id)) if episode else None
            if call and call.arguments:
                return task, call
    raise AssertionError("no tool can be called")


def test_calls_are_proposed_executed_and_solved_in_the_tool_world():
    play = SelfPlay(Solver("done"), Sampling())
    task, call = tool_proposal(play)
    request = f"Please do it: {speak_value(call.arguments)}."

    class Caller(Solver):
        def respond(self, dialogs, sampling):
            right = Message("assistant", tool_calls=(call,))
            turns = super().respond(dialogs, sampling)
            first = [len(d.messages) == 1 and i % 2 == 0 for i, d in enumerate(dialogs)]
            return [Turn(right) if f else t for f, t in zip(first, turns, strict=True)]

    play.solver = Caller("done")
    wrong = {
        "not a request": Message("assistant", request),
        "a call fails": Message("assistant", request, (ToolCall("no_such_tool", {}),)),
        "does not say": Message("assistant", "Please do it.", (call,)),
    }
    for why, message in wrong.items():
        found = play.score(task, said(message))
        assert found.value == 0 and why in found.feedback
    found = play.score(task, said(Message("assistant", request, (call,))))
    assert found.value == 1 and found.parts["pass_rate"] == 0.5
    (made,) = play.learnable()
    assert (made.kind, made.tools, made.instruction) == ("tool_state", task.tools, request)


def test_a_solver_that_is_gone_says_nothing_about_a_task():
    class Gone(Solver):
        def respond(self, dialogs, sampling):
            return [Turn(Message("assistant"), StopReason.POLICY_ERROR) for _ in dialogs]

    play = SelfPlay(Gone(), Sampling())
    with pytest.raises(SharpenError, match="the solver never answered: policy_error"):
        play.score(PROGRAMS, said(block("print(1 + 2)")))
    assert not play.verified


def test_prompts_follow_from_the_seed_and_go_on():
    one, two = SelfPlay(Solver("x"), Sampling()), SelfPlay(Solver("x"), Sampling())
    first = one.propose(4)
    assert first == [*two.propose(2), *two.propose(2)]
    assert one.propose(2) != first[:2] and {task.kind for task in first} == {PROPOSE}
    assert [bool(task.tools) for task in first] == [False, True, False, True]
    assert SelfPlay(Solver("x"), Sampling(), seed=1).propose(4) != first


def test_a_pico_plays_both_roles_in_one_loop(pico_folder):
    """One rollout over prompts and proposed tasks alike, one reward for both."""
    pico = LocalPolicy.load(ModelConfig(base_model=str(pico_folder)))
    play = SelfPlay(pico, Sampling(8, 1.0), samples=2)
    assert play.score(PROGRAMS, said(block("print(6 * 7)"))).value == 0  # pico knows nothing
    (known,) = [task for task, _ in play.verified.values()]
    tasks = [*play.propose(2), known]
    trajectories = rollout(pico, tasks, play.make_environment, Sampling(16, 1.0), 3)
    scores = [play.score(task, t) for task, t in zip(tasks, trajectories, strict=True)]
    assert [score.value for score in scores[:2]] == [0, 0] and scores[2].value < 0.9
    assert all(turn.ids for t in trajectories for turn in t.turns)


class Odd:
    def score(self, task, trajectory):
        return Score(len(trajectory.turns[-1].message.content) % 2)


def both_roles(pico_folder, folder, steps, monkeypatch):
    """A step has one proposal, then a task of the file or a proposed one; what pico cannot write is
    put into its mouth once a step."""

    class Helped(SelfPlay):
        def score(self, task, trajectory):
            if task.kind == PROPOSE and len(self.verified) < self.proposed:
                super().score(task, said(block(f"print({self.proposed} * 7)")))
            return super().score(task, trajectory)

    monkeypatch.setattr(online, "SelfPlay", Helped)
    config = GRPOConfig(
        base_model=str(pico_folder), train_data=str(folder.parent / "tasks.jsonl"), device="cpu",
        full=True, max_steps=4, tasks_per_step=4, group_size=4, max_tokens=8, self_play=0.25,
        save_steps=1,
    )  # fmt: skip
    trainer = GRPOTrainer(config, folder, Odd())
    asked, take_next = list[str](), LocalGroupSource.next

    def watched(source, step):
        if steps and len(asked) == steps:
            raise KeyboardInterrupt
        sampled = take_next(source, step)
        asked.append(" ".join(f"{group.task.kind}:{group.task.id}" for group in sampled.groups))
        return sampled

    monkeypatch.setattr(LocalGroupSource, "next", watched)
    with pytest.raises(KeyboardInterrupt) if steps else nullcontext():
        trainer.train()
    monkeypatch.setattr(LocalGroupSource, "next", take_next)
    assert trainer.self_play
    return asked, trainer.self_play.state()


def test_grpo_trains_both_roles_and_goes_on_where_it_stopped(pico_folder, tmp_path, monkeypatch):
    known = [Task(f"k{n}", "Say something.", gold={"answer": "42"}, kind="exact") for n in range(4)]
    write_jsonl(tmp_path / "tasks.jsonl", map(task_to_row, known))
    whole, state = both_roles(pico_folder, tmp_path / "whole", 0, monkeypatch)
    first, _ = both_roles(pico_folder, tmp_path / "cut", 2, monkeypatch)
    rest, again = both_roles(pico_folder, tmp_path / "cut", 0, monkeypatch)
    assert first + rest == whole and again == state
    assert all(step.count(f"{PROPOSE}:") == 1 for step in whole) and state["proposed"] == 4
    assert "exact:play-" in " ".join(whole)  # the solver's own


@pytest.mark.parametrize(
    ("more", "why"), [({"env": "math"}, "leave env out"), ({"async_steps": 1}, "async_steps")]
)
def test_what_self_play_cannot_be_mixed_with(pico_folder, tmp_path, more, why):
    write_jsonl(tmp_path / "tasks.jsonl", [task_to_row(Task("k", "Say something."))])
    with pytest.raises((SharpenError, ValueError), match=why):
        GRPOTrainer(
            GRPOConfig(
                base_model=str(pico_folder), train_data=str(tmp_path / "tasks.jsonl"),
                self_play=0.5, **more,
            )
        )  # fmt: skip
