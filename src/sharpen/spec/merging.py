"""The frontier techniques document's names for model merging and task vectors.

They work on state dicts and model folders; `sharpen.merge` does the work.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from sharpen.merge import require
from sharpen.merge.merger import merge_dicts
from sharpen.merge.recipe import InputModel, MergeConfig, suggest_name
from sharpen.merge.stream import DEFAULTS, MergeOptions, merge
from sharpen.merge.vectors import (
    StateDict,
    StateDicts,
    Weights,
    require_same_tensors,
    to_compute_dtype,
)
from sharpen.types import Json

_Shares = Sequence[float] | None  # one weight per model; None: equal ones


class ModelMerger:
    """Merges state dicts by the four methods of section 4.2. Results have the inputs' dtype."""

    @staticmethod
    def average_merge(state_dicts: StateDicts, weights: _Shares = None) -> Weights:
        """Return the weighted average; weights sum to 1."""
        count = len(state_dicts)
        shares = [1 / count] * count if weights is None else list(weights)
        require(len(shares) == count, f"average_merge: {len(shares)} weights for {count} models")
        problem = f"average_merge: weights sum to {sum(shares)}, not to 1"
        require(abs(sum(shares) - 1) < 1e-6, problem)
        return merge_dicts("linear", state_dicts, {"weight": shares, "normalize": False})

    @staticmethod
    def slerp_merge(state_dict_1: StateDict, state_dict_2: StateDict, t: float = 0.5) -> Weights:
        """Return a point on the arc from the first model (t = 0) to the second (t = 1)."""
        return merge_dicts("slerp", [state_dict_1, state_dict_2], {"t": t})

    @staticmethod
    def ties_merge(
        base_state_dict: StateDict,
        finetuned_state_dicts: StateDicts,
        density: float = 0.5,
        majority_sign: bool = True,
    ) -> Weights:
        """Keep each model's largest changes; where signs differ, the side with the greater sum."""
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
        """Drop changes at random, divide the rest by 1 - drop_rate, and average them."""
        values = {
            "weight": 1 / len(finetuned_state_dicts),
            "density": 1 - drop_rate,
            "rescale": "density" if rescale else False,
        }
        inputs = [base_state_dict, *finetuned_state_dicts]
        return merge_dicts("dare_linear", inputs, values, seed)


class TaskVectorArithmetic:
    """Task vectors (what fine-tuning changed) as state dicts, as in section 4.2."""

    @staticmethod
    def compute_task_vector(base_state_dict: StateDict, finetuned_state_dict: StateDict) -> Weights:
        """Return the tuned model minus its base, in float32 at least."""
        return _weighted_sum([finetuned_state_dict, base_state_dict], [1.0, -1.0])

    @staticmethod
    def apply_task_vector(
        base_state_dict: StateDict, task_vector: StateDict, scaling: float = 1.0
    ) -> Weights:
        """Return the base plus the scaled vector, in the base's dtypes."""
        changed = _weighted_sum([base_state_dict, task_vector], [1.0, scaling])
        result: Weights = OrderedDict()
        for name, tensor in changed.items():
            result[name] = tensor.to(base_state_dict[name].dtype)
        return result

    @staticmethod
    def add_task_vectors(task_vectors: StateDicts, weights: _Shares = None) -> Weights:
        """Return the weighted sum of several vectors; without weights, the plain sum."""
        count = len(task_vectors)
        require(count, "add_task_vectors: no task vector given")
        shares = [1.0] * count if weights is None else list(weights)
        problem = f"add_task_vectors: {len(shares)} weights for {count} task vectors"
        require(len(shares) == count, problem)
        return _weighted_sum(task_vectors, shares)

    @staticmethod
    def negate_task_vector(task_vector: StateDict, scaling: float = 1.0) -> Weights:
        """Return the vector times -scaling; applying it takes an ability away."""
        return _weighted_sum([task_vector], [-scaling])


def _weighted_sum(dicts: StateDicts, weights: Sequence[float]) -> Weights:
    """Return the weighted sum of state dicts, in float32 at least."""
    for other in dicts[1:]:
        require_same_tensors(dicts[0], other)
    sums: Weights = OrderedDict()
    for name in dicts[0]:
        total: Any = 0
        for state_dict, share in zip(dicts, weights, strict=True):
            total = total + share * to_compute_dtype(state_dict[name])
        sums[name] = total
    return sums


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
    """Merge fine-tuned experts of one base into a model folder (section 4.3).

    `method` is average, slerp, ties or dare.
    """
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
