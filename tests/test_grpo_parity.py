"""Our surrogate losses and gradients against TRL's GRPO and RLOO trainers on the same samples."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from sharpen.models.load import ModelConfig, load_model
from sharpen.train.advantages import token_weights
from sharpen.train.config.grpo import GRPOConfig
from sharpen.train.config.learner import LearnerConfig
from sharpen.train.grpo import surrogate_of
from sharpen.train.learner import Learner
from sharpen.train.policy_update import surrogate_loss, weighted_rows
from sharpen.train.rl_data import with_column
from sharpen.types import Datum

pytestmark = pytest.mark.slow
ORACLE = Path(__file__).parents[1] / ".venv-oracle" / "bin" / "python"
THEIRS = {
    "grpo": {"loss_type": "grpo", "beta": 0.1},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.0},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 40, "beta": 0.1},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.05},
    "rloo": {"beta": 0.0},
}


@pytest.fixture(scope="module")
def samples(pico_folder) -> tuple[list[Datum], np.ndarray]:
    """Rows of other lengths whose old log-probabilities lie on both sides of every clip."""
    chance, rows = np.random.default_rng(0), []
    for prompt, answer in ((5, 9), (12, 3), (7, 30), (20, 17)):
        mask = np.arange(prompt + answer) >= prompt
        ids = chance.integers(0, 250, len(mask)).astype(np.int32)
        rows.append(Datum(ids, mask))
    model = load_model(ModelConfig(base_model=str(pico_folder), device="cpu"))
    now = Learner(model.requires_grad_(True), LearnerConfig(), 1).logprobs(rows)
    near = [found + chance.normal(0, 0.3 / len(found), len(found)) + shift for found, shift in
            zip(now, (0.0, 0.3, -0.02, 0.05), strict=True)]  # fmt: skip
    far = [found + chance.normal(0, 0.5, len(found)) for found in now]
    advantages = np.array([1.2, -0.7, 0.4, -0.9], np.float32)
    for name, values in (("advantage", advantages), ("old", near), ("reference", far)):
        rows = with_column(rows, name, values)
    return rows, advantages


@pytest.fixture(scope="module")
def told(pico_folder, samples, tmp_path_factory) -> tuple[dict, dict]:
    work, (rows, advantages) = tmp_path_factory.mktemp("trl"), samples
    given = [
        {
            "prompt_ids": d.ids[~d.mask].tolist(),
            "completion_ids": d.ids[d.mask].tolist(),
            "old_per_token_logps": d.columns["old"].tolist(),
            "ref_per_token_logps": d.columns["reference"].tolist(),
        }
        for d in rows
    ]
    common = {"method": "policy", "model": str(pico_folder), "adapter": "", "rows": given}
    common["advantages"] = advantages.tolist()
    jobs = {
        name: common
        | {"variant": name, "settings": settings, "whole": str(work / f"{name}.safetensors")}
        for name, settings in THEIRS.items()
    }
    (work / "jobs.json").write_text(json.dumps(jobs))
    command = [
        str(ORACLE),
        str(Path(__file__).with_name("support") / "oracle_trl.py"),
        str(work / "jobs.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return jobs, json.loads((work / "answer.json").read_text())


@pytest.mark.parametrize("variant", THEIRS)
@pytest.mark.parametrize("budget", [100_000, 60])
def test_loss_and_gradients_equal_trls(pico_folder, samples, told, variant, budget):
    """In one batch and cut anyhow."""
    rows, _ = samples
    jobs, answers = told
    settings = THEIRS[variant]
    given = {"variant": variant, "beta": settings["beta"], "max_tokens": 40}
    surrogate = surrogate_of(GRPOConfig(train_data="x", **given))
    weights = token_weights([int(d.mask.sum()) for d in rows], variant, 40)
    model = load_model(ModelConfig(base_model=str(pico_folder), device="cpu"))
    learner = Learner(model.requires_grad_(True), LearnerConfig(token_budget=budget), 1)
    sums: dict = {}
    weighted = weighted_rows(rows, np.arange(4), np.array(weights))
    loss = learner.accumulate(weighted, surrogate_loss(surrogate, sums), 1.0)
    assert loss == pytest.approx(answers[variant], rel=1e-5, abs=1e-6)
    wanted = load_file(jobs[variant]["whole"])
    for name, parameter in learner.trained.items():
        np.testing.assert_allclose(parameter.grad, wanted[name], rtol=1e-3, atol=1e-6)
    assert sums["clip_fraction"] > 0
