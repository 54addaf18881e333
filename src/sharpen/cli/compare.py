"""`sharpen compare`: training methods under one budget, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from sharpen.cli.shared import AsJson, Pairs, end_with
from sharpen.types import SharpenError


def compare(
    overrides: Annotated[Pairs, Argument(help="key=value, such as settings.lora_r=16.")] = None,
    method: Annotated[list[str] | None, Option(help="Only this one; may be repeated.")] = None,
    model: Annotated[str | None, Option(help="Model that every method starts from.")] = None,
    seeds: Annotated[int | None, Option(help="Number of runs per method.", min=1)] = None,
    config: Annotated[str | None, Option(help="Settings: a YAML file.")] = None,
    output: Annotated[Path, Option(help="Folder of the runs.")] = Path("runs/compare"),
    quick: Annotated[bool, Option(help="Toy model, dev loss: checks the plumbing.")] = False,
    full: Annotated[bool, Option(help="All seeds and the benchmark; the default.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train each method and show them side by side. The same command continues a stopped one.

    Example: sharpen compare --quick --output runs/compare"""
    from sharpen.config import load_yaml, parse_config
    from sharpen.evals.compare import QUICK_STAMP, CompareConfig, Comparison, flat_row, quick_config

    if quick and full:
        raise SharpenError("--quick or --full, not both")
    values = load_yaml(config, overrides or [])
    if method:
        values["methods"] = tuple(method)
    if model is not None:
        values["model"] = model
    if seeds is not None:
        values["seeds"] = seeds
    if quick:
        quick_values = quick_config().model_dump()
        settings = quick_values["settings"] | values.pop("settings", {})
        values = quick_values | values | {"settings": settings}
    comparison = Comparison(parse_config(CompareConfig, values, "compare"), output)
    rows = comparison.run()
    if quick:
        print(QUICK_STAMP)
    for row in rows:
        columns = [f"{key} {_format_value(value)}" for key, value in flat_row(row).items()]
        print("  ".join(columns))
    print(f"report: {output / 'report.html'}")
    end_with({"output": str(output), "rows": rows}, as_json)


def _format_value(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
