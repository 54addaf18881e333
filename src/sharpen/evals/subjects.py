"""What can be evaluated: a model's or a run's folder, an adapter, a model by name, a server, a
loaded model, any policy, or a baseline."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpen import records
from sharpen.evals.baselines import BASELINES, Outward
from sharpen.evals.items import OBJECT
from sharpen.models.find import MANIFEST, find_model
from sharpen.render import Renderer
from sharpen.types import Policy, SharpenError, Task


@dataclass(frozen=True, slots=True)
class Subject:
    """`open` makes the policy when it is needed; a baseline asks for the tasks."""

    name: str
    digest: str  # of the weights; empty where nobody can tell
    open: Callable[[Sequence[Task], Outward], Policy]


def find_subject(model: Any, tokenizer: Any = None, api_key_env: str = "") -> Subject:
    """`baseline:gold`, `http://host:8000/v1#model`, a folder, a name, a model or a policy."""
    if hasattr(model, "respond"):
        return Subject(type(model).__name__, f"{OBJECT}{os.getpid()} {id(model)}", lambda *_: model)
    if hasattr(model, "named_parameters"):
        return loaded(model, tokenizer)
    name = str(model)
    if name.startswith("baseline:"):
        if (kind := name.removeprefix("baseline:")) not in BASELINES:
            raise SharpenError(f"{name}: expected baseline: and one of {', '.join(BASELINES)}")
        return Subject(name, name, BASELINES[kind])
    if name.startswith(("http://", "https://")):
        from sharpen.policy.remote import RemotePolicy

        url, _, served = name.partition("#")
        policy = RemotePolicy(url, served or "default", api_key_env)
        return Subject(name, "", lambda *_: policy)
    return Subject(name, weights_digest(find_model(name)), lambda *_: load(name))


def load(name: str) -> Policy:
    from sharpen.models.load import ModelConfig
    from sharpen.policy.local import LocalPolicy

    return LocalPolicy.load(ModelConfig(base_model=name))


def loaded(model: Any, tokenizer: Any) -> Subject:
    """A model in memory, known by the sums of its weights: to hash them all takes too long."""
    from sharpen.models.load import load_tokenizer
    from sharpen.policy.local import LocalPolicy

    name = str(getattr(model.config, "_name_or_path", "") or "")
    if tokenizer is None and not name:
        raise SharpenError("the model does not say where it is from: give its tokenizer")
    sums = []
    for key, p in model.named_parameters():
        wide = p.detach().double()
        sums.append(f"{key} {tuple(p.shape)} {wide.sum()} {wide.square().sum()}")
    digest = hashlib.sha256("\n".join(sums).encode()).hexdigest()
    make = lambda *_: LocalPolicy(model, Renderer(tokenizer or load_tokenizer(name)))  # noqa: E731
    return Subject(name or type(model).__name__, digest, make)


def weights_digest(folder: Path) -> str:
    """Of a model's files; an adapter's with those of its base."""
    from sharpen.models.load import base_of_adapter

    known = folder / MANIFEST
    files = records.read_json(known)["files"] if known.is_file() else records.sha256_folder(folder)
    if (folder / "adapter_config.json").is_file():
        files = files | {"base": weights_digest(find_model(base_of_adapter(folder)))}
    return hashlib.sha256(records.dump_row(files).encode()).hexdigest()
