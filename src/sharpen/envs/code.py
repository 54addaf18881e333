"""Programming: the model may run its code, alone or against the task's visible tests, before it
answers with it. Tasks of the kind `code`: `gold.tests` are the hidden tests that score the last
message, `metadata.visible_tests` those that `run_tests` runs."""

from __future__ import annotations

import json
from collections.abc import Iterable

from sharpen.envs.python import PythonTools, run_python, sandbox, told
from sharpen.tools import Tool, tool
from sharpen.types import SharpenError, Task

RUNNER = """
import json, sys
job, names = json.load(sys.stdin), {"__name__": "answer"}
exec(compile(job["code"], "answer.py", "exec"), names)
for test in job["tests"]:
    try:
        exec(test, names)
        print("passed:", test)
    except Exception as error:
        print(f"failed: {test} ({type(error).__name__}: {error})")
"""


class Programming(PythonTools):
    def open(self, task: Task) -> Iterable[Tool]:
        tests = task.metadata.get("visible_tests") or []
        if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
            raise SharpenError(f"task {task.id}: visible_tests: expected a list of statements")

        @tool(timeout_s=60)
        def run_tests(code: str) -> str:
            """Runs a Python program against some of the tests and says which pass.

            Args:
                code: the whole program
            """
            return told(sandbox().run(RUNNER, json.dumps({"code": code, "tests": tests})))

        return (run_python, run_tests) if tests else (run_python,)
