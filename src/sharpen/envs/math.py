"""The environment of mathematical tasks (`math`). `rewards/verifiable.py` compares the last message
with `gold.answer`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sharpen.envs.python import PythonTools, calculate, run_python
from sharpen.tools import Tool
from sharpen.types import Task


class Mathematics(PythonTools):
    """The model solves a problem, in one message or after some computing in the sandbox.

    A task offers `calculate` and `run_python` by naming them in its `tools`; a task that names none
    gets those in the setting `tools`, by default none. The episode ends with the first message
    without a call, which is the answer, or at the limits of `PythonTools`.
    """

    def __init__(self, tools: Sequence[str] = (), **limits: Any):
        super().__init__(**limits)
        self._default_tools = tools

    def episode_tools(self, task: Task) -> Iterable[Tool]:
        """Returns the two tools that compute."""
        return calculate, run_python

    def default_tool_names(self, tools: dict[str, Tool]) -> Iterable[str]:
        """Returns the tools of the setting."""
        return self._default_tools
