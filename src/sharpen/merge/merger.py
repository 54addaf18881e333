"""`ModelMerger` on state dicts in memory, and `merge_domain_experts` on model folders."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from sharpen.merge import require
from sharpen.merge.method import METHODS
from sharpen.merge.recipe import InputModel, MergeConfig, meant
from sharpen.merge.stream import DEFAULTS, MergeOptions, merge
from sharpen.merge.tiles import Array, Tile, Tiles
from sharpen.merge.vectors import Shares, StateDict, StateDicts, Weights, same_names, widened
from sharpen.types import Json


class ModelMerger:
    """Merging of state dicts. Results have the dtype of the inputs."""

    @staticmethod
    def average_merge(state_dicts: StateDicts, weights: Shares = None) -> Weights:
        """The weighted average; weights sum to 1."""
        count = len(state_dicts)
        shares = [1 / count] * count if weights is None else list(weights)
        require(len(shares) == count, f"{len(shares)} weights for {count} models")
        require(abs(sum(shares) - 1) < 1e-6, f"weights sum to {sum(shares)}, not to 1")
        return merge_dicts("linear", state_dicts, {"weight": shares, "normalize": False})

    @staticmethod
    def slerp_merge(state_dict_1: StateDict, state_dict_2: StateDict, t: float = 0.5) -> Weights:
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
        values = {"weight": 1 / len(finetuned_state_dicts), "density": 1 - drop_rate}
        values |= {"rescale": "density" if rescale else False}
        inputs = [base_state_dict, *finetuned_state_dicts]
        return merge_dicts("dare_linear", inputs, values, seed)


def merge_dicts(method: str, inputs: StateDicts, values: Json, seed: int = 0) -> Weights:
    """Any method on state dicts, the base first where it needs one. `values` are its parameters;
    one that goes by model is a list, or one number for all."""
    require(inputs, f"{method}: no model given")
    for other in inputs[1:]:
        same_names(inputs[0], other)
    tuned = len(inputs) - (METHODS[method].base == "required")
    counts = {"model": len(inputs), "tuned": tuned}
    chosen: Json = {}
    for name, parameter in METHODS[method].parameters.items():
        value = values.get(name, parameter.default)
        each = parameter.scope in counts and not isinstance(value, list)
        chosen[name] = [value] * counts[parameter.scope] if each else value
    merged: Weights = OrderedDict()
    for name, first in inputs[0].items():
        if not first.is_floating_point():
            merged[name] = first.clone()
            continue
        tiles = in_memory([state[name].detach() for state in inputs], name, seed)
        result = METHODS[method].kernel(tiles, chosen)(tiles.load(0))
        merged[name] = result.to(first.dtype).reshape(first.shape)
    return merged


def in_memory(tensors: Sequence[Array], name: str, seed: int) -> Tiles:
    """Whole tensors as one tile."""
    first = tensors[0]
    rows = first.shape[0] if first.dim() > 1 else 1

    def load(index: int) -> Tile:
        return Tile(tuple(widened(t.clone()).reshape(rows, -1) for t in tensors), 0, 0)

    return Tiles(1, load, first.numel(), str(first.dtype).removeprefix("torch."), name, seed)


RECIPES: dict[str, tuple[str, Json]] = {  # of `merge_domain_experts`: method and its parameters
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
    require(method in RECIPES, f"method {method!r}: {meant(method, list(RECIPES))}")
    name, parameters = RECIPES[method]
    experts = [str(path) for path in expert_model_paths]
    require(experts, "merge_domain_experts: no expert given")
    base = {"linear": None, "slerp": experts[0]}.get(name, str(base_model_path))
    if name == "dare_linear":
        parameters = parameters | {"weight": 1 / len(experts)}
    models = [InputModel(model=path) for path in experts]
    recipe = MergeConfig(merge_method=name, models=models, base_model=base, parameters=parameters)
    return merge(recipe, output_path, options)
