"""Merging from Python: `ModelMerger` on state dicts, `merge_domain_experts` on model folders.

Users call both; `merge_dicts` applies any registered method to state dicts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from sharpen.merge import require
from sharpen.merge.method import METHODS
from sharpen.merge.recipe import InputModel, MergeConfig, suggest_name
from sharpen.merge.stream import DEFAULTS, MergeOptions, merge
from sharpen.merge.tiles import Array, Tile, Tiles
from sharpen.merge.vectors import (
    Shares,
    StateDict,
    StateDicts,
    Weights,
    require_same_tensors,
    to_compute_dtype,
)
from sharpen.types import Json


class ModelMerger:
    """Merging of state dicts. Results have the dtype of the inputs."""

    @staticmethod
    def average_merge(state_dicts: StateDicts, weights: Shares = None) -> Weights:
        """The weighted average; weights sum to 1."""
        count = len(state_dicts)
        shares = [1 / count] * count if weights is None else list(weights)
        require(len(shares) == count, f"average_merge: {len(shares)} weights for {count} models")
        problem = f"average_merge: weights sum to {sum(shares)}, not to 1"
        require(abs(sum(shares) - 1) < 1e-6, problem)
        return merge_dicts("linear", state_dicts, {"weight": shares, "normalize": False})

    @staticmethod
    def slerp_merge(state_dict_1: StateDict, state_dict_2: StateDict, t: float = 0.5) -> Weights:
        """Along the arc from the first model (t = 0) to the second (t = 1)."""
        return merge_dicts("slerp", [state_dict_1, state_dict_2], {"t": t})

    @staticmethod
    def ties_merge(
        base_state_dict: StateDict,
        finetuned_state_dicts: StateDicts,
        density: float = 0.5,
        majority_sign: bool = True,
    ) -> Weights:
        """Each model's largest changes; where signs disagree, the side with the greater sum."""
        values = {"weight": 1.0, "density": density, "majority_sign": majority_sign}
        return merge_dicts("ties", [base_state_dict, *finetuned_state_dicts], values)

    @staticmethod
    def dare_merge(
        base_state_dict: StateDict,
        finetuned_state_dicts: StateDicts,
        drop_rate: float = 0.9,
        rescale: bool = True,
        seed: int = 0,
    ) -> Weights:
        """Changes dropped at random, the rest divided by 1 - drop_rate, then averaged."""
        values = {
            "weight": 1 / len(finetuned_state_dicts),
            "density": 1 - drop_rate,
            "rescale": "density" if rescale else False,
        }
        inputs = [base_state_dict, *finetuned_state_dicts]
        return merge_dicts("dare_linear", inputs, values, seed)


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


# `method` of `merge_domain_experts` → the method of a recipe and its parameters
_EXPERT_METHODS: dict[str, tuple[str, Json]] = {
    "average": ("linear", {"weight": 1.0}),
    "slerp": ("slerp", {"t": 0.5}),
    "ties": ("ties", {"weight": 1.0, "density": 0.5}),
    "dare": ("dare_linear", {"density": 0.1, "rescale": "density"}),
}


def merge_domain_experts(
    base_model_path: str,
    expert_model_paths: Sequence[str],
    method: str = "ties",
    output_path: str = "./merged_model",
    options: MergeOptions = DEFAULTS,
) -> Json:
    """Merge fine-tuned experts of one base (average, slerp, ties, dare) into a model folder."""
    unknown = f"merge_domain_experts: method {method!r}: "
    require(method in _EXPERT_METHODS, unknown + suggest_name(method, list(_EXPERT_METHODS)))
    recipe_method, parameters = _EXPERT_METHODS[method]
    experts = [str(path) for path in expert_model_paths]
    require(experts, "merge_domain_experts: no expert given")
    base: str | None = str(base_model_path)
    if recipe_method == "linear":
        base = None
    elif recipe_method == "slerp":
        base = experts[0]  # slerp goes from the first expert to the second
    if recipe_method == "dare_linear":
        parameters = parameters | {"weight": 1 / len(experts)}
    recipe = MergeConfig(
        merge_method=recipe_method,
        models=[InputModel(model=path) for path in experts],
        base_model=base,
        parameters=parameters,
    )
    return merge(recipe, output_path, options)
