"""Mathematics: one answer, or an answer after some computing in the sandbox. Tasks of the kind
`math` with `gold.answer`; `rewards/verifiable.py` scores the last message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sharpen.envs.python import PythonTools, calculate, run_python
from sharpen.tools import Tool
from sharpen.types import Task


class Mathematics(PythonTools):
    """Tools are on offer to a task that names them (`calculate`, `run_python`), and those under
    `tools` to all."""

    def __init__(self, tools: Sequence[str] = (), **limits: Any):
        super().__init__(**limits)
        self.given = tools

    def open(self, task: Task) -> Iterable[Tool]:
        return calculate, run_python

    def usual(self, tools: dict[str, Tool]) -> Iterable[str]:
        return self.given
