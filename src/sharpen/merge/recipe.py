"""A merge as mergekit's YAML writes it; the value of a parameter for one tensor of a model."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from sharpen.config import Config, load_config
from sharpen.merge import deltas, methods, require  # noqa: F401 - they register the methods
from sharpen.merge.method import METHODS, REQUIRED, Parameter
from sharpen.merge.tiles import Dtype

Scalar = bool | int | float | str
NO_EFFECT = ("int8_mask",)  # mergekit's way to save memory; here nothing is held that it would save


class Conditional(Config):
    value: Scalar | list[Scalar]
    filter: str | None = None


Setting = Conditional | list[Conditional] | Scalar | list[Scalar]
Settings = dict[str, Setting]


class InputModel(Config):
    model: str
    parameters: Settings = Field(default_factory=dict)


class LayerSource(InputModel):
    layer_range: tuple[int, int]


class Slice(Config):
    sources: list[LayerSource] = Field(min_length=1)
    base_model: str | None = None
    parameters: Settings = Field(default_factory=dict)


class TokenizerConfig(Config):
    source: str = "union"  # union, base, or a model
    pad_to_multiple_of: int | None = Field(None, gt=0)


class MergeConfig(Config):
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
        named = [self.base_model, *(entry.model for entry in self.models)]
        for part in self.slices:
            named += [part.base_model, *(source.model for source in part.sources)]
        return list(dict.fromkeys(name for name in named if name))


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> MergeConfig:
    """A YAML file with `key=value` overrides → a recipe that hangs together."""
    config = load_config(MergeConfig, path, overrides)
    check_recipe(config, str(path))
    return config


def check_recipe(config: MergeConfig, where: str = "merge") -> None:
    require(bool(config.models) != bool(config.slices), f"{where}: give either models or slices")
    both = config.tokenizer and config.tokenizer_source
    require(not both, f"{where}: give either tokenizer or tokenizer_source")
    method = config.merge_method
    unknown = f"unknown method {method!r}, {meant(method, sorted(METHODS))}"
    require(method in METHODS, f"{where}: merge_method: {unknown}")
    known = list(METHODS[method].parameters)
    for place, settings in config.all_settings():
        for name in settings:
            unknown = f"{method} has no parameter {name!r}, {meant(name, known)}"
            require(name in known or name in NO_EFFECT, f"{where}: {place}: {unknown}")


def meant(name: str, known: Sequence[str]) -> str:
    """What an unknown name may have been meant to be."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'none'}"


def value_of(parameter: Parameter, settings: Sequence[Settings], tensor: str, depth: float) -> Any:
    """A parameter's value for one tensor, from the first of several settings that has one."""
    for setting in [layer[parameter.name] for layer in settings if parameter.name in layer]:
        if (value := evaluate(setting, tensor, depth, parameter.check)) is not None:
            return value
    given = parameter.default is not REQUIRED
    require(given, f"parameter {parameter.name} is missing for {tensor}")
    return parameter.default


def evaluate(setting: Setting, tensor: str, depth: float, check: Callable[[Any], Any]) -> Any:
    """A scalar; a gradient, read at `depth` (0 the first layer, 1 the last); or the first of
    several conditional values whose filter is part of the tensor's name."""
    if isinstance(setting, Conditional):
        setting = [setting]
    if not isinstance(setting, list):
        return check(setting)
    conditions = [entry for entry in setting if isinstance(entry, Conditional)]
    for entry in conditions:
        if entry.filter in (None, "*") or entry.filter in tensor:
            return evaluate(entry.value, tensor, depth, check)
    values = [] if conditions else [check(entry) for entry in setting]
    if not values:
        return None
    place = depth * (len(values) - 1)
    if any(isinstance(value, (bool, str)) for value in values):
        return values[int(place)]
    return check(float(np.interp(place, range(len(values)), values)))
