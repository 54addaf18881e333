"""Two real processes (gloo on CPU): the losses, the checkpoint and the weights of one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from sharpen.data.generate.starter import starter_dialogs
from sharpen.rows import dialog_to_row

pytestmark = pytest.mark.slow
STEPS = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    found = starter_dialogs("train", 21)
    path.write_text("".join(json.dumps(dialog_to_row(d)) + "\n" for d in found))
    return path


def train(pico_folder, data, output, *settings: str, processes: int = 1, steps: int = STEPS) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [sys.executable, *(launcher if processes > 1 else [])]
    command += ["-m", "sharpen.cli.main", "train", "sft", "--base-model", str(pico_folder)]
    command += ["--data", str(data), "--dev-data", str(data), "--output", str(output)]
    command += [
        "--max-steps",
        str(steps),
        "device=cpu",
        "lora_r=4",
        "lora_dropout=0",
        "batch_size=7",
    ]
    command += ["gradient_accumulation=1", "learning_rate=1e-3", "token_budget=2500"]
    command += ["save_steps=2", "eval_steps=2", "max_length=2000", *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    environment = {k: v for k, v in environment.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def losses(folder) -> np.ndarray:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return np.array([[row["loss"], row.get("dev_loss", 0.0), row["norm"]] for row in rows])


@pytest.fixture(scope="module")
def alone(pico_folder, data, tmp_path_factory):
    folders = {}
    for full in ("false", "true"):
        folders[full] = tmp_path_factory.mktemp("alone") / "run"
        train(pico_folder, data, folders[full], f"full={full}")
    return folders


WAYS = [("ddp", "false"), ("ddp", "true"), ("fsdp2", "false"), ("fsdp2", "true")]
if importlib.util.find_spec("deepspeed"):  # an extra of its own: pip install 'sharpen[deepspeed]'
    WAYS += [("zero2", "true"), ("zero3", "false")]


@pytest.mark.parametrize(("parallel", "full"), WAYS)
def test_two_processes_equal_one(pico_folder, data, alone, tmp_path, parallel, full):
    given = (f"full={full}", f"parallel={parallel}")
    output = train(pico_folder, data, tmp_path / "run", *given, processes=2)
    assert output.count("rows to train on") == 1  # the second process is silent
    if parallel.startswith("zero"):
        assert "no checkpoints, a run that is stopped cannot continue" in output
        assert not (tmp_path / "run" / "checkpoints").exists()
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(alone[full]), rtol=1e-5)
    name = "model.safetensors" if full == "true" else "adapter_model.safetensors"
    found, wanted = (load_file(f / "final" / name) for f in (tmp_path / "run", alone[full]))
    assert found.keys() == wanted.keys()
    for key in wanted:
        np.testing.assert_allclose(found[key], wanted[key], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_processes_resume(pico_folder, data, alone, tmp_path, parallel):
    """Gone on from the checkpoint in the middle: the same losses as in one go."""
    folder, given = tmp_path / "run", (f"parallel={parallel}", "lr_scheduler=constant")
    train(pico_folder, data, tmp_path / "whole", "lr_scheduler=constant", "warmup_ratio=0")
    train(pico_folder, data, folder, *given, "warmup_ratio=0", processes=2)
    whole = losses(folder)
    for kept in sorted((folder / "checkpoints").glob("step-*"))[1:]:
        for file in kept.iterdir():
            file.unlink()
        kept.rmdir()
    train(pico_folder, data, folder, *given, "warmup_ratio=0", processes=2)
    np.testing.assert_array_equal(losses(folder), whole)
    np.testing.assert_allclose(whole, losses(tmp_path / "whole"), rtol=1e-5)
