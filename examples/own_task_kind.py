"""A task kind of your own: what a right answer is, and how it is scored.

    python examples/own_task_kind.py                  # pico, a tiny random model: seconds
    python examples/own_task_kind.py smollm2-135m     # a real model

Rows name the kind as `file.py:name`. Evaluation and training then score them by its reward. Prints
the accuracy of the right answers themselves, which shows that the reward works, and of the model:

    baseline:gold solves 100% of the tasks
    pico solves 0% of the tasks

The same from the command line:
    sharpen evaluate --model pico --benchmark tasks:runs/examples/own_task_kind/tasks.jsonl
"""

import sys
from pathlib import Path

from sharpen import AgentTrainingEvaluator, Message, Score, Task, Trajectory
from sharpen.kinds import TaskKind
from sharpen.records import write_jsonl

MODEL = sys.argv[1] if len(sys.argv) > 1 else "pico"
OUTPUT = Path("runs/examples/own_task_kind")
WORDS = ["cat", "house", "summer", "rhythm"]


def spell(word: str) -> str:
    return "-".join(word.upper())


class SpellingReward:
    def score(self, task: Task, trajectory: Trajectory) -> Score:
        answer = trajectory.turns[-1].message.content.strip()
        expected = spell(task.gold["word"])
        if answer == expected:
            return Score(1.0, solved=True)
        return Score(0.0, feedback=f"expected {expected}", solved=False)


def right_answer(task: Task) -> list[Message]:
    return [Message("assistant", spell(task.gold["word"]))]


spelling = TaskKind(
    name="spelling",
    about="a word, letter by letter",
    make_reward=SpellingReward,
    gold_messages=right_answer,
    max_tokens=32,
)

if __name__ == "__main__":  # the evaluation imports this file to find `spelling`
    kind = f"{__file__}:spelling"
    prompt = "Spell this word in capitals with hyphens, as in D-O-G: "
    rows = [{"instruction": prompt + word, "gold": {"word": word}, "kind": kind} for word in WORDS]
    write_jsonl(OUTPUT / "tasks.jsonl", rows)
    evaluator = AgentTrainingEvaluator(f"tasks:{OUTPUT}/tasks.jsonl", options={"general": False})
    for model in ("baseline:gold", MODEL):
        print(f"{model} solves {evaluator.evaluate(model)['accuracy']['mean']:.0%} of the tasks")
