"""`sharpen train`: one verb a method."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from sharpen.cli.shared import AsJson, Pairs, end_with

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Train a model.")
# flag → its setting
FLAGS = {key: key for key in ("base_model", "dev_data", "max_steps", "save_steps", "seed")}
FLAGS |= {"data": "train_data", "epochs": "num_epochs", "sft_model": "base_model"}
FLAGS |= {key: key for key in ("beta", "num_samples", "group_size", "reward")}
# verb → its config, its trainer, what it does
METHODS = {
    "sft": ("AgentSFTConfig", "AgentSFTTrainer", "Fine-tune on dialogs."),
    "reward": ("RewardModelConfig", "RewardModelTrainer", "Train a reward model on preferences."),
    "dpo": ("DPOConfig", "DPOTrainer", "Optimise on preferences, or on tasks by sampled ones."),
    "grpo": ("GRPOConfig", "GRPOTrainer", "Try tasks, and learn from what went better."),
    "ppo": ("PPOConfig", "PPOTrainer", "Try tasks, and learn from them with a critic."),
}


@app.callback()
def train() -> None:
    if os.environ.get("RANK", "0") != "0":  # of several processes the first one speaks
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def train_by(
    context: typer.Context,
    overrides: Annotated[
        Pairs, Argument(help="Any setting as key=value, such as lora_r=16.")
    ] = None,
    config: Annotated[str | None, Option(help="Settings: a YAML file, or a preset.")] = None,
    base_model: Annotated[str | None, Option(help="Model to train.")] = None,
    data: Annotated[str | None, Option(help="agent_sft:train, or a JSONL file.")] = None,
    dev_data: Annotated[str | None, Option(help="agent_sft:dev, or a JSONL file.")] = None,
    output: Annotated[Path | None, Option(help="Run folder; else runs/VERB.")] = None,
    epochs: Annotated[int | None, Option(help="Passes over the data.")] = None,
    max_steps: Annotated[int | None, Option(help="Stop after so many steps.")] = None,
    save_steps: Annotated[int | None, Option(help="Steps between checkpoints.")] = None,
    seed: Annotated[int | None, Option(help="Seed of order, dropout and weights.")] = None,
    task_weights: Annotated[str | None, Option(help="sft: JSON, task type → share.")] = None,
    sft_model: Annotated[str | None, Option(help="Model or run to go on from.")] = None,
    beta: Annotated[float | None, Option(help="Weight of the reference.")] = None,
    num_samples: Annotated[int | None, Option(help="Answers sampled for each task.")] = None,
    group_size: Annotated[int | None, Option(help="grpo: samples of a task.")] = None,
    reward: Annotated[str | None, Option(help="grpo, ppo: a name, or file.py:name.")] = None,
    force: Annotated[bool, Option(help="grpo, ppo: start below the gate.")] = False,
    as_json: AsJson = False,
) -> None:
    import sharpen
    from sharpen.config import parse_config
    from sharpen.rows import parse_text
    from sharpen.types import SharpenError

    verb = str(context.info_name)
    kind, trainer = (getattr(sharpen, name) for name in METHODS[verb][:2])
    values, flags = settings(config, overrides or [], verb), context.params
    if base_model and sft_model:
        raise SharpenError("--base-model and --sft-model: two names of one thing, give one")
    values |= {FLAGS[key]: flags[key] for key in FLAGS if flags[key] is not None}
    if task_weights is not None:
        values["task_weights"] = parse_text(task_weights, "", "--task-weights")
    if force:
        values["min_dev_score"] = 0.0
        print("gate: not asked, by --force")
    output = output or Path("runs") / verb
    figures = trainer(parse_config(kind, values, f"train {verb}"), output).train()
    print(f"done: {output / 'final'}")
    end_with({"path": str(output / "final"), **figures}, as_json)


for verb, (*_, what) in METHODS.items():
    example = f"sharpen train {verb} --base-model smollm2-135m --data rows.jsonl"
    about = f"{what} The same command continues a run that was stopped."
    app.command(verb, help=f"{about}\n\nExample: {example} --output runs/{verb}")(train_by)


def settings(config: str | None, overrides: list[str], verb: str = "sft") -> dict[str, Any]:
    """A file's or a preset's settings without what only `sharpen estimate` reads."""
    from sharpen.config import load_yaml
    from sharpen.models.estimate import ESTIMATE_ONLY
    from sharpen.pipeline import recipe_path
    from sharpen.types import SharpenError

    values = load_yaml(recipe_path(config) if config else None, overrides)
    cards = values.get("cards", 1)
    if cards > int(os.environ.get("WORLD_SIZE", "1")):
        launch = f"torchrun --nproc_per_node {cards} -m sharpen.cli.main train {verb}"
        raise SharpenError(f"{config}: is made for {cards} cards; {launch} --config {config} …")
    return {key: value for key, value in values.items() if key not in ESTIMATE_ONLY}
