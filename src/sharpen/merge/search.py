"""Weights, densities and the like of a recipe, searched with optuna for the best objective: the
caller's function from the folder of a merged model to a number."""

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

Objective = Callable[[Path], float]
ALWAYS = ("weight", "density", "t")
RANGES = {  # parameter → lowest and highest value tried
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
    objective: Objective,
    trials: int = 20,
    options: MergeOptions = DEFAULTS,
    minimize: bool = False,
) -> Json:
    """Merge, score, choose again, from the recipe's values on; the best model stays in `out`."""
    try:
        import optuna
    except ImportError:
        text = "merge search needs optuna: pip install 'sharpen[merge-search]'"
        raise SharpenError(text) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    out, places = Path(out), knobs(recipe)
    check_output(out, options.overwrite)
    require(trials >= 1, f"trials {trials}: must be at least 1")
    require(places, f"{recipe.merge_method}: has no parameter to search")
    sampler = optuna.samplers.TPESampler(seed=options.seed)
    study = optuna.create_study(direction="minimize" if minimize else "maximize", sampler=sampler)
    study.enqueue_trial({knob: start for knob, start in places.items() if start is not None})
    rows, folder = list[Json](), out.with_name(f".{out.name}.trial")
    for _ in range(trials):
        trial = study.ask()
        chosen = {knob: trial.suggest_float(knob, *limits(knob, at)) for knob, at in places.items()}
        try:
            merge(with_values(recipe, chosen), folder, replace(options, overwrite=True))
            score = float(objective(folder))
            require(math.isfinite(score), f"the objective returned {score} for {chosen}")
            study.tell(trial, score)
            rows.append({"score": score, **chosen})
            if study.best_trial.number == trial.number:
                shutil.rmtree(out, ignore_errors=True)
                folder.rename(out)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return {"best": study.best_params, "score": study.best_value, "trials": rows, "out": str(out)}


def knobs(recipe: MergeConfig) -> dict[str, float | None]:
    """Place of a weight, density, t or what else the recipe sets → the number there, if any."""
    found: dict[str, Any] = {}
    for name, parameter in METHODS[recipe.merge_method].parameters.items():
        if name not in RANGES or not (name in ALWAYS or name in recipe.parameters):
            continue
        shared = recipe.parameters.get(name)
        if parameter.scope == "shared":
            found[f"parameters.{name}"] = shared
            continue
        for i, entry in enumerate(recipe.models):
            if parameter.scope == "model" or entry.model != recipe.base_model:
                found[f"models.{i}.parameters.{name}"] = entry.parameters.get(name, shared)
    return {k: float(v) if isinstance(v, (int, float)) else None for k, v in found.items()}


def limits(knob: str, start: float | None) -> tuple[float, float]:
    low, high = RANGES[knob.rsplit(".", 1)[-1]]
    return (low, high) if start is None else (min(low, start), max(high, start))


def with_values(recipe: MergeConfig, chosen: dict[str, float]) -> MergeConfig:
    values = OmegaConf.create(recipe.model_dump())
    for place, value in chosen.items():
        OmegaConf.update(values, place, value)
    return parse_config(MergeConfig, OmegaConf.to_container(values), "merge search")
