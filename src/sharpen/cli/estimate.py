"""`sharpen estimate`: what a recipe or preset needs, before it is run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from typer import Argument, Option

from sharpen.cli.shared import AsJson, Pairs, end_with


def estimate(
    recipe: Annotated[str | None, Argument(help="A preset or recipe: file or name.")] = None,
    overrides: Annotated[Pairs, Argument(help="key=value settings, such as batch_size=8.")] = None,
    table: Annotated[bool, Option("--table", help="The specification's table 6.1.")] = False,
    as_json: AsJson = False,
) -> None:
    """Parameters, memory by part, tokens and a guess at the time.

    Example: sharpen estimate production batch_size=8"""
    from sharpen.config import load_yaml
    from sharpen.pipeline import recipe_path
    from sharpen.types import SharpenError

    if table == (recipe is not None):
        raise SharpenError("name a recipe, or ask for --table")
    if recipe is None:
        rows = spec_table()
    else:
        values = load_yaml(recipe_path(recipe), overrides or [])
        staged = isinstance(values, dict) and "stages" in values
        rows = recipe_rows(recipe, overrides or []) if staged else [preset_row(recipe, values)]
    end_with({"estimates": rows}, as_json)


def preset_row(name: str, values: Any) -> dict:
    from sharpen.config import parse_config
    from sharpen.models.estimate import Preset, estimate

    preset = parse_config(Preset, values, name)
    how = f"LoRA r={preset.lora_r}" if preset.lora_r else "full fine-tuning"
    return shown(f"{name}: {preset.base_model}, {preset.method}, {how}", name, estimate(preset))


def recipe_rows(name: str, overrides: list[str]) -> list[dict]:
    """A staged recipe: each stage that runs a model."""
    from sharpen.models.estimate import inference
    from sharpen.pipeline import EvaluateStage, StarterStage, load_recipe, stage_name

    recipe = load_recipe(name, overrides)
    rows = []
    tasks = sum(stage.test for stage in recipe.stages if isinstance(stage, StarterStage))
    for stage in recipe.stages:
        if isinstance(stage, EvaluateStage):
            tokens = tasks * (256 + stage.max_tokens)  # a starter prompt has at most 256 tokens
            found = inference(stage.model, tasks, tokens, stage.batch_size)
            name = stage_name(stage)
            rows.append(shown(f"{recipe.name}, {name}: {stage.model}", name, found))
    return rows


def spec_table() -> list[dict]:
    from rich.console import Console
    from rich.table import Table

    from sharpen.models.estimate import SPEC_TABLE, estimate

    heads = ("stage", "cards", "data", "memory: spec", "kept / recomputed", "time: spec", "ours")
    shown, rows = Table(*heads), []
    for stage, data, spec_gb, spec_hours, preset in SPEC_TABLE:
        kept = estimate(preset)
        less = estimate(preset.model_copy(update={"gradient_checkpointing": True}))
        gib, gib_less = (found.total_gib * preset.cards for found in (kept, less))
        memory = f"~{spec_gb:g} GB", f"{gib:.0f} / {gib_less:.0f} GiB"
        hours = f"~{spec_hours:g} h", f"{kept.hours:.1f} h"
        shown.add_row(stage, f"{preset.cards} × {preset.card}", data, *memory, *hours)
        row = {"stage": stage, "spec_gb": spec_gb, "gib": gib, "gib_checkpointing": gib_less}
        rows.append(row | {"spec_hours": spec_hours, "hours": kept.hours})
    Console().print(shown)
    recomputed = "or gradient_checkpointing=true"
    print(f"kept / recomputed: activations kept for the backward pass, {recomputed}")
    return rows


def shown(title: str, name: str, found: Any) -> dict:
    """Print an estimate; its row of the JSON object."""
    print(title)
    share = f" ({found.trainable / found.parameters:.2%} trained)" if found.trainable else ""
    print(f"  parameters   {found.parameters:>16,}{share}")
    for part, gib in found.memory_gib.items():
        if gib:
            print(f"  {part:<12} {gib:>12.2f} GiB a card")
    print(f"  {'total':<12} {found.total_gib:>12.2f} GiB a card")
    hours = f"{found.hours:.1f} h" if found.hours >= 1 else f"{found.hours * 60:.0f} min"
    print(f"  tokens       {found.tokens:>16,}, about {hours}")
    print(f"  {found.note}")
    return asdict(found) | {"name": name, "total_gib": found.total_gib}
