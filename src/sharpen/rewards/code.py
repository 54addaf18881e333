"""Verify code: tests in one sandboxed process call the answer's functions in another.

So an answer can neither read the expected values nor forge a verdict. `rewards/verifiers.py` runs
it; self-play reads fenced blocks with it.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sharpen.config import one_line
from sharpen.sandbox import Sandbox
from sharpen.types import Json, RowError

_PEER_SOURCE = Path(__file__).with_name("code_peer.py").read_text("utf-8")


def fenced_blocks(text: str, *languages: str) -> list[str]:
    """Returns the fenced blocks in one of the languages, or else those that name none."""
    named = []
    nameless = []
    for block in text.split("```")[1::2]:
        head, _, body = block.partition("\n")
        language = head.strip().lower()
        if language in languages:
            named.append(body)
        elif not language:
            nameless.append(body)
    return named or nameless


def extract_code(text: str, names: Sequence[str]) -> str:
    """Returns the last block that defines a wanted name (others are examples).

    Where no block does, the last one, or the whole text where there are no blocks."""
    blocks = fenced_blocks(text, "python", "py", "python3") or [text]
    any_name = "|".join(names) or "$"
    definition = re.compile(rf"(?m)^(?:def |class |async def )?[ \t]*(?:{any_name})\b")
    for block in reversed(blocks):
        if definition.search(block):
            return block
    return blocks[-1]


@dataclass(frozen=True, slots=True)
class _CodeTests:
    """The tests of one task, taken apart."""

    setup: str  # code that runs before every test
    tests: tuple[str, ...]
    names: tuple[str, ...]  # what the answer has to define


def read_tests(gold: Json, where: str) -> _CodeTests:
    """Read the tests of a task's gold; `where` names the task in errors."""
    setup = gold.get("setup") or ""
    tests = gold.get("tests")
    try:
        if isinstance(tests, str):
            script_setup, tests = _split_script(tests)
            setup = "\n".join([setup, *script_setup])
        if not tests or not all(isinstance(test, str) for test in tests):
            raise RowError(where, "gold.tests: expected code with asserts, or a list of tests")
        names, modules = _find_names(ast.parse("\n".join([setup, *tests])))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise RowError(where, f"gold.tests: {one_line(error)}") from None
    if gold.get("entry_point"):
        names.append(gold["entry_point"])
    imports = "".join(f"import {module}\n" for module in modules)
    return _CodeTests(imports + setup, tuple(tests), tuple(names))


def _split_script(script: str) -> tuple[list[str], list[str]]:
    """Split a script into setup and tests: every assert is a test."""
    setup = []
    tests = []
    for statement in ast.parse(script).body:
        part = tests if isinstance(statement, ast.Assert) else setup
        part.append(ast.unparse(statement))
    return setup, tests


def _find_names(tree: ast.AST) -> tuple[list[str], list[str]]:
    """Find the names that the tests use and do not define, and the standard modules among them.

    Where no other name is free, the first function called is what the answer has to define: it
    may have the name of a builtin."""
    bound = set(dir(builtins))
    loaded: set[str] = set()
    called: list[str] = []
    with_attribute: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(name, ast.Load()):
                loaded.add(name)
            case ast.Name(name) | ast.arg(name) | ast.ExceptHandler(_, str(name)):
                bound.add(name)
            case ast.FunctionDef(name) | ast.ClassDef(name) | ast.alias(_, str(name)):
                bound.add(name)
            case ast.alias(name):
                bound.add(name.split(".")[0])
            case ast.Attribute(ast.Name(name)):
                with_attribute.add(name)
            case ast.Call(ast.Name(name)):
                called.append(name)
    free = loaded - bound
    modules = (free & with_attribute & sys.stdlib_module_names) - set(called)
    names = sorted(free - modules) or called[:1]
    return names, sorted(modules)


def run_tests(sandbox: Sandbox, code: str, tests: _CodeTests) -> list[str]:
    """Returns what is wrong by each test; empty text for one that passes.

    The two processes speak in turns and their lines are carried here. The answer's process can say
    what it likes: to the judge it is only data that a call returned."""
    judge_call = f"judge({tests.setup!r}, {list(tests.tests)!r}, {list(tests.names)!r})"
    problems: list[str] = []
    with (
        sandbox.talk(f"{_PEER_SOURCE}\ncandidate({code!r})") as candidate,
        sandbox.talk(f"{_PEER_SOURCE}\n{judge_call}") as judge,
    ):
        candidate.start_clock(candidate.limits)  # the judge's start does not count
        first_line = candidate.receive() or b"it ended"
        reason = first_line.decode("utf-8", "replace").strip('"')
        speaker = judge
        listener = candidate
        while not reason and len(problems) < len(tests.tests):
            line = speaker.receive()
            if line is None:
                reason = f"{speaker.stopped} limit" if speaker.stopped else "it ended"
            elif speaker is judge and line.startswith(b'{"verdict"'):
                problems.append(json.loads(line)["verdict"])
            else:
                listener.send(line)
                speaker, listener = listener, speaker
    tests_not_run = len(tests.tests) - len(problems)
    return problems + [reason] * tests_not_run
