"""Reinforcement learning (GRPO) with a reward of your own.

    python examples/grpo_own_reward.py                  # pico, a tiny random model: seconds
    python examples/grpo_own_reward.py smollm2-135m     # a real model: minutes on a laptop

A reward is a function of the task and of what the model did. `score` gives 1 for the right number,
and a little for every digit, so that a model that answers in words can learn, too.
Prints the mean reward of the first and of the last step:

    reward: 0.02 in the first step, 0.11 in the last    (smollm2-135m: 0.00, then 0.43)

From the command line: sharpen train grpo reward=examples/grpo_own_reward.py:score ...
"""

import sys
from pathlib import Path

from sharpen import GRPOConfig, GRPOTrainer, Task, Trajectory
from sharpen.records import read_jsonl, write_jsonl

MODEL = sys.argv[1] if len(sys.argv) > 1 else "pico"
OUTPUT = Path("runs/examples/grpo_own_reward", Path(MODEL).name)
SETTINGS = {"learning_rate": 1e-4, "max_steps": 12, "lora_r": 16}  # trains a LoRA adapter
if MODEL == "pico":  # has random weights: train all of them
    SETTINGS = {"learning_rate": 5e-3, "max_steps": 12, "full": True}
ROWS = [
    {"instruction": "Days of a week? Only the number.", "gold": {"answer": "7"}},
    {"instruction": "Legs of a spider? Only the number.", "gold": {"answer": "8"}},
    {"instruction": "Wheels of a car? Only the number.", "gold": {"answer": "4"}},
    {"instruction": "Sides of a triangle? Only the number.", "gold": {"answer": "3"}},
]


def score(task: Task, trajectory: Trajectory) -> float:
    answer = trajectory.turns[-1].message.content.strip()
    if answer == task.gold["answer"]:
        return 1.0
    digits = [character for character in answer if character in "0123456789"]
    return 0.4 * len(digits) / max(len(answer), 1)


if __name__ == "__main__":  # the trainer imports this file to find `score`
    write_jsonl(OUTPUT / "tasks.jsonl", ROWS)
    config = GRPOConfig(
        base_model=MODEL,
        train_data=f"{OUTPUT}/tasks.jsonl",
        reward=f"{__file__}:score",
        tasks_per_step=len(ROWS),
        group_size=8,
        max_tokens=16,
        beta=0.0,  # no KL to a reference model
        **SETTINGS,
    )
    GRPOTrainer(config, OUTPUT / "run").train()
    rewards = [row.value["reward"] for row in read_jsonl(OUTPUT / "run/metrics.jsonl")]
    print(f"reward: {rewards[0]:.2f} in the first step, {rewards[-1]:.2f} in the last")
