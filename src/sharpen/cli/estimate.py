"""`sharpen estimate`: what a recipe or preset needs, before it is run."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from sharpen.cli.shared import AsJson, Pairs, end_with
from sharpen.types import Json, SharpenError

if TYPE_CHECKING:
    from sharpen.models.estimate import Estimate

_STARTER_PROMPT_TOKENS = 256  # a prompt of the starter set has at most this many


def estimate(
    recipe: Annotated[str | None, Argument(help="A preset or recipe: file or name.")] = None,
    overrides: Annotated[Pairs, Argument(help="key=value settings, such as batch_size=8.")] = None,
    table: Annotated[bool, Option("--table", help="The specification's table 6.1.")] = False,
    as_json: AsJson = False,
) -> None:
    """Parameters, memory by part, tokens and estimated time.

    Example: sharpen estimate production batch_size=8"""
    from sharpen.config import load_yaml
    from sharpen.pipeline import recipe_path

    if table == (recipe is not None):
        raise SharpenError("name a recipe, or ask for --table")
    if recipe is None:
        rows = _print_spec_table()
    else:
        values = load_yaml(recipe_path(recipe), overrides or [])
        if isinstance(values, dict) and "stages" in values:
            rows = _estimate_recipe(recipe, overrides or [])
        else:
            rows = [_estimate_preset(recipe, values)]
    end_with({"estimates": rows}, as_json)


def _estimate_preset(name: str, values: Any) -> Json:
    """Print the estimate of a preset of training settings, and return its JSON row."""
    from sharpen.config import parse_config
    from sharpen.models.estimate import Preset, estimate

    preset = parse_config(Preset, values, name)
    weights = f"LoRA r={preset.lora_r}" if preset.lora_r else "full fine-tuning"
    title = f"{name}: {preset.base_model}, {preset.method}, {weights}"
    return _print_estimate(title, name, estimate(preset))


def _estimate_recipe(recipe_name: str, overrides: list[str]) -> list[Json]:
    """Print the estimates of those stages of a recipe that evaluate a model."""
    from sharpen.models.estimate import estimate_inference
    from sharpen.pipeline import EvaluateStage, StarterStage, load_recipe, stage_name

    recipe = load_recipe(recipe_name, overrides)
    tasks = sum(stage.test for stage in recipe.stages if isinstance(stage, StarterStage))
    rows = []
    for stage in recipe.stages:
        if isinstance(stage, EvaluateStage):
            tokens = tasks * (_STARTER_PROMPT_TOKENS + stage.max_tokens)
            needs = estimate_inference(stage.model, tasks, tokens, stage.batch_size)
            name = stage_name(stage)
            rows.append(_print_estimate(f"{recipe.name}, {name}: {stage.model}", name, needs))
    return rows


def _print_spec_table() -> list[Json]:
    """Print the specification's table beside our own estimates, and return its JSON rows."""
    from rich.console import Console
    from rich.table import Table

    from sharpen.models.estimate import SPEC_TABLE, estimate

    headings = (
        "stage",
        "cards",
        "data",
        "memory: spec",
        "kept / recomputed",
        "time: spec",
        "ours",
    )
    table = Table(*headings)
    rows = []
    for stage, data, spec_gb, spec_hours, preset in SPEC_TABLE:
        kept = estimate(preset)
        recomputed = estimate(preset.model_copy(update={"gradient_checkpointing": True}))
        kept_gib = kept.total_gib * preset.cards
        recomputed_gib = recomputed.total_gib * preset.cards
        table.add_row(
            stage,
            f"{preset.cards} × {preset.card}",
            data,
            f"~{spec_gb:g} GB",
            f"{kept_gib:.0f} / {recomputed_gib:.0f} GiB",
            f"~{spec_hours:g} h",
            f"{kept.hours:.1f} h",
        )
        rows.append(
            {
                "stage": stage,
                "spec_gb": spec_gb,
                "gib": kept_gib,
                "gib_checkpointing": recomputed_gib,
                "spec_hours": spec_hours,
                "hours": kept.hours,
            }
        )
    Console().print(table)
    print(
        "kept / recomputed: activations kept for the backward pass, or gradient_checkpointing=true"
    )
    return rows


def _print_estimate(title: str, name: str, needs: Estimate) -> Json:
    """Print an estimate and return its JSON row."""
    print(title)
    share = f" ({needs.trainable / needs.parameters:.2%} trained)" if needs.trainable else ""
    print(f"  parameters   {needs.parameters:>16,}{share}")
    for part, gib in needs.memory_gib.items():
        if gib:
            print(f"  {part:<12} {gib:>12.2f} GiB per card")
    print(f"  {'total':<12} {needs.total_gib:>12.2f} GiB per card")
    hours = f"{needs.hours:.1f} h" if needs.hours >= 1 else f"{needs.hours * 60:.0f} min"
    print(f"  tokens       {needs.tokens:>16,}, about {hours}")
    print(f"  {needs.note}")
    return asdict(needs) | {"name": name, "total_gib": needs.total_gib}
