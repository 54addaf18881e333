"""The user's own files that an evaluation's scores depend on: kinds, rewards, environments, tools.

`evals/evaluator.py` puts their hash into the config of an evaluation, so that a score is never
taken from the cache, or from a stopped run, after such a file has changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sharpen.evals.items import Suite
from sharpen.records import sha256_file
from sharpen.types import Task

_PACKAGE = Path(__file__).parents[1]
_MARK = ".py:"  # what `file.py:name` is known by


def own_code_digest(suites: Iterable[Suite]) -> str:
    """Returns one hash of the user's own files that the suites use; "" without any."""
    files: set[Path] = set()
    for suite in suites:
        files |= _files_of_object(suite.reward) | _files_of_object(suite.make_environment)
        for task in suite.tasks:
            files |= _files_of_task(task)
    own_files = sorted(file for file in files if not file.is_relative_to(_PACKAGE))
    if not own_files:
        return ""
    lines = [f"{file} {sha256_file(file)}" for file in own_files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _files_of_task(task: Task) -> set[Path]:
    """The files of a task's own kind and tools."""
    names = [task.kind, *(task.metadata.get("python_tools") or ())]
    return _files_of_names(names)


def _files_of_names(names: Iterable[Any]) -> set[Path]:
    files = set()
    for name in names:
        if isinstance(name, str) and _MARK in name:
            path = Path(name.rpartition(":")[0]).resolve()
            if path.is_file():
                files.add(path)
    return files


def _files_of_object(thing: Any) -> set[Path]:
    """The files of a reward or environment, and of the parts of a composed reward."""
    parts = getattr(getattr(thing, "config", None), "parts", None) or ()
    files = _files_of_names(getattr(part, "name", "") for part in parts)
    kind = thing if isinstance(thing, type) else type(thing)
    for function in vars(kind).values():
        code = getattr(function, "__code__", None)
        if code and Path(code.co_filename).is_file():
            files.add(Path(code.co_filename).resolve())
    return files
