"""A user's own evaluation during training: one form for every method.

    def evaluate(context: EvaluationContext) -> float | Mapping[str, float]: ...

SFT, DPO, GRPO and PPO call it every `eval_steps`. A single number is the `metric` that decides
which weights are the best (higher is better); named numbers go into the metrics, and one of them
may be called `metric`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sharpen.policy.local import LocalPolicy
from sharpen.render import Renderer


@dataclass(frozen=True, slots=True)
class EvaluationContext:
    """What a callback may look at."""

    model: Any  # a transformers or PEFT model, in evaluation mode
    renderer: Renderer
    policy: LocalPolicy  # samples from the model as it is now; also answers `respond`
    step: int  # optimisation steps done


Callback = Callable[[EvaluationContext], float | Mapping[str, float]]


def call_back(function: Callback, context: EvaluationContext) -> dict[str, float]:
    """Returns what a callback measures, by name."""
    context.model.eval()
    result = function(context)
    if isinstance(result, Mapping):
        return {name: float(value) for name, value in result.items()}
    return {"metric": float(result)}
