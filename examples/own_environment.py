"""An environment of your own: a game over several turns. SFT teaches its rules, then GRPO to win.

    python examples/own_environment.py                  # pico, a tiny random model: seconds
    python examples/own_environment.py smollm2-135m     # a real model: minutes on a laptop

The model guesses a number and is told "higher", "lower" or "correct". `reset` returns the first
prompt; `step` answers a message and may end the episode. Prints the share of games won by GRPO:

    games won: 6% in the first step, 38% in the last    (smollm2-135m: 44%, then 98%)
"""

import sys
from pathlib import Path

from sharpen import AgentSFTConfig, AgentSFTTrainer, Dialog, GRPOConfig, GRPOTrainer
from sharpen.records import read_jsonl, write_jsonl
from sharpen.types import Message, StopReason, Task, Trajectory

MODEL = sys.argv[1] if len(sys.argv) > 1 else "pico"
OUTPUT = Path("runs/examples/own_environment", Path(MODEL).name)
PICO = MODEL == "pico"  # has random weights: train all of them; of a real model, a LoRA adapter
SFT = {"max_steps": 20, "learning_rate": 1e-2 if PICO else 2e-4, "full": PICO}
GRPO = {"max_steps": 12, "learning_rate": 2e-3 if PICO else 1e-4, "full": PICO}
PLAY = {"tasks_per_step": 4, "group_size": 16, "max_turns": 4, "max_tokens": 8, "beta": 0.0}
PROMPT = "Guess my number from 1 to 9. Answer with one digit."


class GuessTheNumber:
    inline = True  # quick and in memory: needs no thread of its own

    def reset(self, task: Task) -> Dialog:
        self.number = task.gold["number"]
        return Dialog(task.messages, id=task.id)

    def step(self, message: Message) -> tuple[tuple[Message, ...], StopReason | None]:
        if message.content not in map(str, range(1, 10)):
            return (Message("user", "not a digit"),), StopReason.ANSWERED
        if int(message.content) == self.number:
            return (Message("user", "correct"),), StopReason.ANSWERED
        hint = "higher" if int(message.content) < self.number else "lower"
        return (Message("user", hint),), None


def score(task: Task, trajectory: Trajectory) -> float:
    return float(Message("user", "correct") in trajectory.turns[-1].results)


if __name__ == "__main__":  # the trainer imports this file to find GuessTheNumber and score
    question = {"role": "user", "content": PROMPT}
    guesses = [{"role": "assistant", "content": str(number)} for number in range(1, 10)]
    write_jsonl(OUTPUT / "sft.jsonl", [{"messages": [question, guess]} for guess in guesses])
    sft = AgentSFTConfig(base_model=MODEL, train_data=f"{OUTPUT}/sft.jsonl", **SFT)
    AgentSFTTrainer(sft, OUTPUT / "sft").train()
    tasks = [{"instruction": PROMPT, "gold": {"number": number}} for number in (2, 4, 6, 8)]
    write_jsonl(OUTPUT / "tasks.jsonl", tasks)
    GRPO |= {"base_model": f"{OUTPUT}/sft", "train_data": f"{OUTPUT}/tasks.jsonl"}
    GRPO |= {"env": f"{__file__}:GuessTheNumber", "reward": f"{__file__}:score"}
    GRPOTrainer(GRPOConfig(**GRPO, **PLAY), OUTPUT / "grpo").train()
    rewards = [row.value["reward"] for row in read_jsonl(OUTPUT / "grpo/metrics.jsonl")]
    print(f"games won: {rewards[0]:.0%} in the first step, {rewards[-1]:.0%} in the last")
