"""One GRPO step, ours and TRL's in one run on one device: seconds per step after the first two.

    python benchmarks/grpo.py FOLDER --race ours trl trl-static trl-continuous --out race.json

A model of SmolLM2-135M's shape with random weights, every weight trained, 16 prompts of one
dataset per step, 8 samples each, 256 tokens sampled (nothing ends earlier: the weights are random),
temperature 1, no KL, AdamW, bf16 on a GPU; the reward is the number of distinct letters. TRL has
its own settings as shipped but for one batch a step; `trl-static` has a static cache,
`trl-continuous` transformers' continuous batching, both no gradient checkpointing. `ours-ahead`
samples while the learner steps.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rollout import make_model

from sharpen.models.load import load_tokenizer
from sharpen.models.pico import build_pico
from sharpen.render import hermes_template
from sharpen.types import Score, Task, Trajectory

FLAGS: dict[str, dict[str, Any]] = {
    "trl": {},
    "trl-static": {"cache_implementation": "static", "gradient_checkpointing": False},
    "trl-continuous": {
        "use_transformers_continuous_batching": True,
        "gradient_checkpointing": False,
    },
}
WORDS = ("river", "stone", "cloud", "apple", "engine", "paper", "window", "garden", "silver")


def questions(count: int) -> list[str]:
    return [
        f"Say what a {WORDS[n % 9]} and a {WORDS[n // 9 % 9]} share, {n}." for n in range(count)
    ]


class Distinct:
    """The reward of both."""

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        return Score(distinct(trajectory.turns[-1].message.content))


def distinct(text: str) -> float:
    return len(set(text)) / 100


def make_folder(folder: Path, options: Any) -> None:
    """A model of random weights with a real tokenizer."""
    if (folder / "model").exists():
        return
    if options.shape == "pico":
        build_pico(folder / "model")
    else:
        make_model(options.shape, options.device).save_pretrained(folder / "model")
    if Path(options.tokenizer).is_dir():  # its files alone are enough
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    else:
        tokenizer = load_tokenizer(options.tokenizer)
    tokenizer.chat_template = hermes_template()
    tokenizer.save_pretrained(folder / "model")


def run_ours(options: Any, folder: Path, name: str) -> list[float]:
    from sharpen.records import write_jsonl
    from sharpen.rows import task_to_row
    from sharpen.train import run
    from sharpen.train.config.grpo import GRPOConfig
    from sharpen.train.grpo import GRPOTrainer

    run.write_report = lambda folder: folder  # TRL's environment draws nothing

    rows = [Task(str(n), text) for n, text in enumerate(questions(options.prompts * options.steps))]
    write_jsonl(folder / "tasks.jsonl", map(task_to_row, rows))
    output = folder / "ours"
    shutil.rmtree(output, ignore_errors=True)
    config = GRPOConfig(
        base_model=str(folder / "model"),
        train_data=str(folder / "tasks.jsonl"),
        device=options.device,
        dtype="bfloat16" if options.device == "cuda" else "float32",
        full=True,
        beta=0.0,
        tasks_per_step=options.prompts,
        group_size=options.samples,
        max_tokens=options.tokens,
        rollout_rows=options.prompts * options.samples,
        max_steps=options.steps,
        learning_rate=1e-6,
        token_budget=options.token_budget,
        save_steps=1_000_000,
        keep_checkpoints=1,
        compile=options.compile,
        async_steps=int(name == "ours-ahead"),
    )
    ended: list[float] = []
    trainer = GRPOTrainer(config, output, Distinct())
    update = trainer.update

    def timed(groups: Any, state: Any) -> Any:
        found = update(groups, state)
        ended.append(time.perf_counter())
        return found

    trainer.update = timed  # type: ignore[method-assign]
    trainer.train()
    for line in (output / "metrics.jsonl").read_text().splitlines()[-1:]:
        print({k: v for k, v in json.loads(line).items() if "second" in k or "per_s" in k})
    return ended


def run_trl(options: Any, folder: Path, name: str) -> list[float]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ended: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ended.append(time.perf_counter())

    rows = [
        [{"role": "user", "content": text}] for text in questions(options.prompts * options.steps)
    ]
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=options.prompts * options.samples,
        num_generations=options.samples,
        max_completion_length=options.tokens,
        max_steps=options.steps,
        bf16=options.device == "cuda",
        use_cpu=options.device == "cpu",
        learning_rate=1e-6,
        logging_steps=1000,
        save_strategy="no",
        report_to=[],
        **FLAGS[name],
    )
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype),
        args=arguments,
        reward_funcs=lambda completions, **_: [distinct(c[-1]["content"]) for c in completions],
        train_dataset=Dataset.from_dict({"prompt": rows}),
        processing_class=load_tokenizer(str(folder / "model")),
        callbacks=[Clock()],
    )
    trainer.train()
    return ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the model is made and runs are kept")
    parser.add_argument("--race", nargs="+", default=["ours", *FLAGS])
    parser.add_argument("--tokenizer", default="smollm2-135m")
    parser.add_argument("--shape", default="135m", help="also pico, the toy model of the tests")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--token-budget", type=int, default=32768)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = options.folder
    make_folder(folder, options)
    rows = []
    for name in options.race:
        ended = (
            run_ours(options, folder, name)
            if name.startswith("ours")
            else run_trl(options, folder, name)
        )
        steps = [later - before for before, later in pairwise(ended[1:])]
        rows.append({"name": name, "seconds": min(steps), "steps": [round(s, 3) for s in steps]})
        print(json.dumps(rows[-1]), flush=True)
        if options.out:
            options.out.write_text(json.dumps({"device": options.device, "rows": rows}))


if __name__ == "__main__":
    main()
