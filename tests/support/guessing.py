"""A pico model that guesses among four letters, and tasks that each want one of them: what the
tests of RL learn on."""

from __future__ import annotations

import json
import random
from pathlib import Path

from sharpen.models.load import ModelConfig
from sharpen.policy.local import LocalPolicy
from sharpen.train.config.sft import AgentSFTConfig
from sharpen.train.sft import AgentSFTTrainer
from sharpen.types import Dialog, Message, Sampling

LETTERS = "ABCD"
QUESTIONS = ("n", "e", "s", "w")
CLOCK = ("seconds", "per_s")  # figures of a row that no two runs share


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def failure(word: str) -> str:
    return json.dumps({"error": word})


def tasks(folder: Path, kind: str = "exact") -> str:
    """Each question with its own right letter."""
    rows = [
        {"id": word, "instruction": word, "gold": {"answer": LETTERS[i % 4]}, "kind": kind}
        for i, word in enumerate(QUESTIONS)
    ]
    return write(folder / "tasks.jsonl", rows)


def guesser(base: Path, folder: Path, again: bool = False) -> Path:
    """`base` taught to answer each question with any of the letters, and `again` when a tool says
    that the first one failed. Other words, which have one answer each, teach it to read what it is
    asked."""
    chance, rows = random.Random(0), []
    for _ in range(60):
        for word in (*QUESTIONS, *LETTERS.lower()):
            asked: list[dict] = [{"role": "user", "content": word}]
            for _ in range(1 + again):
                letter = chance.choice(LETTERS) if word in QUESTIONS else word.upper()
                asked = [*asked, {"role": "assistant", "content": letter}]
                rows.append({"messages": asked})
                asked = [*asked, {"role": "tool", "name": "ask", "content": failure(word)}]
    data = write(folder / "guesses.jsonl", rows)
    config = AgentSFTConfig(
        base_model=str(base), train_data=data, full=True, learning_rate=4e-3, max_steps=180,
        batch_size=32, gradient_accumulation=1, device="cpu", lr_scheduler="linear",
    )  # fmt: skip
    AgentSFTTrainer(config, folder / "guesser").train()
    return folder / "guesser" / "final"


def metrics(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.endswith(CLOCK)} for row in rows]


def accuracy(model: Path) -> float:
    """How often it answers right, sampled."""
    policy = LocalPolicy.load(ModelConfig(base_model=str(model), device="cpu"))
    asked = [(word, LETTERS[i % 4]) for i, word in enumerate(QUESTIONS) for _ in range(100)]
    dialogs = [Dialog((Message("user", word),)) for word, _ in asked]
    turns = policy.respond(dialogs, Sampling(max_tokens=4, temperature=1.0))
    said = [turn.message.content for turn in turns]
    return sum(text == right for text, (_, right) in zip(said, asked, strict=True)) / len(asked)
