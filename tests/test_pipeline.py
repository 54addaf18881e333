"""Recipes: stages run, are skipped when complete, run again when not, and refuse what is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from sharpen.config import ConfigError
from sharpen.pipeline import load_recipe, run_recipe
from sharpen.records import read_jsonl
from sharpen.rows import dialog_from_row, task_from_row
from sharpen.types import SharpenError
from small_quickstart import REWARD, SMALL


def run(out, *overrides):
    said: list[str] = []
    results = run_recipe(
        load_recipe("quickstart", ["model=pico", *SMALL, *overrides]), out, said.append
    )
    return results, said


def test_quickstart_runs_and_then_is_complete(tmp_path):
    results, said = run(tmp_path / "run")
    assert results["render"]["rows"] == 8 and results["before"]["valid_call"]["count"] == 4
    assert results["after"]["valid_call"]["count"] == 4 and results["sft"]["loss"] > 0
    assert results["dpo"]["loss"] > 0 and "reward" in results["grpo"]
    adapter = (tmp_path / "run" / "sft" / "final" / "adapter_config.json").read_text()
    assert '"r": 16' in adapter
    assert any("valid_call: " in line and "[" in line for line in said)
    stamp = (tmp_path / "run" / "before" / "items.jsonl").stat().st_mtime_ns
    again, said = run(tmp_path / "run")
    assert again == results
    assert [line for line in said if "already complete" in line] == said
    assert (tmp_path / "run" / "before" / "items.jsonl").stat().st_mtime_ns == stamp


def test_a_changed_output_is_made_again_with_all_that_follows(tmp_path):
    run(tmp_path / "run")
    data = tmp_path / "run" / "starter" / "train.jsonl"
    whole = data.read_bytes()
    data.write_bytes(whole[:100])
    _, said = run(tmp_path / "run")
    assert data.read_bytes() == whole
    assert "[1/9] pull: already complete" in said and "[2/9] starter …" in said


def test_another_config_is_refused_and_nothing_is_lost(tmp_path):
    run(tmp_path / "run")
    with pytest.raises(SharpenError, match=r"another config \(seed: 0 → 1\)"):
        run(tmp_path / "run", "seed=1")
    assert (tmp_path / "run" / "results.json").is_file()


def test_rows_over_max_length_are_named(tmp_path):
    with pytest.raises(SharpenError, match=r"row starter-train-0 has .* over max_length 50"):
        run(tmp_path / "run", "stages.2.max_length=50")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["stages.1.trains=2"], "did you mean 'train'"),
        (["stages.0.stage=pul"], "'pul'"),
        (["stages.2.name=starter"], "two stages are called 'starter'"),
        (["stages=[]"], "at least 1 item"),
        (["stages.1.train=many"], "stages.1"),
    ],
)
def test_wrong_recipes(overrides, problem):
    with pytest.raises(ConfigError, match=problem):
        load_recipe("quickstart", overrides)


def test_missing_inputs_are_named(tmp_path):
    with pytest.raises(SharpenError, match=r"gone\.jsonl: neither in"):
        run(tmp_path / "run", "stages.2.data=gone.jsonl")


def test_more_rows_than_exist_is_an_error(tmp_path):
    with pytest.raises(SharpenError, match=r"only .* different test rows exist"):
        run(tmp_path / "run", "stages.1.test=100000")


def test_starter_splits_share_nothing_and_fit(tmp_path, smollm2_tokenizer):
    """No request twice, no phrasing or value shared, three candidates a row, at most 256 tokens."""
    from sharpen.data.generate.starter import starter_dialogs, starter_task
    from sharpen.render import Renderer
    from sharpen.rewards.calls import call_problems

    train, test = starter_dialogs("train", 320), starter_dialogs("test", 64)
    assert (
        len({d.messages[0].content for d in train} | {d.messages[0].content for d in test}) == 384
    )
    assert all(len(d.tools) == 3 for d in train + test)
    assert all(not call_problems(d.messages[1], d.tools) for d in train + test)
    assert {t.name for d in train for t in d.tools} == {t.name for d in test for t in d.tools}
    for name in ("city", "genre", "item", "to", "text", "time", "room", "cuisine"):
        values = [
            {
                str(c.arguments[name])
                for d in split
                for c in d.messages[1].tool_calls
                if name in c.arguments
            }
            for split in (train, test)
        ]
        assert values[0] and values[1] and not values[0] & values[1]
    assert max(len(d.ids) for d in Renderer(smollm2_tokenizer).render(train + test)) <= 256
    assert starter_dialogs("train", 320) == train != starter_dialogs("train", 320, seed=1)
    assert starter_task(test[0]).gold["calls"][0]["name"] in {t.name for t in test[0].tools}


def test_files_are_rows(tmp_path):
    run(tmp_path / "run")
    folder = tmp_path / "run" / "starter"
    assert [dialog_from_row(r.value).id for r in read_jsonl(folder / "test.jsonl")] == [
        task_from_row(r.value).id for r in read_jsonl(folder / "test.tasks.jsonl")
    ]


@pytest.mark.slow
def test_kill_anywhere_then_continue(tmp_path):
    """kill -9 at random moments: the run always goes on, and ends with the same results as one
    never killed."""
    command = [sys.executable, "-m", "sharpen.cli.main", "run", "quickstart", "model=pico", *SMALL]
    whole = subprocess.run(
        [*command, "--out", str(tmp_path / "whole")], capture_output=True, text=True
    )
    assert whole.returncode == 0, whole.stderr
    started = time.monotonic()
    subprocess.run([*command, "--out", str(tmp_path / "timed")], capture_output=True, check=True)
    span = time.monotonic() - started
    kills = 0
    for number in range(8):
        process = subprocess.Popen(
            [*command, "--out", str(tmp_path / "killed")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(span * (number + 1) / 9)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
    assert kills >= 3
    last = subprocess.run(
        [*command, "--out", str(tmp_path / "killed")], capture_output=True, text=True
    )
    assert last.returncode == 0, last.stderr
    results = [json.loads((tmp_path / n / "results.json").read_text()) for n in ("whole", "killed")]
    assert results[0] == results[1]


def test_the_way_without_fine_tuning_runs_on_the_toy_model(tmp_path):
    small = ["model=pico", *(f"stages.{n}.max_tokens=4" for n in (1, 3, 4))]
    small += [f"stages.{n}.tasks=procedural/arithmetic:test?count=4" for n in (1, 3, 4)]
    settings = {"max_tokens": 4, "max_steps": 2, "tasks_per_step": 2, "refill_rounds": 0}
    settings["reward"] = REWARD
    small += [f"stages.2.settings.{name}={value}" for name, value in settings.items()]
    small += ["stages.2.dev=procedural/arithmetic:test?count=2"]
    results = run_recipe(load_recipe("r1_zero", small), tmp_path / "run", lambda text: None)
    assert results["grpo"]["step"] == 2 and results["after"]["reward"]["count"] == 4
