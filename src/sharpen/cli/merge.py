"""`sharpen merge`: models, adapters and task vectors, and the search for a recipe's best values."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from sharpen.cli.shared import AsJson, DefaultGroup, Pairs, end_with
from sharpen.types import Json, SharpenError

app = typer.Typer(
    cls=DefaultGroup,
    add_completion=False,
    rich_markup_mode="rich",
    no_args_is_help=True,
    help="Merge models by a recipe in mergekit's YAML; `sharpen merge CONFIG OUT` is `merge run`.",
    epilog="Example: sharpen merge recipe.yaml merged/",
)

_Recipe = Annotated[Path, Argument(help="A merge recipe: mergekit's YAML.")]
_Out = Annotated[Path, Argument(help="Folder of the merged model.")]
_Seed = Annotated[int, Option(help="Seed of the methods that draw (DARE, DELLA).")]
_Device = Annotated[str, Option(help="Where to compute: cpu, cuda, cuda:1 ...")]
_Evaluate = Annotated[
    str | None, Option(help="A JSONL file of tasks, or file.py:function(folder).")
]


@app.command()
def run(
    config: _Recipe,
    out: _Out,
    set_: Annotated[Pairs, Option("--set", help="Override: parameters.density=0.3")] = None,
    seed: _Seed = 0,
    device: _Device = "cpu",
    workers: Annotated[int, Option(help="Processes; 0: one per core, 8 at most.")] = 0,
    shard_gb: Annotated[float, Option(help="Largest size of an output file, in GB.")] = 5.0,
    overwrite: Annotated[bool, Option(help="Replace OUT if it exists.")] = False,
    evaluate: _Evaluate = None,
    as_json: AsJson = False,
) -> None:
    """Merge models as a recipe says.

    Example: sharpen merge recipe.yaml merged/ --set parameters.density=0.3"""
    # merging has its own processes; numpy reads this when it is imported
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    score_model = None
    if evaluate:
        score_model = _find_scorer(evaluate, "sharpen.evals.abilities", "evaluate_abilities")
    from sharpen.merge.recipe import load_recipe
    from sharpen.merge.stream import MergeOptions, keep_freed_memory, merge

    keep_freed_memory()
    shard_bytes = int(shard_gb * 1e9)
    options = MergeOptions(seed, workers, device, shard_bytes, overwrite, show=not as_json)
    report = merge(load_recipe(config, set_ or []), out, options)
    if score_model:
        report |= {"abilities": score_model(out)}
    _print_report(report, as_json)


@app.command()
def search(
    config: _Recipe,
    out: _Out,
    dev: Annotated[str | None, Option(help="JSONL file of dialogs: find the lowest loss.")] = None,
    objective: Annotated[str | None, Option(help="Or file.py:function(folder) -> float.")] = None,
    trials: Annotated[int, Option(help="Number of merges to try.")] = 20,
    minimize: Annotated[bool, Option(help="The lower the better, as for a loss.")] = False,
    seed: _Seed = 0,
    device: _Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Search a recipe's weights and densities for the best objective; OUT keeps the best model.

    Example: sharpen merge search recipe.yaml best/ --dev dev.jsonl --trials 30"""
    if (dev is None) == (objective is None):
        raise SharpenError("merge search: give --dev FILE or --objective file.py:function")
    score_model = _find_scorer(dev or str(objective), "sharpen.train.scoring", "dev_loss")
    from sharpen.merge.recipe import load_recipe
    from sharpen.merge.search import search as search_recipe
    from sharpen.merge.stream import MergeOptions

    options = MergeOptions(seed=seed, device=device)
    lower_is_better = minimize or dev is not None
    recipe = load_recipe(config)
    report = search_recipe(recipe, out, score_model, trials, options, lower_is_better)
    _print_report(report, as_json)


@app.command()
def adapters(
    folders: Annotated[list[Path], Argument(help="LoRA adapter folders.")],
    out: Annotated[Path, Option(help="Folder of the merged adapter.")],
    rank: Annotated[int, Option(help="Rank of the result.")] = 16,
    weight: Annotated[list[float] | None, Option(help="One for each adapter.")] = None,
    as_json: AsJson = False,
) -> None:
    """Merge LoRA adapters of one base into one, by SVD.

    Example: sharpen merge adapters math/ code/ --out both/ --rank 16 --weight 0.6 --weight 0.4"""
    from sharpen.merge.adapters import merge_adapters

    _print_report(merge_adapters(folders, out, rank, weight), as_json)


@app.command()
def vector(
    base: Annotated[Path, Argument(help="The base model.")],
    tuned: Annotated[str, Argument(help="The fine-tuned model, or base+adapter.")],
    out: Annotated[Path, Argument(help="The file to write, .safetensors.")],
    as_json: AsJson = False,
) -> None:
    """Write a tuning as a task vector; `base+vector.safetensors` is a model in any recipe.

    Example: sharpen merge vector base/ math/ math-vector.safetensors"""
    from sharpen.merge.adapters import open_reference
    from sharpen.merge.vectors import write_task_vector

    base_model = open_reference(str(base))
    tuned_model = open_reference(tuned, str(base))
    report = write_task_vector(base_model, tuned_model, out)
    _print_report({"out": str(out), **report}, as_json)


def _find_scorer(place: str, module: str, name: str) -> Callable[[Path], Any]:
    """Returns what scores a model folder: a user's `file.py:function`, or ours on a JSONL file."""
    from sharpen.tools import load_object

    if ".py:" in place:
        function = load_object(place)
        if not callable(function):
            raise SharpenError(f"{place}: is not a function")
        return function
    if not Path(place).is_file():
        raise SharpenError(f"{place}: no such file")

    def score_folder(folder: Path) -> Any:
        return getattr(import_module(module), name)(folder, place)

    return score_folder


def _print_report(report: Json, as_json: bool) -> None:
    """Print what was merged: as text, or as one JSON object."""
    for note in report.get("notes", []):
        print(f"note: {note}", file=sys.stderr)
    end_with(report, as_json)
    if not as_json:
        for key, value in report.items():
            if key != "notes":
                print(f"{key}: {value}")
