"""Environments of Python tools. `PythonTools` runs a user's own `@tool` functions; the others here
bring tools of their own.

Calls of one message are run in its order and all answered. A tool that errs, hangs or floods
answers with an error; an episode that makes too many calls, or whose calls take too long, ends.
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

MAX_CALLS, TOOLS_S = 16, 60.0


class PythonTools:
    """`tools` are `file.py:name` of `@tool` functions, or the tools themselves; a task can name
    others in its metadata, as `python_tools`. Files are read for every episode, so that none sees
    what another left in a global variable. `task.tools` says which are on offer; none: all.

    Limits: `max_calls` of an episode, `calls_per_tool` (0: no own limit), `tools_s` seconds for all
    its calls together; each tool has its own time and size limit besides."""

    def __init__(
        self,
        tools: Sequence[str | Tool] = (),
        max_calls: int = MAX_CALLS,
        calls_per_tool: int = 0,
        tools_s: float = TOOLS_S,
    ):
        self.named, self.max_calls, self.calls_per_tool = tools, max_calls, calls_per_tool
        self.tools_s, self.offered = tools_s, dict[str, Tool]()

    def open(self, task: Task) -> Iterable[Tool]:
        """The tools of a task's episode."""
        for named in task.metadata.get("python_tools") or self.named:
            found = load_object(named) if isinstance(named, str) else named
            if not isinstance(found, Tool):
                raise SharpenError(f"task {task.id}: {named!r} is not marked with @tool")
            yield found

    def usual(self, tools: dict[str, Tool]) -> Iterable[str]:
        """What is on offer when a task names nothing."""
        return tools

    def reset(self, task: Task) -> Dialog:
        tools = {found.spec.name: found for found in self.open(task)}
        names = [spec.name for spec in task.tools] or list(self.usual(tools))
        if strange := [name for name in names if name not in tools]:
            known = ", ".join(tools) or "none"
            raise SharpenError(f"task {task.id}: no tool {strange[0]!r} here; there are: {known}")
        self.offered = {name: tools[name] for name in names}
        self.made, self.spent = Counter[str](), 0.0
        specs = task.tools or tuple(found.spec for found in self.offered.values())
        return Dialog(task.messages, specs, task.id, task.kind, task.metadata)

    def step(self, message: Message) -> tuple[tuple[Message, ...], StopReason | None]:
        """Run the message's calls; one without calls is the answer."""
        if not message.tool_calls and not message.unparsed:
            return (), StopReason.ANSWERED
        results = [self.answer(call).message(call) for call in message.tool_calls]
        for broken in message.unparsed:
            self.made[""] += 1
            text = f"the call could not be read ({broken.reason})"
            content = compact_json({"error": "invalid_call", "message": text})
            results.append(Message("tool", content))
        if self.made.total() > self.max_calls:
            return tuple(results), StopReason.TURNS
        return tuple(results), StopReason.TIMEOUT if self.spent > self.tools_s else None

    def answer(self, call: ToolCall) -> ToolResult:
        self.made[call.name] += 1
        if self.made.total() > self.max_calls:
            return ToolResult(f"no more than {self.max_calls} calls are allowed", "call_limit")
        if self.made[call.name] > self.calls_per_tool > 0:
            limit = f"no more than {self.calls_per_tool} calls of {call.name} are allowed"
            return ToolResult(limit, "call_limit")
        if self.spent > self.tools_s:
            return ToolResult(f"all calls together took over {self.tools_s:g} s", "timeout")
        started = time.monotonic()
        result = run_call(call, self.offered)
        self.spent += time.monotonic() - started
        return result


# Code that nobody trusts -------------------------------------------------------------------------


@functools.cache
def sandbox() -> Sandbox:
    """One for all environments of this process."""
    found = Sandbox()
    atexit.register(found.close)
    return found


def told(result: SandboxResult) -> str:
    """What a snippet printed, and how it ended if not well."""
    parts = [result.stdout.strip(), *result.stderr.strip().splitlines()[-1:]]
    parts += [f"[stopped: {result.stopped} limit]"] if result.stopped else []
    return "\n".join(part for part in parts if part) or "[no output]"


@tool(timeout_s=60)
def run_python(code: str) -> str:
    """Runs a Python program and returns what it prints.

    Args:
        code: the whole program
    """
    return told(sandbox().run(code))


@tool(timeout_s=60)
def calculate(expression: str) -> str:
    """Computes an arithmetic expression, such as (3 + 4) * 12 / 7 or sqrt(2).

    Args:
        expression: numbers, operators, parentheses and functions
    """
    return told(sandbox().run(f"from math import *\nprint(eval({expression!r}))"))
