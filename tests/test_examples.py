"""Every example runs offline on pico in an empty folder, prints what its docstring says, and stays
short enough to copy."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
MAX_LINES = 60
# example → a pattern of the line that it ends with
LAST_LINES = {
    "sft.py": r"Thank you! -> You are welcome\.",
    "dpo.py": r"after: 100% of the pairs ranked right, margin \d+\.\d\d",
    "grpo_own_reward.py": r"reward: 0\.\d\d in the first step, 0\.\d\d in the last",
    "own_environment.py": r"games won: \d+% in the first step, \d+% in the last",
    "own_task_kind.py": r"pico solves 0% of the tasks",
    "own_benchmark.py": r"pico: accuracy 0\.00 \(0\.00 to 0\.49\)",
    "merge.py": r"merged   french \d\.\d\d  numbers \d\.\d\d",
}


def test_every_example_is_tested_and_named_in_the_readme():
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == set(LAST_LINES)
    readme = (EXAMPLES / "README.md").read_text()
    missing = [name for name in names if f"]({name})" not in readme]
    assert not missing


@pytest.mark.parametrize("name", LAST_LINES)
def test_an_example_is_short(name):
    assert len((EXAMPLES / name).read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("name", LAST_LINES)
def test_an_example_runs_on_pico(name, tmp_path):
    command = [sys.executable, str(EXAMPLES / name)]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert finished.returncode == 0, finished.stderr
    last_line = finished.stdout.splitlines()[-1]
    assert re.fullmatch(LAST_LINES[name], last_line), finished.stdout
