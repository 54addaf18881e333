"""Policies by name: a model's or a run's folder, an adapter, a model by name, a server, a loaded
model, or any policy. Evaluation, chat, serving and data writers look policies up here; the
baselines of evaluation are added in `evals/baselines.py`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpen import records
from sharpen.models.find import MANIFEST, find_model
from sharpen.render import Renderer
from sharpen.types import Policy, SharpenError

_VLLM_PREFIX = "vllm+"  # before the address of a vLLM server
_OBJECT = "object "  # how the digest of a policy in memory begins: it has no lasting identity


@dataclass(frozen=True, slots=True)
class PolicySource:
    """A policy that is not loaded yet. `digest` is of its weights; empty where nobody can tell, as
    of a server. `open` loads it."""

    name: str
    digest: str
    open: Callable[[], Policy]
    template: str = "auto"  # of a model on this machine

    @property
    def is_cacheable(self) -> bool:
        """Whether the same name and digest will mean the same model in another process."""
        return bool(self.digest) and not self.digest.startswith(_OBJECT)


def find_policy(model: Any, tokenizer: Any = None, api_key_env: str = "") -> PolicySource:
    """Returns the policy behind `http://host:8000/v1#model`, `vllm+http://host:8000#model`, a
    folder, a name, a model in memory, or a policy object."""
    if isinstance(model, PolicySource):
        return model
    if hasattr(model, "respond"):
        identity = f"{_OBJECT}{os.getpid()} {id(model)}"
        return PolicySource(type(model).__name__, identity, lambda: model)
    if hasattr(model, "named_parameters"):
        return _loaded_model(model, tokenizer)
    name = str(model)
    if name.startswith(_VLLM_PREFIX):
        return _vllm_server(name, api_key_env)
    if name.startswith(("http://", "https://")):
        return _server(name, api_key_env)
    return PolicySource(name, _weights_digest(find_model(name)), lambda: load_policy(name))


def load_policy(name: str) -> Policy:
    """Loads a model of this machine by name or folder."""
    from sharpen.models.load import ModelConfig
    from sharpen.policy.local import LocalPolicy

    return LocalPolicy.load(ModelConfig(base_model=name))


def _server(name: str, api_key_env: str) -> PolicySource:
    from sharpen.policy.remote import RemotePolicy

    url, _, served_name = name.partition("#")
    policy = RemotePolicy(url, served_name or "default", api_key_env)
    return PolicySource(name, "", lambda: policy)


def _vllm_server(name: str, api_key_env: str) -> PolicySource:
    """A vLLM server by token ids. The served model is named by a folder or a hub name, whose
    tokenizer renders the prompts."""
    from sharpen.models.load import load_tokenizer
    from sharpen.policy.vllm import VLLMPolicy

    url, _, served_name = name.removeprefix(_VLLM_PREFIX).partition("#")
    if not served_name:
        raise SharpenError(f"{name}: name the served model, as in {_VLLM_PREFIX}{url}#MODEL")

    def open_policy() -> Policy:
        renderer = Renderer(load_tokenizer(served_name))
        return VLLMPolicy(url, served_name, renderer, api_key_env=api_key_env)

    return PolicySource(name, "", open_policy)


def _loaded_model(model: Any, tokenizer: Any) -> PolicySource:
    """A model in memory, known by the sums of its weights: hashing them all takes too long."""
    from sharpen.models.load import load_tokenizer
    from sharpen.policy.local import LocalPolicy

    name = str(getattr(model.config, "_name_or_path", "") or "")
    if tokenizer is None and not name:
        raise SharpenError("the model does not say where it is from: give its tokenizer")
    lines = []
    for key, parameter in model.named_parameters():
        wide = parameter.detach().double()
        lines.append(f"{key} {tuple(parameter.shape)} {wide.sum()} {wide.square().sum()}")
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def open_policy() -> Policy:
        return LocalPolicy(model, Renderer(tokenizer or load_tokenizer(name)))

    return PolicySource(name or type(model).__name__, digest, open_policy)


def _weights_digest(folder: Path) -> str:
    """Returns one hash of a model's files; of an adapter's with those of its base."""
    from sharpen.models.load import base_of_adapter

    manifest = folder / MANIFEST
    if manifest.is_file():
        files = records.read_json(manifest)["files"]
    else:
        files = records.sha256_folder(folder)
    if (folder / "adapter_config.json").is_file():
        files = files | {"base": _weights_digest(find_model(base_of_adapter(folder)))}
    return hashlib.sha256(records.dump_row(files).encode()).hexdigest()
