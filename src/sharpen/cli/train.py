"""`sharpen train`: one verb a method."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, help="Train a model.")


@app.callback()
def train() -> None:
    if os.environ.get("RANK", "0") != "0":  # of several processes the first one speaks
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


@app.command()
def sft(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Any setting as key=value, such as lora_r=16.")
    ] = None,
    config: Annotated[str | None, typer.Option(help="Settings: a YAML file, or a preset.")] = None,
    base_model: Annotated[str | None, typer.Option(help="Model to train.")] = None,
    data: Annotated[str | None, typer.Option(help="agent_sft:train, or a JSONL file.")] = None,
    dev_data: Annotated[str | None, typer.Option(help="agent_sft:dev, or a JSONL file.")] = None,
    output: Annotated[Path, typer.Option(help="Run folder.")] = Path("runs/sft"),
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Stop after so many steps.")] = None,
    save_steps: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of order, dropout and weights.")] = None,
    task_weights: Annotated[str | None, typer.Option(help="JSON: task type → share.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON object.")] = False,
) -> None:
    """Fine-tune on dialogs. The same command continues a run that was stopped.

    Example: sharpen train sft --base-model smollm2-135m --data train.jsonl --output runs/sft
    """
    from sharpen.config import parse_config
    from sharpen.train.config import AgentSFTConfig
    from sharpen.train.sft import AgentSFTTrainer

    values = settings(config, overrides or [])
    flags = {
        "base_model": base_model,
        "train_data": data,
        "dev_data": dev_data,
        "num_epochs": epochs,
        "max_steps": max_steps,
        "save_steps": save_steps,
        "seed": seed,
        "task_weights": None if task_weights is None else parse_json(task_weights),
    }
    values |= {key: value for key, value in flags.items() if value is not None}
    trainer = AgentSFTTrainer(parse_config(AgentSFTConfig, values, "train sft"), output)
    figures = trainer.train()
    print(f"done: {output / 'final'}")
    if as_json:
        print(json.dumps({"path": str(output / "final"), **figures}))


def settings(config: str | None, overrides: list[str]) -> dict[str, Any]:
    """A file's or a preset's settings without what only `sharpen estimate` reads."""
    from sharpen.config import load_yaml
    from sharpen.models.estimate import ESTIMATE_ONLY
    from sharpen.pipeline import recipe_path
    from sharpen.types import SharpenError

    values = load_yaml(recipe_path(config) if config else None, overrides)
    cards = values.get("cards", 1)
    if cards > int(os.environ.get("WORLD_SIZE", "1")):
        launch = f"torchrun --nproc_per_node {cards} -m sharpen.cli.main train sft"
        raise SharpenError(f"{config}: is made for {cards} cards; {launch} --config {config} …")
    return {key: value for key, value in values.items() if key not in ESTIMATE_ONLY}


def parse_json(text: str) -> Any:
    from sharpen.types import SharpenError

    try:
        return json.loads(text)
    except ValueError as error:
        raise SharpenError(f"--task-weights: not JSON: {error}") from None
