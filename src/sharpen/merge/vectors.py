"""Task vectors: what fine-tuning changed, as arithmetic on state dicts and as files.

A file holds a tensor's differences densely, or as positions and values where that is smaller.
Differences are float32, so that base + vector is the tuned model again, bit for bit.
"""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sharpen.merge.arrays import cast, rounded
from sharpen.merge.checkpoint import Model, ShardWriter, Spec, open_files
from sharpen.records import sync_file
from sharpen.types import Json, SharpenError

if TYPE_CHECKING:
    from torch import Tensor

StateDict = Mapping[str, "Tensor"]
POSITIONS, VALUES, SHAPE = ".positions", ".values", ".shape"
PIECE = 1 << 20  # elements that are compared at a time


class TaskVectorArithmetic:
    """Task vectors as state dicts: compute, apply, add, negate."""

    @staticmethod
    def compute_task_vector(
        base_state_dict: StateDict, finetuned_state_dict: StateDict
    ) -> OrderedDict[str, Tensor]:
        same_names(base_state_dict, finetuned_state_dict)
        return OrderedDict(
            (name, widened(finetuned_state_dict[name]) - widened(base))
            for name, base in base_state_dict.items()
        )

    @staticmethod
    def apply_task_vector(
        base_state_dict: StateDict, task_vector: StateDict, scaling: float = 1.0
    ) -> OrderedDict[str, Tensor]:
        same_names(base_state_dict, task_vector)
        return OrderedDict(
            (name, (widened(base) + scaling * task_vector[name]).to(base.dtype))
            for name, base in base_state_dict.items()
        )

    @staticmethod
    def add_task_vectors(
        task_vectors: Sequence[StateDict], weights: Sequence[float] | None = None
    ) -> OrderedDict[str, Tensor]:
        if not task_vectors:
            raise SharpenError("add_task_vectors: no task vector given")
        shares = [1.0] * len(task_vectors) if weights is None else list(weights)
        if len(shares) != len(task_vectors):
            raise SharpenError(f"{len(shares)} weights for {len(task_vectors)} task vectors")
        for vector in task_vectors[1:]:
            same_names(task_vectors[0], vector)
        pairs = list(zip(shares, task_vectors, strict=True))
        return OrderedDict(
            (name, sum(share * vector[name] for share, vector in pairs)) for name in task_vectors[0]
        )  # type: ignore[return-value]

    @staticmethod
    def negate_task_vector(
        task_vector: StateDict, scaling: float = 1.0
    ) -> OrderedDict[str, Tensor]:
        return OrderedDict((name, -scaling * tensor) for name, tensor in task_vector.items())


def widened(tensor: Any) -> Any:
    return cast(tensor, "float64" if tensor.itemsize == 8 else "float32")


def same_names(first: Mapping[str, Any], second: Mapping[str, Any], who: str = "models") -> None:
    """Both hold the same tensors in the same shapes."""
    odd = sorted(first.keys() ^ second.keys())
    if odd:
        raise SharpenError(f"{who} differ in {len(odd)} tensors: {', '.join(odd[:3])}")
    for name, tensor in first.items():
        if tensor.shape != second[name].shape:
            shapes = f"{list(tensor.shape)}, {list(second[name].shape)}"
            raise SharpenError(f"{who}: {name}: shapes differ: {shapes}")


# ---- files -----------------------------------------------------------------------------------


def write_task_vector(base: Model, tuned: Model, out: str | Path) -> Json:
    """The difference of two models → a file, read and written in pieces."""
    same_names(base.tensors, tuned.tensors, f"{base.where} and {tuned.where}")
    out, specs, changed = Path(out), {}, 0
    for name, spec in base.tensors.items():
        count = sum(int(np.count_nonzero(piece)) for _, piece in pieces(base, tuned, name))
        changed += count > 0
        if count * (8 + 4) + 8 * len(spec.shape) < spec.rows * spec.columns * 4:
            specs[name + SHAPE] = Spec("int64", (len(spec.shape),))
            specs[name + POSITIONS] = Spec("int64", (count,))
            specs[name + VALUES] = Spec("float32", (count,))
        else:
            specs[name] = Spec("float32", spec.shape)
    size = sum(spec.nbytes for spec in specs.values())
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        with closing(ShardWriter(Path(folder), specs, size + 1)) as writer:
            for name in base.tensors:
                write_difference(writer, base, tuned, name)
        file = Path(folder) / writer.files[0]
        sync_file(file)
        os.replace(file, out)
    sparse = sum(name.endswith(POSITIONS) for name in specs)
    return {"tensors": len(base.tensors), "changed": changed, "sparse": sparse, "bytes": size}


def write_difference(writer: ShardWriter, base: Model, tuned: Model, name: str) -> None:
    if name in writer.places:
        for start, piece in pieces(base, tuned, name):
            writer.write(name, start, piece)
        return
    writer.write(name + SHAPE, 0, np.array(base.tensors[name].shape))
    done = 0
    for start, piece in pieces(base, tuned, name):
        places = np.flatnonzero(piece)
        writer.write(name + POSITIONS, done, places + start)
        writer.write(name + VALUES, done, piece.reshape(-1)[places])
        done += len(places)


def pieces(base: Model, tuned: Model, name: str) -> Iterator[tuple[int, np.ndarray]]:
    """First element and difference of each run of rows."""
    spec = base.tensors[name]
    step = max(1, PIECE // max(1, spec.columns))
    for start in range(0, spec.rows, step):
        stop = min(spec.rows, start + step)
        found = [cast(model.read(name, start, stop), "float32") for model in (tuned, base)]
        yield start * spec.columns, found[0] - found[1]


def shifted(model: Model, file: Path) -> Model:
    """A model with a task vector added to what is read."""
    if not file.exists():
        raise SharpenError(f"{file}: no such task vector")
    stored = open_files(file, [file], {})
    for name, spec in model.tensors.items():
        found = stored.tensors.get(name)
        if found is None and name + POSITIONS not in stored.tensors:
            raise SharpenError(f"{file}: has no difference for {name} of {model.where}")
        if found is not None and found.shape != spec.shape:
            raise SharpenError(f"{file}: {name}: shape {list(found.shape)}, not {list(spec.shape)}")
    sparse = lru_cache(8)(
        lambda name: (stored.whole(name + POSITIONS), stored.whole(name + VALUES))
    )

    def read(name: str, start: int, stop: int) -> np.ndarray:
        rows, spec = model.read(name, start, stop), model.tensors[name]
        if name in stored.tensors:
            changed = rows + stored.read(name, start, stop)
        else:
            places, values = sparse(name)
            changed = cast(rows, "float32")
            low, high = np.searchsorted(places, [start * spec.columns, stop * spec.columns])
            changed.reshape(-1)[places[low:high] - start * spec.columns] += values[low:high]
        return rounded(cast(changed, rows.dtype.name), spec.dtype)

    return replace(model, where=f"{model.where}+{file}", read=read)


def load_task_vector(file: str | Path) -> OrderedDict[str, Tensor]:
    """A file's differences as a dense state dict."""
    import torch

    stored = open_files(Path(file), [Path(file)], {})
    vector: OrderedDict[str, Tensor] = OrderedDict()
    for name in stored.tensors:
        if name.endswith(POSITIONS):
            name = name.removesuffix(POSITIONS)
            found = np.zeros(tuple(stored.whole(name + SHAPE)), dtype=np.float32)
            found.reshape(-1)[stored.whole(name + POSITIONS)] = stored.whole(name + VALUES)
        elif not name.endswith((VALUES, SHAPE)):
            found = stored.whole(name)
        else:
            continue
        vector[name] = torch.from_numpy(found)
    return vector
