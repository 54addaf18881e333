"""The policy that DPO, GRPO and PPO train, and the frozen reference policy that it is compared
with.

A run that starts from an adapter continues that adapter; its reference is a frozen second copy of
the adapter on the same base. A run that starts from a model trains a fresh adapter; its reference
is the model with the adapter off. With `full` every weight is trained and the reference is a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from sharpen.models.find import find_model
from sharpen.models.load import load_model, load_tokenizer
from sharpen.render import Renderer
from sharpen.train.config.dpo import DPOConfig
from sharpen.train.config.online import RLConfig
from sharpen.train.decoder import LogprobModel
from sharpen.train.learner import Learner
from sharpen.train.run_setup import POLICY_ADAPTER, make_trainable, save_trained
from sharpen.types import Datum, SharpenError

_REFERENCE_ADAPTER = "reference"
_ADAPTER_SETTINGS = ("lora_r", "lora_alpha", "lora_target_modules", "use_dora", "use_rslora")
_PolicyConfig = DPOConfig | RLConfig


class ReferencePolicy(Protocol):
    """A policy that does not move."""

    def logprobs(self, learner: Learner, datums: Sequence[Datum]) -> list[np.ndarray]:
        """Returns the log-probabilities of each datum's trained tokens, in order."""
        ...


class BaseAsReference:
    """The learner's own model with the adapter off."""

    def logprobs(self, learner: Learner, datums: Sequence[Datum]) -> list[np.ndarray]:
        """Returns the log-probabilities without the adapter."""
        with learner.model.disable_adapter():
            return learner.logprobs(datums)


class AdapterAsReference:
    """A frozen adapter beside the trained one, on the same base."""

    def logprobs(self, learner: Learner, datums: Sequence[Datum]) -> list[np.ndarray]:
        """Returns the log-probabilities with the frozen adapter switched on."""
        with active_adapter(learner.model, _REFERENCE_ADAPTER):
            return learner.logprobs(datums)


class ModelAsReference:
    """A frozen model of its own."""

    def __init__(self, model: Any):
        self.model = model.requires_grad_(False).eval()

    def logprobs(self, learner: Learner, datums: Sequence[Datum]) -> list[np.ndarray]:
        """Returns the log-probabilities of the frozen model, computed as the learner would."""
        core = LogprobModel(self.model)
        core.packed = learner.packed
        core.shares = learner.core.shares
        if core.packed or core.shares:  # by an attention that keeps rows apart
            self.model.set_attn_implementation(learner.model.config._attn_implementation)
        core.temperature = getattr(learner.core, "temperature", 1.0)
        return core.score(datums, learner.token_budget, learner.processes)


@dataclass(frozen=True, slots=True)
class PolicySetup:
    """What a run trains."""

    model: Any  # trainable
    renderer: Renderer
    reference: ReferencePolicy | None
    merged: bool  # an adapter was merged into the base, which exists in memory only

    def save(self, learner: Learner, path: str | Path) -> None:
        """Save what loads on its own: an adapter, or a whole model where the base is on no disk."""
        save_trained(learner, self.renderer, path, whole=self.merged)


def prepare_policy(
    config: _PolicyConfig, with_reference: bool, renderer: Renderer | None = None
) -> PolicySetup:
    """Load `config.base_model` (a folder, a run, an adapter or a name) ready to be trained."""
    tokenizer = load_tokenizer(config.base_model, config.trust_remote_code)
    renderer = renderer or Renderer(tokenizer, config.template)
    model = load_model(config)
    is_adapter = hasattr(model, "peft_config")
    continues = is_adapter and not (config.full or config.fresh_adapter)
    if is_adapter and not continues:
        model = _merge_adapter(model, config)
    if continues:
        _continue_adapter(model, config)
    reference = _load_reference(config, model, tokenizer, continues) if with_reference else None
    if not continues:
        model = make_trainable(model, config)
    return PolicySetup(model, renderer, reference, merged=is_adapter and not continues)


@contextmanager
def active_adapter(model: Any, name: str) -> Iterator[None]:
    """Compute with another adapter inside the block. What is trainable stays so: PEFT freezes an
    adapter that it switches off, and a sharded model would remember that."""
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    before = model.active_adapter
    try:
        model.set_adapter(name)
        _restore(trainable)
        yield
    finally:
        model.set_adapter(before)
        _restore(trainable)


def _restore(trainable: Sequence[tuple[torch.nn.Parameter, bool]]) -> None:
    for parameter, requires_grad in trainable:
        parameter.requires_grad_(requires_grad)


def _merge_adapter(model: Any, config: _PolicyConfig) -> Any:
    """The adapter's model as plain weights, in memory."""
    obstacle = ""
    if config.load_in_4bit or config.load_in_8bit:
        obstacle = "a quantised base"
    if config.parallel not in ("auto", "ddp"):
        obstacle = f"parallel={config.parallel}"
    if obstacle:
        setting = "full" if config.full else "fresh_adapter"
        raise SharpenError(
            f"{config.base_model}: {setting}=true merges the adapter, which {obstacle} cannot; "
            f"merge it first, or set {setting}=false to continue the adapter"
        )
    return model.merge_and_unload()


def _continue_adapter(model: Any, config: _PolicyConfig) -> None:
    """Make the loaded adapter trainable again. Its rank and targets are its own."""
    adapter = model.peft_config[POLICY_ADAPTER]
    settings = _adapter_settings(adapter, config.base_model)
    for name in _ADAPTER_SETTINGS:
        asked = getattr(config, name)
        if name in config.model_fields_set and not _is_same(asked, settings[name]):
            raise SharpenError(
                f"{config.base_model}: {name} is {_plain(asked)} in the settings, but the adapter "
                f"that is continued has {_plain(settings[name])}; leave {name} out, or set "
                "fresh_adapter=true to merge it and train a new one"
            )
    _remove_dropout(model)
    adapter.inference_mode = False
    model.set_adapter(POLICY_ADAPTER)
    told = ", ".join(f"{name} {_plain(settings[name])}" for name in _ADAPTER_SETTINGS[:3])
    print(f"{config.base_model}: its adapter is continued ({told})")


def _adapter_settings(adapter: Any, where: str) -> dict[str, Any]:
    """The settings of a loaded LoRA adapter, under the names that configs have."""
    if not hasattr(adapter, "lora_alpha"):
        kind = getattr(adapter.peft_type, "value", adapter.peft_type)
        raise SharpenError(
            f"{where}: an adapter of the kind {kind}; only LoRA adapters can be continued, "
            "fresh_adapter=true merges it and trains a new one"
        )
    return {
        "lora_r": adapter.r,
        "lora_alpha": adapter.lora_alpha,
        "lora_target_modules": adapter.target_modules,
        "use_dora": adapter.use_dora,
        "use_rslora": adapter.use_rslora,
    }


def _is_same(asked: Any, own: Any) -> bool:
    """Whether two values of a setting say the same; names of modules have no order."""
    if isinstance(asked, tuple) and not isinstance(own, str):
        return set(asked) == set(own)
    return asked == own


def _plain(value: Any) -> str:
    if isinstance(value, str | int):
        return str(value)
    return " ".join(sorted(value))


def _remove_dropout(model: Any) -> None:
    """The sampler and both passes of a step have to see one model."""
    for module in model.modules():
        dropout = getattr(module, "lora_dropout", None)
        if isinstance(dropout, torch.nn.ModuleDict) and POLICY_ADAPTER in dropout:
            dropout[POLICY_ADAPTER] = torch.nn.Identity()
    model.peft_config[POLICY_ADAPTER].lora_dropout = 0.0


def _load_reference(
    config: _PolicyConfig, model: Any, tokenizer: Any, continues: bool
) -> ReferencePolicy:
    """The policy as it starts, or the model that the config names."""
    name = config.reference_model
    if name:
        other = load_model(config.model_copy(update={"base_model": name}))
        _check_same_tokens(model, other, tokenizer, load_tokenizer(name), name)
        return ModelAsReference(other)
    if continues:
        folder = str(find_model(config.base_model))
        device = str(next(model.parameters()).device)
        model.load_adapter(folder, _REFERENCE_ADAPTER, torch_device=device)
        model.set_adapter(POLICY_ADAPTER)
        return AdapterAsReference()
    if config.full:
        return ModelAsReference(copy.deepcopy(model))
    return BaseAsReference()


def _check_same_tokens(
    policy: Any, reference: Any, tokenizer: Any, reference_tokenizer: Any, name: str
) -> None:
    """Log-probabilities of two models compare only over the same tokens."""
    kind = policy.config.get_text_config().model_type
    reference_kind = reference.config.get_text_config().model_type
    size = policy.get_input_embeddings().weight.shape[0]
    reference_size = reference.get_input_embeddings().weight.shape[0]
    if kind != reference_kind:
        reason = f"a {reference_kind}, the policy is a {kind}"
    elif size != reference_size or tokenizer.get_vocab() != reference_tokenizer.get_vocab():
        reason = f"of another vocabulary ({reference_size} tokens, the policy has {size})"
    else:
        return
    raise SharpenError(f"reference_model {name}: {reason}; it must be of one architecture")
