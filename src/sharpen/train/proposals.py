"""What a proposer in self-play wrote → a verified task, or why it is none. `SelfPlay` calls it.

A program becomes a task once it has run twice in the sandbox and printed the same line; a request
becomes one once its calls have succeeded in the tool world and its words name every value.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from sharpen.calls import compact_json
from sharpen.config import one_line
from sharpen.envs.python import shared_sandbox
from sharpen.rewards.code import fenced_blocks
from sharpen.types import Json, Message, Task
from sharpen.world.episode import World
from sharpen.world.gold import CallExecutor, start_episode
from sharpen.world.phrases import speak_value

_MAX_PROGRAM = 1000  # characters
_MAX_REQUEST = 600
_MAX_ANSWER = 80
_MAX_CALLS = 4
# nobody can work out what these return
_REFUSED_NAMES = ("hash", "id", "eval", "exec", "compile", "__import__")
_QUESTION = "What does this program print?\n```python\n{}\n```"


@dataclass(frozen=True, slots=True)
class _Proposal:
    """A verified task. `key` is the same for proposals that differ in nothing that matters."""

    key: str
    task: Task


def task_of_program(text: str) -> _Proposal | str:
    """Returns the task of predicting what a proposed program prints, or why there is none."""
    blocks = fenced_blocks(text, "python", "py")
    code = blocks[-1].strip() if blocks else ""
    if not code or len(code) > _MAX_PROGRAM:
        return f"no program of at most {_MAX_PROGRAM} characters in a block"
    try:
        tree = ast.parse(code)
        key = ast.unparse(tree)  # without comments and blanks
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"not a program: {one_line(error)[:200]}"
    problem = _refused_code(tree)
    if problem:
        return problem
    first, second = shared_sandbox().run_many([code, code])
    if not (first.ok and second.ok):
        return f"it fails: {one_line(first.stopped or first.stderr)[-200:]}"
    if first.stdout != second.stdout:
        return "it prints something else each time"
    answer = first.stdout.strip()
    if not answer or "\n" in answer or len(answer) > _MAX_ANSWER:
        return f"it does not print one line of at most {_MAX_ANSWER} characters"
    return _Proposal(key, _new_task(key, _QUESTION.format(code), {"answer": answer}, "exact"))


def _refused_code(tree: ast.AST) -> str:
    """Why nobody could predict what a program prints; "" if nothing speaks against it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            return "it imports something"
        if isinstance(node, ast.Name) and node.id in _REFUSED_NAMES:
            return f"it uses {node.id}"
    return ""


def task_of_request(prompt: Task, message: Message, world: World) -> _Proposal | str:
    """Returns the task of fulfilling a proposed request, whose calls are gold; or why there is
    none. `prompt` is the proposer's task, in whose world the calls are run."""
    request = message.content.strip()
    calls = message.tool_calls
    has_calls = 1 <= len(calls) <= _MAX_CALLS
    if message.unparsed or not has_calls or not 0 < len(request) <= _MAX_REQUEST:
        return f"not a request with 1 to {_MAX_CALLS} calls"
    executor = CallExecutor(
        start_episode(world, prompt.id, prompt.gold), {spec.name for spec in prompt.tools}
    )
    executor.step(message)
    for executed in executor.executed:
        if not executed.ok:
            return f"a call fails: {one_line(executed.result['message'])[:200]}"
    words = request.casefold()
    for value in _values([call.arguments for call in calls]):
        if speak_value(value).casefold() not in words:
            return f"the request does not say {value!r}"
    gold_calls = [{"name": call.name, "arguments": call.arguments} for call in calls]
    key = compact_json(gold_calls)
    task = _new_task(key, request, {**prompt.gold, "calls": gold_calls}, "tool_state")
    return _Proposal(key, replace(task, tools=prompt.tools))


def _values(value: Any) -> Iterator[Any]:
    """Everything that arguments say; yes and no have no words of their own."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from _values(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _values(inner)
    elif value is not None and not isinstance(value, bool):
        yield value


def _new_task(key: str, instruction: str, gold: Json, kind: str) -> Task:
    name = f"play-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    return Task(name, instruction, gold=gold, kind=kind, difficulty=f"play {kind}")
