"""`sharpen compare`: training methods under one budget."""

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
    seeds: Annotated[int | None, Option(help="Runs of each method.", min=1)] = None,
    config: Annotated[str | None, Option(help="Settings: a YAML file.")] = None,
    output: Annotated[Path, Option(help="Folder of the runs.")] = Path("runs/compare"),
    quick: Annotated[bool, Option(help="Toy model, dev loss: checks the plumbing.")] = False,
    full: Annotated[bool, Option(help="All seeds and the benchmark; the default.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train each method and show them side by side. The same command goes on where it stopped.

    Example: sharpen compare --quick --output runs/compare"""
    from sharpen.config import load_yaml, parse_config
    from sharpen.evals.compare import QUICK_STAMP, CompareConfig, Comparison, flat_row, quick_config

    if quick and full:
        raise SharpenError("--quick or --full, not both")
    values = load_yaml(config, overrides or [])
    values |= {"methods": tuple(method)} if method else {}
    values |= {k: v for k, v in (("model", model), ("seeds", seeds)) if v is not None}
    if quick:
        start = quick_config().model_dump()
        settings = start["settings"] | values.pop("settings", {})
        values = start | values | {"settings": settings}
    comparison = Comparison(parse_config(CompareConfig, values, "compare"), output)
    rows = comparison.run()
    if quick:
        print(QUICK_STAMP)
    for row in rows:
        print("  ".join(f"{key} {shown(value)}" for key, value in flat_row(row).items()))
    print(f"report: {output / 'report.html'}")
    end_with({"output": str(output), "rows": rows}, as_json)


def shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
