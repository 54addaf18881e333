"""Checkpoints: atomic folders with a manifest of SHA-256 sums; the last good one is found by
itself. Called by `TrainingRun`."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from sharpen.records import atomic_folder, read_json, sha256_folder, write_json
from sharpen.train.learner import Learner
from sharpen.types import Json, SharpenError

_MANIFEST = "manifest.json"
_TENSORS = "state.safetensors"
_VALUES = "state.json"

OtherLearners = Mapping[str, Learner]  # learners besides the first by name, such as the critic
NO_OTHERS: OtherLearners = {}


def save_checkpoint(
    folder: Path,
    learner: Learner,
    values: Json,
    keep: int,
    others: OtherLearners = NO_OTHERS,
) -> Path:
    """Write the state of the learner, of the other learners and the loop's own `values`. Of the
    older checkpoints only the newest remain, `keep` in all."""
    from safetensors.torch import save_file

    # the state is gathered from all processes, before the first one writes
    tensors, plain_state = learner.state()
    other_states = {}
    for name, other in others.items():
        other_tensors, other_states[name] = other.state()
        for key, tensor in other_tensors.items():
            tensors[f"{name}/{key}"] = tensor
    target = folder / f"step-{learner.steps_done:06d}"
    if learner.processes.rank != 0:
        return target
    with atomic_folder(target) as work_folder:
        cpu_tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        save_file(cpu_tensors, work_folder / _TENSORS)
        state = {"learner": plain_state, "loop": values, "others": other_states}
        write_json(work_folder / _VALUES, state)
        write_json(work_folder / _MANIFEST, sha256_folder(work_folder))
    for old_checkpoint in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old_checkpoint)
    return target


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / _MANIFEST).is_file())


def load_last_checkpoint(
    folder: Path, learner: Learner, others: OtherLearners = NO_OTHERS
) -> Json | None:
    """Restore the newest checkpoint that is intact and return the loop's values; None if there is
    no checkpoint. A damaged one is reported and skipped."""
    checkpoints = list_checkpoints(folder)
    for path in reversed(checkpoints):
        if _is_intact(path):
            return _load_checkpoint(path, learner, others)
        print(f"{path}: damaged, trying the one before it")
    if checkpoints:
        raise SharpenError(
            f"{folder}: every checkpoint is damaged; remove the folder to start again"
        )
    return None


def _is_intact(path: Path) -> bool:
    """Whether all files have the sums that the manifest says."""
    sums = sha256_folder(path)
    sums.pop(_MANIFEST, None)
    return sums == read_json(path / _MANIFEST)


def _load_checkpoint(path: Path, learner: Learner, others: OtherLearners) -> Json:
    """Restore the learners from one checkpoint and return the loop's values."""
    from safetensors.torch import load_file

    state = read_json(path / _VALUES)
    tensors = load_file(path / _TENSORS)
    for name, other in others.items():
        prefix = f"{name}/"
        other_tensors = {}
        for key in list(tensors):
            if key.startswith(prefix):
                other_tensors[key.removeprefix(prefix)] = tensors.pop(key)
        other.load_state(other_tensors, state["others"][name])
    learner.load_state(tensors, state["learner"])
    return state["loop"]
