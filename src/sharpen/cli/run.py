"""`sharpen run`: a recipe from its first unfinished stage to its last."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from sharpen.cli.shared import AsJson, Pairs, end_with
from sharpen.types import Json

_COMPARED_METRICS = ("valid_call", "right_tool", "exact_call")


def run(
    recipe: Annotated[str, Argument(help="A recipe file, or a shipped recipe's name.")],
    overrides: Annotated[Pairs, Argument(help="key=value settings, such as model=pico.")] = None,
    out: Annotated[Path | None, Option(help="Run folder; runs/NAME by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a recipe: typed stages in order, finished ones skipped.

    Example: sharpen run quickstart model=pico --out runs/try"""
    from sharpen.pipeline import load_recipe, run_recipe

    loaded = load_recipe(recipe, overrides or [])
    folder = out or Path("runs") / loaded.name
    print(f"{loaded.name}: {loaded.about}" if loaded.about else loaded.name)
    results = run_recipe(loaded, folder, say=_print_now)
    for line in _comparison_lines(results):
        print(line)
    print(f"results: {folder / 'results.json'}")
    end_with({"path": str(folder), "results": results}, as_json)


def _print_now(text: str) -> None:
    print(text, flush=True)


def _comparison_lines(results: dict[str, Json]) -> list[str]:
    """Returns a line per metric that several stages measured: its values in order."""
    measured = {name: result for name, result in results.items() if "valid_call" in result}
    if len(measured) < 2:
        return []
    lines = []
    for metric in _COMPARED_METRICS:
        values = []
        for stage, result in measured.items():
            figure = result[metric]
            interval = f"[{figure['low']:.1%}, {figure['high']:.1%}]"
            values.append(f"{stage} {figure['mean']:.1%} {interval}")
        lines.append(f"{metric}: {' → '.join(values)}")
    return lines
