"""The policy that preference optimisation and RL start from, and the frozen one that they are held
against.

An adapter to start from is merged into its base in memory and a fresh one is attached, so that the
reference is always the same model with the adapter off; only `full` needs a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sharpen.models.load import load_model, load_tokenizer
from sharpen.render import Renderer
from sharpen.train.config.run import RunConfig
from sharpen.train.learner import Learner, LogprobModel
from sharpen.train.sft import make_trainable, save_trained
from sharpen.types import Datum, SharpenError


class Reference:
    """A policy that does not move: `frozen`, or without it the learner's own with the adapter
    off."""

    def __init__(self, frozen: Any = None):
        self.frozen = frozen.requires_grad_(False).eval() if frozen is not None else None

    def logprobs(self, learner: Learner, datums: Sequence[Datum]) -> list[np.ndarray]:
        """Log-probabilities of each datum's trained tokens, in order."""
        if self.frozen is None:
            with learner.model.disable_adapter():
                return learner.logprobs(datums)
        core = LogprobModel(self.frozen)
        core.packed, core.shares = learner.packed, learner.core.shares
        if core.packed or core.shares:  # by an attention that keeps rows apart
            self.frozen.set_attn_implementation(learner.model.config._attn_implementation)
        core.temperature = getattr(learner.core, "temperature", 1.0)
        return core.score(datums, learner.token_budget, learner.processes)


@dataclass(frozen=True, slots=True)
class PolicySetup:
    model: Any  # trainable
    renderer: Renderer
    reference: Reference
    merged: bool  # an adapter went into the base, which exists in memory only

    def save(self, learner: Learner, path: str | Path) -> None:
        """What loads on its own: an adapter, or a whole model where the base is on no disk."""
        save_trained(learner, self.renderer, path, whole=self.merged)


def start_policy(
    config: RunConfig, renderer: Renderer | None = None, reference: str | None = ""
) -> PolicySetup:
    """`config.base_model` (a folder, a run folder, an adapter, a name) ready to be trained.
    `reference` names another model to be held against; None: nothing asks for one."""
    tokenizer = load_tokenizer(config.base_model, config.trust_remote_code)
    renderer = renderer or Renderer(tokenizer, config.template)
    model = load_model(config)
    merged = hasattr(model, "peft_config")
    if merged:
        sharded = config.parallel not in ("auto", "ddp")
        if config.load_in_4bit or config.load_in_8bit or sharded:
            what = f"parallel={config.parallel}" if sharded else "a quantised base"
            raise SharpenError(f"{config.base_model}: an adapter, merge it first: {what} cannot")
        model = model.merge_and_unload()
    frozen = None
    if reference:
        frozen = load_model(config.model_copy(update={"base_model": reference}))
        check_alike(model, frozen, tokenizer, load_tokenizer(reference), reference)
    elif reference is not None and config.full:
        frozen = copy.deepcopy(model)
    return PolicySetup(make_trainable(model, config), renderer, Reference(frozen), merged)


def check_alike(model: Any, other: Any, tokenizer: Any, others: Any, name: str) -> None:
    """Log-probabilities of two models compare only over the same tokens."""
    kinds = [one.config.get_text_config().model_type for one in (model, other)]
    sizes = [one.get_input_embeddings().weight.shape[0] for one in (model, other)]
    if kinds[0] != kinds[1]:
        reason = f"a {kinds[1]}, the policy is a {kinds[0]}"
    elif sizes[0] != sizes[1] or tokenizer.get_vocab() != others.get_vocab():
        reason = f"of another vocabulary ({sizes[1]} tokens, the policy has {sizes[0]})"
    else:
        return
    raise SharpenError(f"reference_model {name}: {reason}; it must be of one architecture")
