"""Checkpoints: atomic folders with a manifest of SHA-256 sums, the last good one found by
itself."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sharpen.records import atomic_folder, read_json, sha256_folder, write_json
from sharpen.train.learner import Learner
from sharpen.types import SharpenError

MANIFEST = "manifest.json"
Others = Mapping[str, Learner]  # learners besides the first, such as a critic
EMPTY: Others = {}


def save_checkpoint(
    folder: Path, learner: Learner, values: dict[str, Any], keep: int, others: Others = EMPTY
) -> Path:
    """Write the state of the learner and of `others`, by name, and the loop's own `values`; older
    checkpoints beyond `keep` go."""
    from safetensors.torch import save_file

    tensors, plain = learner.state()  # of all processes, before the first one writes
    plains = {}
    for name, other in others.items():
        found, plains[name] = other.state()
        tensors |= {f"{name}/{key}": tensor for key, tensor in found.items()}
    target = folder / f"step-{learner.steps_done:06d}"
    if learner.processes.rank:
        return target
    with atomic_folder(target) as work:
        copies = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        save_file(copies, work / "state.safetensors")
        write_json(work / "state.json", {"learner": plain, "loop": values, "others": plains})
        write_json(work / MANIFEST, sha256_folder(work))
    for old in found_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def found_checkpoints(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("step-*") if (p / MANIFEST).is_file())


def load_last_checkpoint(
    folder: Path, learner: Learner, others: Others = EMPTY
) -> dict[str, Any] | None:
    """Restore the newest checkpoint whose sums agree; a damaged one is said and passed over. None
    if there is none."""
    from safetensors.torch import load_file

    candidates = found_checkpoints(folder)
    for path in reversed(candidates):
        wanted = read_json(path / MANIFEST)
        found = {n: digest for n, digest in sha256_folder(path).items() if n != MANIFEST}
        if found != wanted:
            print(f"{path}: damaged, trying the one before it")
            continue
        saved = read_json(path / "state.json")
        tensors = load_file(path / "state.safetensors")
        for name, other in others.items():
            start = f"{name}/"
            own = {k.removeprefix(start): tensors.pop(k) for k in [*tensors] if k.startswith(start)}
            other.load_state(own, saved["others"][name])
        learner.load_state(tensors, saved["learner"])
        return saved["loop"]
    if candidates:
        advice = "remove the folder to start again"
        raise SharpenError(f"{folder}: every checkpoint is damaged; {advice}")
    return None
