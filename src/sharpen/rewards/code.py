"""Verify code: tests in one sandboxed process call the answer's functions in another, so that an
answer can neither read the expected values nor forge a verdict."""

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

PEER = Path(__file__).with_name("code_peer.py").read_text("utf-8")


def fenced(text: str, *languages: str) -> list[str]:
    """Fenced blocks in one of the languages, or those that name none."""
    blocks = [part.partition("\n") for part in text.split("```")[1::2]]
    named = [body for head, _, body in blocks if head.strip().lower() in languages]
    return named or [body for head, _, body in blocks if not head.strip()]


def code_in(text: str, names: Sequence[str]) -> str:
    """The last block that defines a wanted name (others are examples), else the last, or all."""
    blocks = fenced(text, "python", "py", "python3") or [text]
    wanted = re.compile(rf"(?m)^(?:def |class |async def )?[ \t]*(?:{'|'.join(names) or '$'})\b")
    return next((block for block in reversed(blocks) if wanted.search(block)), blocks[-1])


@dataclass(frozen=True, slots=True)
class Tests:
    setup: str
    tests: tuple[str, ...]
    names: tuple[str, ...]  # what the answer has to define


def read_tests(gold: Json, where: str) -> Tests:
    setup, tests = gold.get("setup") or "", gold.get("tests")
    try:
        if isinstance(tests, str):  # a script: every assert is a test
            body = ast.parse(tests).body
            tests = [ast.unparse(each) for each in body if isinstance(each, ast.Assert)]
            rest = [ast.unparse(each) for each in body if not isinstance(each, ast.Assert)]
            setup = "\n".join([setup, *rest])
        if not tests or not all(isinstance(test, str) for test in tests):
            raise RowError(where, "gold.tests: expected code with asserts, or a list of tests")
        names, modules = wanted_names(ast.parse("\n".join([setup, *tests])))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise RowError(where, f"gold.tests: {one_line(error)}") from None
    entry = [gold["entry_point"]] if gold.get("entry_point") else []
    imports = "".join(f"import {name}\n" for name in modules)
    return Tests(imports + setup, tuple(tests), (*names, *entry))


def wanted_names(tree: ast.AST) -> tuple[list[str], list[str]]:
    """What the tests use and do not define (or else a builtin), and the library's modules."""
    bound, loaded, called, based = set(dir(builtins)), set[str](), list[str](), set[str]()
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
                based.add(name)
            case ast.Call(ast.Name(name)):
                called.append(name)
    free = loaded - bound
    modules = (free & based & sys.stdlib_module_names) - {*called}
    return sorted(free - modules) or called[:1], sorted(modules)


def problems(sandbox: Sandbox, code: str, tests: Tests) -> list[str]:
    """What is wrong by each test; empty for one that passes.

    The two processes speak in turns and their lines are carried here. The answer's process can say
    what it likes: to the judge it is only data that a call returned."""
    question = f"judge({tests.setup!r}, {list(tests.tests)!r}, {list(tests.names)!r})"
    found: list[str] = []
    with (
        sandbox.talk(f"{PEER}\ncandidate({code!r})") as answer,
        sandbox.talk(f"{PEER}\n{question}") as judge,
    ):
        answer.start_clock(answer.limits)  # the judge's start does not count
        reason = (answer.receive() or b"it ended").decode("utf-8", "replace").strip('"')
        speaker, other = judge, answer
        while not reason and len(found) < len(tests.tests):
            line = speaker.receive()
            if line is None:
                reason = f"{speaker.stopped} limit" if speaker.stopped else "it ended"
            elif speaker is judge and line.startswith(b'{"verdict"'):
                found.append(json.loads(line)["verdict"])
            else:
                other.send(line)
                speaker, other = other, speaker
    return found + [reason] * (len(tests.tests) - len(found))
