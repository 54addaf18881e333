"""Each task in the environment that it belongs to, for files and mixtures of several kinds. A task
that belongs to none, a proposer's for one, ends with the first message."""

from __future__ import annotations

from typing import Any

from sharpen.envs.code import Programming
from sharpen.envs.math import Mathematics
from sharpen.envs.python import PythonTools
from sharpen.envs.sql import SQL
from sharpen.envs.toolworld import ToolWorld
from sharpen.types import Dialog, Message, StopReason, Task
from sharpen.world.episode import World


class Auto:
    def __init__(self, world: World | None = None):
        self.world = world
        self.inner: Any = None

    def belongs(self, task: Task) -> Any:
        if task.kind == "propose":
            return None
        if "schema" in task.gold and task.kind in ("sql", "tool_state"):
            return SQL()
        if "categories" in task.gold:
            return ToolWorld(self.world)
        if "python_tools" in task.metadata:
            return PythonTools()
        return {"math": Mathematics, "code": Programming}.get(task.kind, lambda: None)()

    def reset(self, task: Task) -> Dialog:
        self.inner = self.belongs(task)
        alone = Dialog(task.messages, task.tools, task.id, task.kind, task.metadata)
        return self.inner.reset(task) if self.inner else alone

    def step(self, message: Message) -> tuple[tuple[Message, ...], StopReason | None]:
        return self.inner.step(message) if self.inner else ((), StopReason.ANSWERED)
