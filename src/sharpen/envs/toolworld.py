"""The tool world as an environment: calls really act on simulated services (`sharpen.world`).

`Task.gold` describes the episode and one way to the wanted end state, not the only one:
`{"categories": […], "seed": 7, "family": "train", "faults"?: {…}, "calls": [{"name", "arguments"},
…]}`. The kinds `planning`, `end_to_end` and `tool_state` are played here.
"""

from __future__ import annotations

from sharpen.types import Dialog, Json, Message, SharpenError, StopReason, Task
from sharpen.world.episode import Episode, World, shipped_world
from sharpen.world.gold import MAX_CALLS, CallExecutor, Executed, gold_outcome, start_episode
from sharpen.world.state import diff


class ToolWorld:
    """The model calls tools of simulated services, such as booking a flight, and reads what they
    answer.

    All calls of a message run in their order, and each is answered, wrong ones with an error. The
    episode ends with the first message without a call, which is the answer. It also ends when the
    calls exceed `max_calls`, broken ones included; the calls beyond the limit are not run.
    """

    inline = True

    def __init__(self, world: World | None = None, max_calls: int = MAX_CALLS):
        self.world = world or shipped_world()
        self.max_calls = max_calls
        self._executor: CallExecutor | None = None  # of the current episode
        self._task: Task | None = None

    def reset(self, task: Task) -> Dialog:
        episode = start_episode(self.world, task.id, task.gold)
        offered = task.tools or tuple(tool.spec for tool in episode.tools())
        unknown = [spec.name for spec in offered if episode.tool(spec.name) is None]
        if unknown:
            categories = ", ".join(episode.domains)
            raise SharpenError(f"task {task.id}: tool {unknown[0]!r} is not of {categories}")
        offered_names = {spec.name for spec in offered}
        self._task = task
        self._executor = CallExecutor(episode, offered_names, self.max_calls)
        return Dialog(task.messages, offered, task.id, task.kind, task.metadata)

    def step(self, message: Message) -> tuple[tuple[Message, ...], StopReason | None]:
        return self._running_episode().step(message)

    @property
    def episode(self) -> Episode:
        """The state of the world and the tools that act on it."""
        return self._running_episode().episode

    @property
    def executed(self) -> list[Executed]:
        """The calls that were run, with their results."""
        return self._running_episode().executed

    def end_state_reached(self) -> bool:
        """Returns whether everything is now as the gold calls leave it, in whichever way."""
        return self.episode.changes() == self._gold_changes()

    def differences(self) -> list[str]:
        """Returns what is not as the gold calls leave it, one readable line each."""
        return diff(self.episode.changes(), self._gold_changes())

    def _running_episode(self) -> CallExecutor:
        if self._executor is None:
            raise SharpenError("the tool world has no episode yet: call reset(task) first")
        return self._executor

    def _gold_changes(self) -> Json:
        assert self._task is not None, "reset sets the task"
        return gold_outcome(self.world, self._task).changes
