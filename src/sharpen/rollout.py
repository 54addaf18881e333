"""A policy walks tasks through environments, many at a time, and leaves trajectories.

What goes wrong is a `StopReason`: an environment that raises ends its own episode and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sharpen.config import ConfigError, one_line
from sharpen.tools import load_object
from sharpen.types import (
    Dialog,
    Environment,
    Message,
    Policy,
    Sampling,
    StopReason,
    Task,
    Trajectory,
    Turn,
)

ENVIRONMENTS = {
    "toolworld": ("sharpen.envs.toolworld", "ToolWorld"),
    "python": ("sharpen.envs.python", "PythonTools"),
    "math": ("sharpen.envs.math", "Mathematics"),
    "code": ("sharpen.envs.code", "Programming"),
    "sql": ("sharpen.envs.sql", "SQL"),
    "auto": ("sharpen.envs.auto", "Auto"),  # by the task
}
MakeEnvironment = Callable[[], Environment]


class OneTurn:
    """No world: the first answer ends the episode."""

    def reset(self, task: Task) -> Dialog:
        return Dialog(task.messages, task.tools, task.id, task.kind)

    def step(self, message: Message) -> tuple[tuple[Message, ...], StopReason | None]:
        return (), StopReason.ANSWERED


def find_environment(name: str) -> MakeEnvironment:
    """An environment by name, or a user's own class as `file.py:Class`; none is a single turn."""
    if not name:
        return OneTurn
    if name in ENVIRONMENTS:
        import importlib

        module, attribute = ENVIRONMENTS[name]
        return getattr(importlib.import_module(module), attribute)
    if ".py:" not in name:
        raise ConfigError(f"env {name!r}: expected {', '.join(ENVIRONMENTS)} or file.py:Class")
    found: Any = load_object(name)
    if not isinstance(found, type) or not (hasattr(found, "reset") and hasattr(found, "step")):
        raise ConfigError(f"env {name!r}: expected a class with reset(task) and step(message)")
    return found


def rollout(
    policy: Policy,
    tasks: Sequence[Task],
    make: MakeEnvironment,
    sampling: Sampling,
    max_turns: int = 8,
) -> list[Trajectory]:
    """One trajectory a task. All episodes that still go on take their next turn together."""
    episodes = [Episode(make(), task) for task in tasks]
    for _ in range(max_turns):
        going = [episode for episode in episodes if episode.stop is None]
        if not going:
            break
        turns = policy.respond([episode.dialog for episode in going], sampling)
        for episode, turn in zip(going, turns, strict=True):
            episode.take(turn)
    return [
        Trajectory(e.task.id, tuple(e.turns), e.stop or StopReason.TURNS, metadata=e.metadata)
        for e in episodes
    ]


class Episode:
    """One task in its environment."""

    def __init__(self, environment: Environment, task: Task):
        self.environment, self.task = environment, task
        self.turns: list[Turn] = []
        self.stop: StopReason | None = None
        self.metadata: dict[str, Any] = {}
        self.dialog = environment.reset(task)

    def take(self, turn: Turn) -> None:
        """Let the environment answer a turn; one that was cut off or failed ends the episode."""
        if turn.stop is not StopReason.ANSWERED:
            self.stop = turn.stop
            self.turns.append(turn)
            return
        try:
            results, self.stop = self.environment.step(turn.message)
        except Exception as error:  # the world's failure, not the model's and not the batch's
            results, self.stop = (), StopReason.ENVIRONMENT_ERROR
            self.metadata["error"] = f"{type(error).__name__}: {one_line(error)}"
        self.turns.append(replace(turn, results=results))
        added = (*self.dialog.messages, turn.message, *results)
        self.dialog = replace(self.dialog, messages=added)
