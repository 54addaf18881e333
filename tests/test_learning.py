"""The benchmark of what GRPO adds: its stages in order on a pico model, and tasks that can be
done."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sharpen.data.sources import read_tasks
from sharpen.evals.baselines import Gold

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SETTINGS = "--tasks 8 8 8 --seeds 0 --budget-minutes 0 --grpo max_length=8192 tasks_per_step=1"
SETTINGS += " group_size=2 max_tokens=8 --sft max_steps=1 max_length=8192"


@pytest.mark.slow
def test_stages_end_in_time_and_are_not_done_twice(pico_folder, agent_data, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    command = [sys.executable, BENCHMARKS / "learning.py", folder, "--model", pico_folder]
    env = os.environ | {"SHARPEN_DATA": str(agent_data)}
    command += [*SETTINGS.split(), f"dev_data={folder}/data/sft_train.jsonl"]
    written = []
    for _ in range(2):
        done = subprocess.run([*map(str, command)], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        files = [path for path in folder.rglob("*") if path.is_file() and "out" not in path.parts]
        written.append({path: path.stat().st_mtime_ns for path in files})
    assert written[0] == written[1]
    found = json.loads((folder / "out/learning.json").read_text())
    assert found["grpo-0"]["steps"] == 1 and found["pooled"]["all"]["gain"]["count"] == 8
    assert not found["passed"] and (folder / "out/learning.png").stat().st_size > 10_000

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    play = importlib.import_module("learning").play
    for name in ("curve", "evaluate"):
        tasks = list(read_tasks(str(folder / f"data/{name}.jsonl")))
        rows = play(Gold(tasks, lambda _, message: message), folder / f"data/{name}.jsonl")
        assert len(rows) == len(tasks) == 8 and all(row["task_completion"] for row in rows)
        assert {row["needs"] for row in rows} == {"calls", "decisions"}
