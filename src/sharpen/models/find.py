"""A model's name → a folder on this machine: local folder, our own named models, the hub, a mirror
of it.

Named models are built once into the user cache, with a manifest of SHA-256 sums. Pickled weights
and code that comes with a model are refused unless they are asked for.
"""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sharpen.config import one_line
from sharpen.models.pico import build_pico
from sharpen.models.smollm2 import build_smollm2
from sharpen.records import atomic_folder, cache_folder, read_json, sha256_folder, write_json
from sharpen.types import SharpenError

HUB = "https://huggingface.co"
MIRRORS = ("https://hf-mirror.com",)
REACH_S = 3.0
MANIFEST = "sharpen.json"
PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py")

NAMED: dict[str, tuple[str, Callable[..., None]]] = {
    "smollm2-135m": ("SmolLM2-135M-Instruct, real, from PyPI", build_smollm2),
    "pico": ("two random layers, for tests and plumbing", build_pico),
}
ALIASES = {"HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2-135m"}


def find_model(name: str, pull: bool = True) -> Path:
    """The folder of a model, fetched if need be. `name`: a model's or a run's folder,
    `smollm2-135m`, `pico`, or a hub name."""
    here = Path(name)
    if (here / "final").is_dir() and (here / "metrics.jsonl").is_file():
        here = here / "final"  # a training run stands for what it made
    if here.exists() and (name not in NAMED or (here / "config.json").is_file()):
        return check_folder(here)
    name = ALIASES.get(name, name)
    if name in NAMED:
        folder = named_folder(name)
        if not (folder / MANIFEST).is_file():
            if not pull and name != "pico":
                raise SharpenError(f"{name} is not here yet; run: sharpen models pull {name}")
            pull_named(name)
        return folder
    if name.count("/") == 1 and not name.startswith((".", "/")):
        return check_folder(Path(find_on_hub(name, pull)))
    known = f"known names: {', '.join(NAMED)}, or org/name on the hub"
    raise SharpenError(f"{name}: no such folder, and not a model name; {known}")


def named_folder(name: str) -> Path:
    return cache_folder() / "models" / name


def pull_named(name: str, source: Path | None = None, again: bool = False) -> Path:
    """Build a named model into the cache, or check the hashes of the one that is there."""
    folder = named_folder(name)
    if (folder / MANIFEST).is_file() and not again:
        wanted, found = read_json(folder / MANIFEST)["files"], sha256_folder(folder)
        damaged = [file for file, digest in wanted.items() if found.get(file) != digest]
        if not damaged:
            return folder
        # a cache can be rebuilt, so a damaged one is, and says so
        print(f"{name}: {', '.join(damaged)} damaged in the cache, building again")
    build = NAMED[name][1]
    with atomic_folder(folder) as work:
        build(work) if source is None else build(work, source)
        write_json(work / MANIFEST, {"name": name, "files": sha256_folder(work)})
    return folder


def check_folder(folder: Path, trust_remote_code: bool = False) -> Path:
    """A folder that holds a model or an adapter in safetensors, or an error that says why not."""
    if not folder.is_dir():
        raise SharpenError(f"{folder}: not a folder; a model is a folder with config.json")
    adapter = (folder / "adapter_config.json").is_file()
    if not adapter and not (folder / "config.json").is_file():
        raise SharpenError(f"{folder}: not a model folder: config.json is missing")
    if not any(folder.glob("*.safetensors")):
        pickled = sorted(p.name for p in [*folder.glob("*.bin"), *folder.glob("*.pt")])
        if pickled:
            risk = f"weights are pickled ({pickled[0]}), which can run code when loaded"
            raise SharpenError(f"{folder}: {risk}; convert them to safetensors")
        raise SharpenError(f"{folder}: not a model folder: no .safetensors file")
    if not adapter and not trust_remote_code and has_code(folder):
        risk = "the model brings its own Python code (auto_map in config.json)"
        advice = "read it, then ask for it with trust_remote_code=true"
        raise SharpenError(f"{folder}: {risk}; {advice}")
    return folder


def has_code(folder: Path) -> bool:
    config: Any = read_json(folder / "config.json")
    return isinstance(config, dict) and bool(config.get("auto_map"))


def find_on_hub(name: str, pull: bool) -> str:
    """A hub model: what is cached, else the hub, else a mirror."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return snapshot_download(name, allow_patterns=list(PATTERNS), local_files_only=True)
    except LocalEntryNotFoundError:
        pass  # not cached: the network is asked next
    if offline() or not pull:
        raise SharpenError(f"{name}: not in the local hub cache, and offline mode is on")
    endpoint = reachable_endpoint()
    if endpoint is None:
        lost = "not in the local hub cache, and neither the hub nor a mirror answers"
        advice = "set HF_ENDPOINT to a mirror you can reach, give a local folder"
        raise SharpenError(f"{name}: {lost}; {advice}, or use smollm2-135m, which comes from PyPI")
    try:
        return snapshot_download(name, allow_patterns=list(PATTERNS), endpoint=endpoint)
    except Exception as error:  # the hub's errors have many bases; all mean that it is not here
        raise SharpenError(f"{name}: {endpoint} did not give it: {one_line(error)}") from error


def offline() -> bool:
    switches = ("SHARPEN_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(key, "").lower() in ("1", "true", "yes", "on") for key in switches)


def reachable_endpoint() -> str | None:
    """`HF_ENDPOINT` when it is set; else the first of the hub and its mirrors that answers."""
    chosen = os.environ.get("HF_ENDPOINT")
    candidates = (chosen,) if chosen else (HUB, *MIRRORS)
    return next((endpoint for endpoint in candidates if answers(endpoint)), None)


def answers(endpoint: str) -> bool:
    """Whether anything but a server error comes back; a refusal still shows that it is there."""
    request = urllib.request.Request(endpoint, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=REACH_S) as response:
            return response.status < 500
    except urllib.error.HTTPError as error:
        return error.code < 500
    except (OSError, ValueError):
        return False
