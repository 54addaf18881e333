"""Rollouts: a policy plays tasks in their environments, many at a time.

`rollout` returns one `Trajectory` per task. Training, evaluation, pair sampling and self-play call
it through `scored_rollout`. Whatever goes wrong in an episode becomes the `StopReason` of that
episode: an environment that raises or hangs ends its own episode and no other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

from sharpen.config import format_exception
from sharpen.kinds import turn_limit
from sharpen.tools import call_with_limit
from sharpen.types import (
    Dialog,
    MakeEnvironment,
    Message,
    Policy,
    RowError,
    Sampled,
    Sampling,
    SharpenError,
    StopReason,
    Task,
    TokenPolicy,
    Trajectory,
    Turn,
)

_MAX_THREADS = 64  # environments at work at once, of those that are not `inline`
_TURN_BITS = 10  # an episode's seed has this many bits for the turn number
_EPISODE_BITS = 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits of environments that work in threads (those without `inline = True`)."""

    step_s: float = 60.0  # for the environment's answer to one turn
    episode_s: float = 3600.0


def rollout(
    policy: Policy | TokenPolicy,
    tasks: Sequence[Task],
    make_environment: MakeEnvironment,
    sampling: Sampling,
    max_turns: int = 0,
    limits: Limits | None = None,
) -> list[Trajectory]:
    """Returns one trajectory per task, in order; the same task several times is a group of samples.

    `max_turns` of 0 takes each task's own limit, from its kind. A token policy continues from the
    ids that it sampled. Every turn of every episode has a seed of its own.
    """
    limits = limits or Limits()
    episodes = [_EpisodeRunner(make_environment, task, max_turns, limits) for task in tasks]
    threads = min(_MAX_THREADS, len(tasks) or 1)
    with ThreadPoolExecutor(threads, "environment") as pool:
        if isinstance(policy, TokenPolicy):
            _RolloutByIds(policy, episodes, sampling, pool).run()
        else:
            _roll_out_by_text(policy, episodes, sampling, pool)
    return [episode.trajectory() for episode in episodes]


def _roll_out_by_text(
    policy: Policy,
    episodes: Sequence[_EpisodeRunner],
    sampling: Sampling,
    pool: ThreadPoolExecutor,
) -> None:
    """All unfinished episodes take their next turn together, until none is left."""
    while True:
        unfinished = [episode for episode in episodes if episode.stop is None]
        if not unfinished:
            return
        turns = policy.respond([episode.dialog for episode in unfinished], sampling)
        list(pool.map(_EpisodeRunner.take_turn, unfinished, turns))


class _RolloutByIds:
    """Plays episodes with a token policy; each continues as soon as it can.

    No more episodes are under way than the policy has rows for. An episode holds a place (the
    policy's key); when it ends, the next waiting episode takes the place over.
    """

    def __init__(
        self,
        policy: TokenPolicy,
        episodes: Sequence[_EpisodeRunner],
        sampling: Sampling,
        pool: ThreadPoolExecutor,
    ):
        self.policy = policy
        self.episodes = episodes
        self.sampling = sampling
        self.pool = pool
        unfinished = [number for number, e in enumerate(episodes) if e.stop is None]
        self.waiting = deque(unfinished)
        self.episode_at: dict[int, int] = {}  # place → number of its episode
        self.place_of: dict[Future[None], int] = {}  # environments at work → place
        # task object → its dialog and prompt: the samples of a group render it once
        self.prompts: dict[int, tuple[Dialog, list[int]]] = {}

    def run(self) -> None:
        """Play every episode to its end."""
        self.policy.forget()
        for place in range(min(self.policy.rows, len(self.waiting))):
            self._start_next_episode(place)
            self._submit_next_turn(place)
        while self.place_of or not self.policy.idle:
            for place, sampled in self.policy.advance():
                self._take_turn(place, sampled)
            if self.place_of:
                self._continue_after_environments()

    def _start_next_episode(self, place: int) -> None:
        """Give a place to the next waiting episode."""
        number = self.waiting.popleft()
        episode = self.episodes[number]
        known = self.prompts.get(id(episode.task))
        if known is None or known[0] != episode.dialog:
            known = (episode.dialog, self.policy.renderer.prompt(episode.dialog))
            self.prompts[id(episode.task)] = known
        episode.prompt = known[1]
        self.episode_at[place] = number

    def _submit_next_turn(self, place: int) -> None:
        """Ask for the next turn of the place's episode, or for the first of a waiting one."""
        while self.episodes[self.episode_at[place]].stop is not None:
            if not self.waiting:
                return
            self._start_next_episode(place)
        number = self.episode_at[place]
        episode = self.episodes[number]
        episode_seed = self.sampling.seed << _EPISODE_BITS | number
        turn_seed = episode_seed << _TURN_BITS | len(episode.turns)
        sampling = replace(self.sampling, seed=turn_seed)
        self.policy.submit(place, episode.prompt, sampling, episode.dialog.tools)

    def _take_turn(self, place: int, sampled: Sampled) -> None:
        """Hand a sampled turn to its environment: here if it is quick, otherwise in a thread."""
        episode = self.episodes[self.episode_at[place]]
        if episode.inline:
            episode.take_sampled(self.policy.renderer, sampled)
            self._submit_next_turn(place)
            return
        future = self.pool.submit(episode.take_sampled, self.policy.renderer, sampled)
        self.place_of[future] = place

    def _continue_after_environments(self) -> None:
        """Continue the episodes whose environment has answered; wait if nothing else is to do."""
        timeout = None if self.policy.idle else 0
        for future in wait(self.place_of, timeout, FIRST_COMPLETED).done:
            future.result()
            self._submit_next_turn(self.place_of.pop(future))


class _EpisodeRunner:
    """One task in its environment: takes turns until something ends the episode."""

    def __init__(
        self, make_environment: MakeEnvironment, task: Task, max_turns: int, limits: Limits
    ):
        self.task = task
        self.max_turns = max_turns or turn_limit(task)
        self.limits = limits
        self.started = time.monotonic()
        self.turns: list[Turn] = []
        self.stop: StopReason | None = None
        self.metadata: dict[str, Any] = {}
        self.prompt: list[int] = []
        self.dialog = Dialog(task.messages, task.tools, task.id, task.kind)
        self.environment: Any = None
        self.inline = True
        try:
            self.environment = make_environment()
            self.dialog = self.environment.reset(task)
            # an environment may know only after reset how it works
            self.inline = getattr(self.environment, "inline", False)
        except SharpenError:
            raise  # the task is wrong, and the message says where
        except Exception as error:
            self._fail(StopReason.ENVIRONMENT_ERROR, error)

    def take_sampled(self, renderer: Any, sampled: Sampled) -> None:
        """Take a sampled turn; the next prompt continues from exactly its ids."""
        prompt = tuple(self.prompt)
        turn = Turn(
            renderer.parse(sampled.ids),
            sampled.stop,
            prompt,
            sampled.ids,
            sampled.logprobs,
            error=sampled.error,
        )
        self.take_turn(turn)
        if self.stop is not None:
            return
        results = self.turns[-1].results
        count = len(self.dialog.messages) - len(results)
        dialog_before = replace(self.dialog, messages=self.dialog.messages[:count])
        try:
            added_ids = renderer.continuation(dialog_before, results)
        except RowError as error:  # the sampled text cannot be continued
            self._fail(StopReason.POLICY_ERROR, error)
            return
        self.prompt = [*prompt, *sampled.ids, *added_ids]

    def take_turn(self, turn: Turn) -> None:
        """Let the environment answer a turn; a turn that was cut off or failed ends the episode."""
        if turn.stop is not StopReason.ANSWERED:
            self.stop = turn.stop
            self.turns.append(turn)
            return
        results, self.stop = self._ask_environment(turn.message)
        self.turns.append(replace(turn, results=results))
        messages = (*self.dialog.messages, turn.message, *results)
        self.dialog = replace(self.dialog, messages=messages)
        if self.stop is None and len(self.turns) >= self.max_turns:
            self.stop = StopReason.TURNS
        if self.stop is None and time.monotonic() - self.started > self.limits.episode_s:
            reason = f"the episode took over {self.limits.episode_s:g} s"
            self._fail(StopReason.TIMEOUT, reason)

    def trajectory(self) -> Trajectory:
        """Returns what happened."""
        stop = self.stop or StopReason.TURNS
        return Trajectory(self.task.id, tuple(self.turns), stop, metadata=self.metadata)

    def _ask_environment(self, message: Message) -> tuple[tuple[Message, ...], StopReason | None]:
        """The environment's answer; its failure is not the model's and not the batch's."""
        try:
            if self.inline:
                return self.environment.step(message)
            limit = self.limits.step_s
            answer = call_with_limit(self.environment.step, {"message": message}, limit)
            if isinstance(answer, TimeoutError):
                return (), self._fail(StopReason.TIMEOUT, f"no answer within {limit:g} s")
            if isinstance(answer, BaseException):
                raise answer
            return answer
        except Exception as error:  # a user's code may raise anything; the episode says what
            return (), self._fail(StopReason.ENVIRONMENT_ERROR, error)

    def _fail(self, stop: StopReason, reason: str | Exception) -> StopReason:
        """End the episode and record why."""
        self.stop = stop
        self.metadata["error"] = (
            format_exception(reason) if isinstance(reason, Exception) else reason
        )
        return stop
