"""`sharpen run`: a recipe from its first unfinished stage to its last."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from sharpen.cli.shared import AsJson, Pairs, end_with


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
    results = run_recipe(loaded, folder, say=lambda text: print(text, flush=True))
    for line in gains(results):
        print(line)
    print(f"results: {folder / 'results.json'}")
    end_with({"path": str(folder), "results": results}, as_json)


def gains(results: dict[str, dict]) -> list[str]:
    """Each rate that several stages measured, in order, with its interval."""
    measured = {name: result for name, result in results.items() if "valid_call" in result}
    if len(measured) < 2:
        return []
    lines = []
    for metric in ("valid_call", "right_tool", "exact_call"):
        rows = {name: result[metric] for name, result in measured.items()}
        shown = [f"{n} {r['mean']:.1%} [{r['low']:.1%}, {r['high']:.1%}]" for n, r in rows.items()]
        lines.append(f"{metric}: {' → '.join(shown)}")
    return lines
