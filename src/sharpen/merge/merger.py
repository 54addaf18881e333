"""`ModelMerger` on state dicts in memory, and `merge_domain_experts` on model folders."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpen.merge import deltas, methods  # noqa: F401 - importing them registers the methods
from sharpen.merge.method import METHODS
from sharpen.merge.recipe import InputModel, MergeConfig, meant
from sharpen.merge.stream import DEFAULTS, MergeOptions, merge
from sharpen.merge.tiles import Tile, Tiles
from sharpen.merge.vectors import StateDict, same_names, widened
from sharpen.types import Json, SharpenError

if TYPE_CHECKING:
    from torch import Tensor


class ModelMerger:
    """Merging of state dicts. Results have the dtype of the inputs."""

    @staticmethod
    def average_merge(
        state_dicts: Sequence[StateDict], weights: Sequence[float] | None = None
    ) -> OrderedDict[str, Tensor]:
        """The weighted average; weights sum to 1."""
        shares = even(state_dicts) if weights is None else list(weights)
        if len(shares) != len(state_dicts):
            raise SharpenError(f"{len(shares)} weights for {len(state_dicts)} models")
        if abs(sum(shares) - 1) >= 1e-6:
            raise SharpenError(f"weights sum to {sum(shares)}, not to 1")
        return merge_dicts("linear", state_dicts, {"weight": shares, "normalize": False})

    @staticmethod
    def slerp_merge(
        state_dict_1: StateDict, state_dict_2: StateDict, t: float = 0.5
    ) -> OrderedDict[str, Tensor]:
        return merge_dicts("slerp", [state_dict_1, state_dict_2], {"t": t})

    @staticmethod
    def ties_merge(
        base_state_dict: StateDict,
        finetuned_state_dicts: Sequence[StateDict],
        density: float = 0.5,
        majority_sign: bool = True,
    ) -> OrderedDict[str, Tensor]:
        """Each model's largest changes; where signs disagree, the side with the greater sum."""
        values = {"weight": [1.0] * len(finetuned_state_dicts), "majority_sign": majority_sign}
        values["density"] = [density] * len(finetuned_state_dicts)
        return merge_dicts("ties", [base_state_dict, *finetuned_state_dicts], values)

    @staticmethod
    def dare_merge(
        base_state_dict: StateDict,
        finetuned_state_dicts: Sequence[StateDict],
        drop_rate: float = 0.9,
        rescale: bool = True,
        seed: int = 0,
    ) -> OrderedDict[str, Tensor]:
        """Changes dropped at random, the rest divided by 1 - drop_rate, then averaged."""
        values = {"weight": even(finetuned_state_dicts), "rescale": "density" if rescale else False}
        values["density"] = [1 - drop_rate] * len(finetuned_state_dicts)
        inputs = [base_state_dict, *finetuned_state_dicts]
        return merge_dicts("dare_linear", inputs, values, seed)


def even(models: Sequence[Any]) -> list[float]:
    return [1 / len(models)] * len(models)


def merge_dicts(
    method: str, inputs: Sequence[StateDict], values: Mapping[str, Any], seed: int = 0
) -> OrderedDict[str, Tensor]:
    """Any method on state dicts, the base first where it needs one; `values` are its parameters,
    those that go by model as lists."""
    if not inputs:
        raise SharpenError(f"{method}: no model given")
    for other in inputs[1:]:
        same_names(inputs[0], other)
    merged: OrderedDict[str, Tensor] = OrderedDict()
    for name, first in inputs[0].items():
        if not first.is_floating_point():
            merged[name] = first.clone()
            continue
        tiles = in_memory([state[name].detach() for state in inputs], name, seed)
        result = METHODS[method].kernel(tiles, dict(values))(tiles.load(0))
        merged[name] = result.to(first.dtype).reshape(first.shape)
    return merged


def in_memory(tensors: Sequence[Tensor], name: str, seed: int) -> Tiles:
    """Whole tensors as one tile."""
    rows = tensors[0].shape[0] if tensors[0].dim() > 1 else 1

    def load(index: int) -> Tile:
        return Tile(tuple(widened(t.clone()).reshape(rows, -1) for t in tensors), 0, 0)

    dtype = str(tensors[0].dtype).removeprefix("torch.")
    return Tiles(1, load, tensors[0].numel(), dtype, name, seed)


# name in `merge_domain_experts` → method and its parameters
RECIPES: dict[str, tuple[str, Json]] = {
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
    if method not in RECIPES:
        raise SharpenError(f"method {method!r}: {meant(method, list(RECIPES))}")
    name, parameters = RECIPES[method]
    experts, base = [str(path) for path in expert_model_paths], str(base_model_path)
    if not experts:
        raise SharpenError("merge_domain_experts: no expert given")
    if name == "slerp" and len(experts) != 2:
        raise SharpenError(f"slerp merges exactly 2 models; found {len(experts)}")
    if name == "dare_linear":
        parameters = parameters | {"weight": 1 / len(experts)}
    based = METHODS[name].base == "required"
    recipe = MergeConfig(
        merge_method=name,
        models=[InputModel(model=path) for path in experts],
        base_model=(experts[0] if name == "slerp" else base) if based else None,
        parameters=parameters,
    )
    return merge(recipe, Path(output_path), options)
