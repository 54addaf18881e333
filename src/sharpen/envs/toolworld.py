"""The tool world as an environment: a task names its categories, seed and family, the assistant's
calls are really executed, and the end state tells whether the task was done.

`Task.gold` is `{"categories": […], "seed": 7, "family": "train", "faults"?: {…}, "calls": [{"name",
"arguments"}, …]}`; the calls are one way to the wanted end state, not the only one.
"""

from __future__ import annotations

from sharpen.types import Dialog, Json, Message, SharpenError, StopReason, Task
from sharpen.world.episode import Episode, World, shipped_world
from sharpen.world.gold import MAX_CALLS, CallExecutor, Executed, gold_outcome, start
from sharpen.world.state import diff


class ToolWorld:
    """One episode at a time. Every call counts towards `max_calls`, broken ones too; what exceeds
    them is not run and ends the episode."""

    inline = True

    def __init__(self, world: World | None = None, max_calls: int = MAX_CALLS):
        self.world = world or shipped_world()
        self.max_calls = max_calls
        self.current: CallExecutor | None = None

    def reset(self, task: Task) -> Dialog:
        episode = start(self.world, task.id, task.gold)
        offered = task.tools or tuple(tool.spec for tool in episode.tools())
        strange = [spec.name for spec in offered if episode.tool(spec.name) is None]
        if strange:
            categories = ", ".join(episode.domains)
            raise SharpenError(f"task {task.id}: tool {strange[0]!r} is not of {categories}")
        self.task = task
        self.current = CallExecutor(episode, {spec.name for spec in offered}, self.max_calls)
        return Dialog(task.messages, offered, task.id, task.kind, task.metadata)

    @property
    def run(self) -> CallExecutor:
        if self.current is None:
            raise SharpenError("the tool world has no episode yet: call reset(task) first")
        return self.current

    @property
    def episode(self) -> Episode:
        return self.run.episode

    @property
    def executed(self) -> list[Executed]:
        return self.run.executed

    def step(self, message: Message) -> tuple[tuple[Message, ...], StopReason | None]:
        """CallExecutor the message's calls in order; one without calls is the answer."""
        return self.run.step(message)

    def end_state_reached(self) -> bool:
        """Whether everything is now as after the gold calls, whichever way it came to be so."""
        return self.episode.changes() == self.wanted()

    def differences(self) -> list[str]:
        """What is not as the gold calls leave it, one readable line each."""
        return diff(self.episode.changes(), self.wanted())

    def wanted(self) -> Json:
        return gold_outcome(self.world, self.task).changes
