"""Merge recipes in mergekit's YAML, and the value of a parameter for one tensor of a model.

Called by `sharpen merge`, `plan`, `search` and `merger`. Importing this module registers all
methods.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from sharpen.config import Config, load_config
from sharpen.merge import methods, require, task_vector_methods  # noqa: F401 - they register methods
from sharpen.merge.method import METHODS, REQUIRED, Parameter
from sharpen.merge.tiles import Dtype

_Scalar = bool | int | float | str
# mergekit's way to save memory; here nothing is kept in memory that it would make smaller
_IGNORED_PARAMETERS = ("int8_mask",)


class Conditional(Config):
    """A value for the tensors whose name contains `filter`; without a filter, for all."""

    value: _Scalar | list[_Scalar]
    filter: str | None = None


Setting = Conditional | list[Conditional] | _Scalar | list[_Scalar]
Settings = dict[str, Setting]  # parameter → its setting


class InputModel(Config):
    """A model to merge, with parameters of its own."""

    model: str
    parameters: Settings = Field(default_factory=dict)


class LayerSource(InputModel):
    """The layers of one model that go into a slice: the first, and the one after the last."""

    layer_range: tuple[int, int]


class Slice(Config):
    """Consecutive layers of the result, merged from layers of several models."""

    sources: list[LayerSource] = Field(min_length=1)
    base_model: str | None = None
    parameters: Settings = Field(default_factory=dict)


class TokenizerConfig(Config):
    """Whose vocabulary the result has."""

    source: str = "union"  # union, base, or a model
    pad_to_multiple_of: int | None = Field(None, gt=0)


class MergeConfig(Config):
    """A merge recipe. It merges either whole `models` or `slices` of them."""

    merge_method: str
    models: list[InputModel] = Field(default_factory=list)
    slices: list[Slice] = Field(default_factory=list)
    base_model: str | None = None
    parameters: Settings = Field(default_factory=dict)
    dtype: Dtype | None = None
    out_dtype: Dtype | None = None
    tokenizer_source: str | None = None
    tokenizer: TokenizerConfig | None = None
    chat_template: str | None = None

    def all_settings(self) -> Iterator[tuple[str, Settings]]:
        """Yields every block of parameters with its place in the recipe."""
        yield "parameters", self.parameters
        for i, entry in enumerate(self.models):
            yield f"models.{i}.parameters", entry.parameters
        for i, part in enumerate(self.slices):
            yield f"slices.{i}.parameters", part.parameters
            for j, source in enumerate(part.sources):
                yield f"slices.{i}.sources.{j}.parameters", source.parameters

    @property
    def references(self) -> list[str]:
        """Every model named, in order, the base first."""
        names = [self.base_model]
        names += [entry.model for entry in self.models]
        for part in self.slices:
            names.append(part.base_model)
            names += [source.model for source in part.sources]
        return list(dict.fromkeys(name for name in names if name))  # each once


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> MergeConfig:
    """Read and check a recipe: a YAML file with `key=value` overrides."""
    config = load_config(MergeConfig, path, overrides)
    check_recipe(config, str(path))
    return config


def check_recipe(config: MergeConfig, where: str = "merge") -> None:
    """Raise if fields exclude each other, or if a method or parameter is unknown."""
    require(bool(config.models) != bool(config.slices), f"{where}: give either models or slices")
    both = config.tokenizer and config.tokenizer_source
    require(not both, f"{where}: give either tokenizer or tokenizer_source")
    method = config.merge_method
    problem = f"unknown method {method!r}, {suggest_name(method, sorted(METHODS))}"
    require(method in METHODS, f"{where}: merge_method: {problem}")
    known = list(METHODS[method].parameters)
    for place, settings in config.all_settings():
        for name in settings:
            problem = f"{method} has no parameter {name!r}, {suggest_name(name, known)}"
            is_known = name in known or name in _IGNORED_PARAMETERS
            require(is_known, f"{where}: {place}: {problem}")


def suggest_name(name: str, known: Sequence[str]) -> str:
    """Returns the second half of a message about an unknown name: the nearest, or all names."""
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"it has {', '.join(known) or 'none'}"


def find_value(
    parameter: Parameter, settings: Sequence[Settings], tensor: str, depth: float
) -> Any:
    """Returns a parameter's value for one tensor, from the first block of settings that has one.

    `depth` is the layer's place in the model, from 0 (the first) to 1 (the last).
    """
    for block in settings:
        if parameter.name in block:
            value = evaluate(block[parameter.name], tensor, depth, parameter.check)
            if value is not None:
                return value
    has_default = parameter.default is not REQUIRED
    require(has_default, f"parameter {parameter.name} is missing for {tensor}")
    return parameter.default


def evaluate(setting: Setting, tensor: str, depth: float, check: Callable[[Any], Any]) -> Any:
    """Returns the value of a setting for one tensor, or None if it has none.

    A setting is a scalar; a list, which is a gradient over the layers and is read at `depth`; or
    conditional values, of which the first counts whose filter is part of the tensor's name.
    """
    if isinstance(setting, Conditional):
        setting = [setting]
    if not isinstance(setting, list):
        return check(setting)
    conditions = [entry for entry in setting if isinstance(entry, Conditional)]
    for condition in conditions:
        if condition.filter in (None, "*") or condition.filter in tensor:
            return evaluate(condition.value, tensor, depth, check)
    if conditions or not setting:
        return None
    values = [check(entry) for entry in setting]
    place = depth * (len(values) - 1)
    if any(isinstance(value, (bool, str)) for value in values):
        return values[int(place)]
    return check(float(np.interp(place, range(len(values)), values)))
