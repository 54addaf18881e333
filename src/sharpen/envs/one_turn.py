"""The environment of tasks that take one answer. Kinds of tasks name it, and so may any config."""

from __future__ import annotations

from sharpen.types import Dialog, Message, StopReason, Task


class OneTurn:
    """No world: the first answer ends the episode."""

    inline = True

    def reset(self, task: Task) -> Dialog:
        return Dialog(task.messages, task.tools, task.id, task.kind, task.metadata)

    def step(self, message: Message) -> tuple[tuple[Message, ...], StopReason | None]:
        return (), StopReason.ANSWERED
