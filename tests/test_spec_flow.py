"""The specification's commands and script, on the toy model: what a reader of it types works."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMMANDS = """
sharpen train sft --base-model pico --data agent_sft:train --output ./output/agent_sft_v1 --epochs 3
  --task-weights '{"tool_selection":0.35,"planning":0.30,"timing":0.20,"retrieval":0.15}'
  max_length=8192 max_steps=3 batch_size=2
sharpen train dpo --sft-model ./output/agent_sft_v1 --data agent_benchmark:train
  --output ./output/agent_dpo_v1 --beta 0.1 --num-samples 4
  max_length=8192 max_steps=2 tasks_per_round=12 max_tokens=24 reward={reward}
sharpen evaluate --model ./output/agent_dpo_v1 --benchmark agent_benchmark:test
  --metrics tool_accuracy,plan_success,efficiency --limit 30 max_tokens=24
"""
SCRIPT = """
from small_quickstart import Variety
from sharpen import (
    AgentLoRATrainer, AgentRewardConfig, AgentRewardModel, AgentRLTrainer, AgentSFTConfig,
    AgentTrainingEvaluator, AgentTrainingUsage, RLTrainingConfig,
)

tiny = {"max_steps": 2, "max_length": 8192, "batch_size": 2}
sft_config = AgentSFTConfig(base_model="pico", num_epochs=3, **tiny)
sft_trainer = AgentLoRATrainer(sft_config)
sft_trainer.train()
sft_trainer.save_model("./output/agent_sft")

small = {"max_steps": 2, "tasks_per_round": 12, "max_tokens": 24, "max_length": 8192}
rl_config = RLTrainingConfig(algorithm="dpo", settings=small)
reward_model = AgentRewardModel(AgentRewardConfig())
reward_model = Variety()  # babble is all worth the same to the real one
rl_trainer = AgentRLTrainer(
    config=rl_config, base_model_path="pico", sft_model_path="./output/agent_sft",
    reward_model=reward_model,
)
rl_trainer.train()
rl_trainer.save_model("./output/agent_dpo")

benchmark_loader = AgentTrainingUsage()
evaluator = AgentTrainingEvaluator(benchmark_loader, options={"limit": 30, "max_tokens": 24})
results = evaluator.evaluate(model=rl_trainer.model, split="test")
print(f"Tool Selection Accuracy: {results['tool_selection_accuracy']['mean']:.2%}")
print(f"Plan Success Rate: {results['plan_success_rate']['mean']:.2%}")
"""


@pytest.fixture
def there(agent_data, tmp_path):
    """Run something in an empty folder, with the small sets in place of the built ones."""
    tests = os.path.dirname(os.path.abspath(__file__))
    own = {"SHARPEN_DATA": str(agent_data), "PYTHONPATH": os.pathsep.join([tests, *sys.path])}

    def run(command, shell=False):
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | own, capture_output=True, text=True, shell=shell
        )
        assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
        return done.stdout

    run.folder = tmp_path
    return run


@pytest.mark.slow
def test_the_commands(there):
    from small_quickstart import REWARD

    program = f"{sys.executable} -m sharpen.cli.main"
    text = COMMANDS.replace("{reward}", REWARD).replace("\n  ", " ").strip()
    for command in text.splitlines():
        said = there(command.replace("sharpen ", f"{program} ", 1), shell=True)
    assert "tool_accuracy" in said and "plan_success" in said and "efficiency" in said
    for name in ("agent_sft_v1", "agent_dpo_v1"):
        assert (there.folder / "output" / name / "report.html").is_file()
    page = next((there.folder / "runs" / "evaluate").glob("*/report.html")).read_text()
    assert "Errors by kind" in page and "Failures, the longest first" in page


@pytest.mark.slow
def test_the_script(there):
    said = there([sys.executable, "-c", SCRIPT])
    assert "Tool Selection Accuracy: " in said and "Plan Success Rate: " in said
