"""A policy walks tasks through environments, many at a time, and leaves trajectories.

What goes wrong is a `StopReason`: an environment that raises or hangs ends its own episode and no
other. An environment with `inline = True` is quick and in memory; others work in threads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

from sharpen import types
from sharpen.config import ConfigError, raised
from sharpen.tools import call_with_limit, load_object
from sharpen.types import Dialog, Message, Sampling, StopReason, Task, TokenPolicy, Trajectory, Turn

ENVIRONMENTS = {
    "toolworld": ("sharpen.envs.toolworld", "ToolWorld"),
    "python": ("sharpen.envs.python", "PythonTools"),
    "math": ("sharpen.envs.math", "Mathematics"),
    "code": ("sharpen.envs.code", "Programming"),
    "sql": ("sharpen.envs.sql", "SQL"),
    "auto": ("sharpen.envs.auto", "Auto"),  # by the task
}
MakeEnvironment = Callable[[], types.Environment]
THREADS = 64  # environments at work at once, of those that are not `inline`


class OneTurn:
    """No world: the first answer ends the episode."""

    inline = True

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


@dataclass(frozen=True, slots=True)
class Limits:
    """Of time, for environments that are not `inline`."""

    step_s: float = 60.0  # for what is done with one turn
    episode_s: float = 3600.0


LIMITS = Limits()


def rollout(
    policy: types.Policy | TokenPolicy,
    tasks: Sequence[Task],
    make: MakeEnvironment,
    sampling: Sampling,
    max_turns: int = 8,
    limits: Limits = LIMITS,
) -> list[Trajectory]:
    """One trajectory a task; the same task several times is a group of samples. A token policy goes
    on from the ids it sampled, and every turn of every episode has a seed of its own."""
    episodes = [EpisodeRunner(make, task, max_turns, limits) for task in tasks]
    walk = walk_by_ids if isinstance(policy, TokenPolicy) else walk_by_text
    with ThreadPoolExecutor(min(THREADS, len(tasks) or 1), "environment") as pool:
        walk(policy, episodes, sampling, pool)
    return [episode.trajectory() for episode in episodes]


def walk_by_text(
    policy: Any, episodes: Sequence[EpisodeRunner], sampling: Sampling, pool: Any
) -> None:
    """All episodes that still go on take their next turn together."""
    while going := [episode for episode in episodes if episode.stop is None]:
        turns = policy.respond([episode.dialog for episode in going], sampling)
        list(pool.map(EpisodeRunner.take, going, turns))


def walk_by_ids(
    policy: Any, episodes: Sequence[EpisodeRunner], sampling: Sampling, pool: Any
) -> None:
    """Each episode goes on as soon as it can, whatever the others do. No more are under way than
    the policy has rows for; one that ends leaves its place, the policy's key, to the next."""
    policy.forget()
    waiting = deque(number for number, episode in enumerate(episodes) if episode.stop is None)
    places: dict[int, int] = {}  # place → number of its episode
    stepping: dict[Any, int] = {}  # environments at work → place
    prompts: dict[int, tuple[Dialog, list[int]]] = {}  # of a group, one

    def go_on(place: int) -> None:
        """The next turn of the episode at a place, or the first of the next one."""
        while episodes[places[place]].stop is not None:
            if not waiting:
                return
            begin(place)
        number, episode = places[place], episodes[places[place]]
        own = replace(sampling, seed=(sampling.seed << 20 | number) << 10 | len(episode.turns))
        policy.submit(place, episode.prompt, own, episode.dialog.tools)

    def begin(place: int) -> None:
        episode = episodes[waiting[0]]
        known = prompts.get(id(episode.task))
        if known is None or known[0] != episode.dialog:
            known = episode.dialog, policy.renderer.prompt(episode.dialog)
            prompts[id(episode.task)] = known
        episode.prompt, places[place] = known[1], waiting.popleft()

    for place in range(min(policy.rows, len(waiting))):
        begin(place)
        go_on(place)
    while stepping or not policy.idle:
        for place, sampled in policy.advance():
            episode = episodes[places[place]]
            if episode.inline:
                episode.take_ids(policy.renderer, sampled)
                go_on(place)
            else:
                stepping[pool.submit(episode.take_ids, policy.renderer, sampled)] = place
        if stepping:
            for future in wait(stepping, None if policy.idle else 0, FIRST_COMPLETED).done:
                future.result()
                go_on(stepping.pop(future))


class EpisodeRunner:
    """One task in its environment."""

    def __init__(self, make: MakeEnvironment, task: Task, max_turns: int, limits: Limits):
        self.task, self.max_turns, self.limits = task, max_turns, limits
        self.started = time.monotonic()
        self.turns: list[Turn] = []
        self.stop: StopReason | None = None
        self.metadata: dict[str, Any] = {}
        self.prompt: list[int] = []
        self.dialog = Dialog(task.messages, task.tools, task.id, task.kind)
        self.environment: Any = None
        self.inline = True
        try:
            self.environment = make()
            self.inline = getattr(self.environment, "inline", False)
            self.dialog = self.environment.reset(task)
        except types.SharpenError:
            raise  # the task is wrong, and says where
        except Exception as error:
            self.fail(StopReason.ENVIRONMENT_ERROR, error)

    def take_ids(self, renderer: Any, sampled: types.Sampled) -> None:
        """`take` what was sampled; the next prompt goes on from its ids."""
        message = renderer.parse(sampled.ids)
        prompt, ids = tuple(self.prompt), sampled.ids
        self.take(Turn(message, sampled.stop, prompt, ids, sampled.logprobs, error=sampled.error))
        if self.stop is None:
            results = self.turns[-1].results
            count = len(self.dialog.messages) - len(results)
            before = replace(self.dialog, messages=self.dialog.messages[:count])
            try:
                self.prompt = [*prompt, *ids, *renderer.continuation(before, results)]
            except types.RowError as error:  # what was said cannot be gone on from
                self.fail(StopReason.POLICY_ERROR, error)

    def take(self, turn: Turn) -> None:
        """Let the environment answer a turn; one that was cut off or failed ends the episode."""
        if turn.stop is not StopReason.ANSWERED:
            self.stop = turn.stop
            self.turns.append(turn)
            return
        results, self.stop = self.answer(turn.message)
        self.turns.append(replace(turn, results=results))
        added = (*self.dialog.messages, turn.message, *results)
        self.dialog = replace(self.dialog, messages=added)
        if self.stop is None and len(self.turns) >= self.max_turns:
            self.stop = StopReason.TURNS
        if self.stop is None and time.monotonic() - self.started > self.limits.episode_s:
            self.fail(StopReason.TIMEOUT, f"the episode took over {self.limits.episode_s:g} s")

    def answer(self, message: Message) -> tuple[tuple[Message, ...], StopReason | None]:
        """What the environment says; its failure is not the model's and not the batch's."""
        try:
            if self.inline:
                return self.environment.step(message)
            given, limit = {"message": message}, self.limits.step_s
            found = call_with_limit(self.environment.step, given, limit)
            if isinstance(found, TimeoutError):
                return (), self.fail(StopReason.TIMEOUT, f"no answer within {limit:g} s")
            if isinstance(found, BaseException):
                raise found
            return found
        except Exception as error:  # a user's code may raise anything; the episode says what
            return (), self.fail(StopReason.ENVIRONMENT_ERROR, error)

    def fail(self, stop: StopReason, reason: Any) -> StopReason:
        if isinstance(reason, Exception):
            reason = raised(reason)
        self.stop, self.metadata["error"] = stop, reason
        return stop

    def trajectory(self) -> Trajectory:
        stop = self.stop or StopReason.TURNS
        return Trajectory(self.task.id, tuple(self.turns), stop, metadata=self.metadata)
