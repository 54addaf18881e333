"""Search a recipe's weights, densities and the like with optuna for the best objective.

The objective is the caller's function from the folder of a merged model to a number. Called by
`sharpen merge search`.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from sharpen.config import parse_config
from sharpen.merge import require
from sharpen.merge.method import METHODS
from sharpen.merge.recipe import MergeConfig
from sharpen.merge.stream import DEFAULTS, MergeOptions, check_output, merge
from sharpen.types import Json, SharpenError

_Objective = Callable[[Path], float]
_ALWAYS_SEARCHED = ("weight", "density", "t")  # others only if the recipe sets them
_RANGES = {  # parameter → lowest and highest value tried
    "weight": (0.0, 1.0),
    "density": (0.1, 1.0),
    "t": (0.0, 1.0),
    "lambda": (0.3, 1.5),
    "gamma": (0.0, 0.1),
    "select_topk": (0.1, 1.0),
}


def search(
    recipe: MergeConfig,
    out: str | Path,
    objective: _Objective,
    trials: int = 20,
    options: MergeOptions = DEFAULTS,
    minimize: bool = False,
) -> Json:
    """Merge and score `trials` times, beginning with the recipe's own values.

    The best model so far stays in `out`.
    """
    try:
        import optuna
    except ImportError:
        problem = "merge search needs optuna: pip install 'sharpen[merge-search]'"
        raise SharpenError(problem) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    out = Path(out)
    start_values = _searched_parameters(recipe)
    check_output(out, options.overwrite)
    require(trials >= 1, f"trials {trials}: must be at least 1")
    require(start_values, f"{recipe.merge_method}: has no parameter to search")
    sampler = optuna.samplers.TPESampler(seed=options.seed)
    study = optuna.create_study(direction="minimize" if minimize else "maximize", sampler=sampler)
    known_values = {path: start for path, start in start_values.items() if start is not None}
    study.enqueue_trial(known_values)
    rows: list[Json] = []
    folder = out.with_name(f".{out.name}.trial")
    for _ in range(trials):
        trial = study.ask()
        values: dict[str, float] = {}
        for path, start in start_values.items():
            low, high = _search_range(path, start)
            values[path] = trial.suggest_float(path, low, high)
        try:
            merge(_set_values(recipe, values), folder, replace(options, overwrite=True))
            score = float(objective(folder))
            require(math.isfinite(score), f"the objective returned {score} for {values}")
            study.tell(trial, score)
            rows.append({"score": score, **values})
            if study.best_trial.number == trial.number:
                shutil.rmtree(out, ignore_errors=True)
                folder.rename(out)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return {"best": study.best_params, "score": study.best_value, "trials": rows, "out": str(out)}


def _searched_parameters(recipe: MergeConfig) -> dict[str, float | None]:
    """Returns the path in the recipe of each searched parameter, with the number set there.

    The value is None where the recipe sets no single number.
    """
    settings: dict[str, Any] = {}
    for name, parameter in METHODS[recipe.merge_method].parameters.items():
        is_searched = name in _ALWAYS_SEARCHED or name in recipe.parameters
        if name not in _RANGES or not is_searched:
            continue
        shared = recipe.parameters.get(name)
        if parameter.scope == "shared":
            settings[f"parameters.{name}"] = shared
            continue
        for i, entry in enumerate(recipe.models):
            if parameter.scope == "model" or entry.model != recipe.base_model:
                settings[f"models.{i}.parameters.{name}"] = entry.parameters.get(name, shared)
    start_values: dict[str, float | None] = {}
    for path, setting in settings.items():
        start_values[path] = float(setting) if isinstance(setting, (int, float)) else None
    return start_values


def _search_range(path: str, start: float | None) -> tuple[float, float]:
    """Returns the range of a parameter, widened so that it holds the recipe's own value."""
    low, high = _RANGES[path.rsplit(".", 1)[-1]]
    if start is None:
        return low, high
    return min(low, start), max(high, start)


def _set_values(recipe: MergeConfig, values: dict[str, float]) -> MergeConfig:
    """Returns the recipe with other values at these paths."""
    settings = OmegaConf.create(recipe.model_dump())
    for path, value in values.items():
        OmegaConf.update(settings, path, value)
    return parse_config(MergeConfig, OmegaConf.to_container(settings), "merge search")
