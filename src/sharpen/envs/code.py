"""The environment of programming tasks (`code_session`).

`metadata.visible_tests` are the tests that `run_tests` runs for the model. The hidden tests in
`gold.tests` score its last message (`rewards/verifiable.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from sharpen.envs.python import PythonTools, describe_result, run_python, shared_sandbox
from sharpen.tools import Tool, tool
from sharpen.types import SharpenError, Task

_TEST_RUNNER = """
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
    """The model writes a program. Before it answers, it may run code with `run_python`, and its
    program against the task's visible tests with `run_tests`, if there are any.

    The episode ends with the first message without a call, which holds the program, or at the
    limits of `PythonTools`.
    """

    def episode_tools(self, task: Task) -> Iterable[Tool]:
        """Returns `run_python`, and `run_tests` for a task with visible tests."""
        tests = task.metadata.get("visible_tests") or []
        if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
            raise SharpenError(f"task {task.id}: visible_tests: expected a list of statements")

        @tool(timeout_s=60)
        def run_tests(code: str) -> str:
            """Runs a Python program against some of the tests and says which pass.

            Args:
                code: the whole program
            """
            job = json.dumps({"code": code, "tests": tests})
            return describe_result(shared_sandbox().run(_TEST_RUNNER, job))

        if not tests:
            return (run_python,)
        return run_python, run_tests
