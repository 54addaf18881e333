"""Environments in which the model calls Python tools.

`PythonTools` runs a user's own `@tool` functions. Mathematics, programming and SQL
(`envs/math.py`, `envs/code.py`, `envs/sql.py`) are `PythonTools` with tools of their own. The code
of a model runs in the sandbox only, by `run_python` and `calculate`.
"""

from __future__ import annotations

import atexit
import functools
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from sharpen.calls import compact_json
from sharpen.sandbox import Sandbox, SandboxResult
from sharpen.tools import Tool, ToolResult, load_object, run_call, tool
from sharpen.types import Dialog, Message, SharpenError, StopReason, Task, ToolCall

_MAX_CALLS = 16
_MAX_TOOL_SECONDS = 60.0


class PythonTools:
    """The model calls Python functions and reads what they return.

    All calls of a message run in their order, and each is answered; a tool that raises, hangs or
    returns too much is answered with an error. The episode ends with the first message without a
    call, which is the answer. It also ends when the calls exceed `max_calls` (`turns`), or when all
    of them together have taken more than `tools_s` seconds (`timeout`).

    `tools` are `file.py:name` of `@tool` functions, or the tools themselves. A task can name others
    in its metadata, as `python_tools`. Files are loaded anew for every episode, so that no episode
    sees what another one left in a global variable. `task.tools` says which of the tools are
    offered; if it is empty, all are. `calls_per_tool` limits the calls of each tool (0: no limit).
    """

    def __init__(
        self,
        tools: Sequence[str | Tool] = (),
        max_calls: int = _MAX_CALLS,
        calls_per_tool: int = 0,
        tools_s: float = _MAX_TOOL_SECONDS,
    ):
        self.tools = tools
        self.max_calls = max_calls
        self.calls_per_tool = calls_per_tool
        self.tools_s = tools_s
        self._offered: dict[str, Tool] = {}
        self._call_counts = Counter[str]()  # by tool; "" counts calls that could not be read
        self._seconds_spent = 0.0

    def episode_tools(self, task: Task) -> Iterable[Tool]:
        """Returns the tools that exist in the task's episode."""
        for reference in task.metadata.get("python_tools") or self.tools:
            loaded = load_object(reference) if isinstance(reference, str) else reference
            if not isinstance(loaded, Tool):
                raise SharpenError(f"task {task.id}: {reference!r} is not marked with @tool")
            yield loaded

    def default_tool_names(self, tools: dict[str, Tool]) -> Iterable[str]:
        """Returns the tools that are offered to a task that names none."""
        return tools

    def reset(self, task: Task) -> Dialog:
        tools = {tool.spec.name: tool for tool in self.episode_tools(task)}
        names = [spec.name for spec in task.tools] or list(self.default_tool_names(tools))
        unknown = [name for name in names if name not in tools]
        if unknown:
            known = ", ".join(tools) or "none"
            raise SharpenError(f"task {task.id}: no tool {unknown[0]!r} here; there are: {known}")
        self._offered = {name: tools[name] for name in names}
        self._call_counts = Counter()
        self._seconds_spent = 0.0
        specs = task.tools or tuple(tool.spec for tool in self._offered.values())
        return Dialog(task.messages, specs, task.id, task.kind, task.metadata)

    def step(self, message: Message) -> tuple[tuple[Message, ...], StopReason | None]:
        if not message.tool_calls and not message.unparsed:
            return (), StopReason.ANSWERED
        results = [self._answer_call(call).message(call) for call in message.tool_calls]
        for unparsed in message.unparsed:
            self._call_counts[""] += 1
            text = f"the call could not be read ({unparsed.reason})"
            content = compact_json({"error": "invalid_call", "message": text})
            results.append(Message("tool", content))
        stop = None
        if self._call_counts.total() > self.max_calls:
            stop = StopReason.TURNS
        elif self._seconds_spent > self.tools_s:
            stop = StopReason.TIMEOUT
        return tuple(results), stop

    def _answer_call(self, call: ToolCall) -> ToolResult:
        """Run the call, unless a limit is exceeded."""
        self._call_counts[call.name] += 1
        if self._call_counts.total() > self.max_calls:
            return ToolResult(f"no more than {self.max_calls} calls are allowed", "call_limit")
        if self._call_counts[call.name] > self.calls_per_tool > 0:
            text = f"no more than {self.calls_per_tool} calls of {call.name} are allowed"
            return ToolResult(text, "call_limit")
        if self._seconds_spent > self.tools_s:
            return ToolResult(f"all calls together took over {self.tools_s:g} s", "timeout")
        started = time.monotonic()
        result = run_call(call, self._offered)
        self._seconds_spent += time.monotonic() - started
        return result


# Tools that run a model's code in the sandbox ----------------------------------------------------


@functools.cache
def shared_sandbox() -> Sandbox:
    """Returns the sandbox that all environments of this process share."""
    shared = Sandbox()
    atexit.register(shared.close)
    return shared


def describe_result(result: SandboxResult) -> str:
    """Returns what a program printed, the last line of its errors, and the limit that stopped it.

    The model reads this as the tool's answer.
    """
    parts = [result.stdout.strip()]
    parts += result.stderr.strip().splitlines()[-1:]
    if result.stopped:
        parts.append(f"[stopped: {result.stopped} limit]")
    return "\n".join(part for part in parts if part) or "[no output]"


@tool(timeout_s=60)
def run_python(code: str) -> str:
    """Runs a Python program and returns what it prints.

    Args:
        code: the whole program
    """
    return describe_result(shared_sandbox().run(code))


@tool(timeout_s=60)
def calculate(expression: str) -> str:
    """Computes an arithmetic expression, such as (3 + 4) * 12 / 7 or sqrt(2).

    Args:
        expression: numbers, operators, parentheses and functions
    """
    program = f"from math import *\nprint(eval({expression!r}))"
    return describe_result(shared_sandbox().run(program))
