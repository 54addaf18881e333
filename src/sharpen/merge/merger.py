"""Merging of state dicts in memory, by any registered method.

`ModelMerger` calls `merge_dicts`; model folders are merged by `stream.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from sharpen.merge import require
from sharpen.merge.method import METHODS
from sharpen.merge.tiles import Array, Tile, Tiles
from sharpen.merge.vectors import (
    StateDicts,
    Weights,
    require_same_tensors,
    to_compute_dtype,
)
from sharpen.types import Json


def merge_dicts(method: str, inputs: StateDicts, values: Json, seed: int = 0) -> Weights:
    """Apply any method to state dicts, the base first where the method needs one.

    `values` are its parameters. One that exists per model is a list, or one value for all models.
    Tensors of integers are taken from the first input.
    """
    require(inputs, f"{method}: no model given")
    for other in inputs[1:]:
        require_same_tensors(inputs[0], other)
    parameters = _fill_parameters(method, len(inputs), values)
    merged: Weights = OrderedDict()
    for name, first in inputs[0].items():
        if not first.is_floating_point():
            merged[name] = first.clone()
            continue
        tiles = _tiles_in_memory([state[name].detach() for state in inputs], name, seed)
        kernel = METHODS[method].kernel(tiles, parameters)
        merged[name] = kernel(tiles.load(0)).to(first.dtype).reshape(first.shape)
    return merged


def _fill_parameters(method: str, model_count: int, values: Json) -> Json:
    """Add the defaults, and repeat single values of parameters that exist per model."""
    has_base = METHODS[method].base == "required"
    counts = {"model": model_count, "tuned": model_count - (1 if has_base else 0)}
    parameters: Json = {}
    for name, parameter in METHODS[method].parameters.items():
        value = values.get(name, parameter.default)
        if parameter.scope in counts and not isinstance(value, list):
            value = [value] * counts[parameter.scope]
        parameters[name] = value
    return parameters


def _tiles_in_memory(tensors: Sequence[Array], name: str, seed: int) -> Tiles:
    """Returns whole tensors as one tile."""
    first = tensors[0]
    rows = first.shape[0] if first.dim() > 1 else 1

    def load(index: int) -> Tile:
        copies = [to_compute_dtype(tensor.clone()).reshape(rows, -1) for tensor in tensors]
        return Tile(tuple(copies), 0, 0)

    dtype = str(first.dtype).removeprefix("torch.")
    return Tiles(1, load, first.numel(), dtype, name, seed)
