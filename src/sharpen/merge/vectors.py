"""Task vectors: what fine-tuning changed, as arithmetic on state dicts and as files, which hold a
tensor's differences densely, or as positions and values where that is smaller. Differences are
float32, so that base + vector is the tuned model again, bit for bit."""

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

from sharpen.merge import require
from sharpen.merge.checkpoint import Model, ShardWriter, Spec, open_files
from sharpen.merge.tiles import cast, rounded
from sharpen.records import sync_file
from sharpen.types import Json

if TYPE_CHECKING:
    from torch import Tensor

StateDict = Mapping[str, "Tensor"]
StateDicts = Sequence[StateDict]
Shares = Sequence[float] | None
Weights = OrderedDict[str, "Tensor"]
SHAPE, POSITIONS, VALUES = PARTS = (".shape", ".positions", ".values")  # of a sparse tensor
PIECE = 1 << 20  # elements that are compared at a time


class TaskVectorArithmetic:
    """Task vectors as state dicts: compute, apply, add, negate."""

    @staticmethod
    def compute_task_vector(base_state_dict: StateDict, finetuned_state_dict: StateDict) -> Weights:
        return combined([finetuned_state_dict, base_state_dict], [1.0, -1.0])

    @staticmethod
    def apply_task_vector(
        base_state_dict: StateDict, task_vector: StateDict, scaling: float = 1.0
    ) -> Weights:
        changed = combined([base_state_dict, task_vector], [1.0, scaling])
        return OrderedDict((n, t.to(base_state_dict[n].dtype)) for n, t in changed.items())

    @staticmethod
    def add_task_vectors(task_vectors: StateDicts, weights: Shares = None) -> Weights:
        count = len(task_vectors)
        require(count, "add_task_vectors: no task vector given")
        shares = [1.0] * count if weights is None else list(weights)
        require(len(shares) == count, f"{len(shares)} weights for {count} task vectors")
        return combined(task_vectors, shares)

    @staticmethod
    def negate_task_vector(task_vector: StateDict, scaling: float = 1.0) -> Weights:
        return combined([task_vector], [-scaling])


def combined(dicts: StateDicts, weights: Sequence[float]) -> Weights:
    """Their weighted sum, in float32 at least."""
    for other in dicts[1:]:
        same_names(dicts[0], other)
    pairs = list(zip(dicts, weights, strict=True))
    sums: Any = ((n, sum(share * widened(d[n]) for d, share in pairs)) for n in dicts[0])
    return OrderedDict(sums)


def widened(tensor: Any) -> Any:
    return cast(tensor, "float64" if tensor.itemsize == 8 else "float32")


def same_names(first: Mapping[str, Any], second: Mapping[str, Any], who: str = "models") -> None:
    """Both hold the same tensors in the same shapes."""
    odd = sorted(first.keys() ^ second.keys())
    require(not odd, f"{who} differ in {len(odd)} tensors: {', '.join(odd[:3])}")
    for name, tensor in first.items():
        one, other = list(tensor.shape), list(second[name].shape)
        require(one == other, f"{who}: {name}: shapes differ: {one}, {other}")


def write_task_vector(base: Model, tuned: Model, out: str | Path) -> Json:
    """The difference of two models → a file, read and written in pieces."""
    out, specs, changed = Path(out), {}, 0
    require(out.suffix == ".safetensors", f"{out}: a task vector's file ends in .safetensors")
    same_names(base.tensors, tuned.tensors, f"{base.where} and {tuned.where}")
    for name, spec in base.tensors.items():
        count = sum(int(np.count_nonzero(piece)) for _, piece in pieces(base, tuned, name))
        changed += count > 0
        specs[name] = Spec("float32", spec.shape)
        if 12 * count + 8 * len(spec.shape) < specs[name].nbytes:
            del specs[name]
            kinds = [("int64", len(spec.shape)), ("int64", count), ("float32", count)]
            for part, (dtype, size) in zip(PARTS, kinds, strict=True):
                specs[name + part] = Spec(dtype, (size,))
    size = sum(spec.nbytes for spec in specs.values())
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        with closing(ShardWriter(Path(folder), specs, size + 1)) as writer:
            for name in base.tensors:
                write_difference(writer, base, tuned, name)
        file = Path(folder) / "model.safetensors"
        sync_file(file)
        os.replace(file, out)
    sparse = sum(name.endswith(POSITIONS) for name in specs)
    return {"tensors": len(base.tensors), "changed": changed, "sparse": sparse, "bytes": size}


def write_difference(writer: ShardWriter, base: Model, tuned: Model, name: str) -> None:
    sparse, done = name not in writer.places, 0
    if sparse:
        writer.write(name + SHAPE, 0, np.array(base.tensors[name].shape))
    for start, piece in pieces(base, tuned, name):
        if not sparse:
            writer.write(name, start, piece)
            continue
        places = np.flatnonzero(piece)
        writer.write(name + POSITIONS, done, places + start)
        writer.write(name + VALUES, done, piece.reshape(-1)[places])
        done += len(places)


def pieces(base: Model, tuned: Model, name: str) -> Iterator[tuple[int, np.ndarray]]:
    """First element and difference of each run of rows."""
    spec = base.tensors[name]
    for start, stop in spec.row_ranges(PIECE):
        found = [cast(model.read(name, start, stop), "float32") for model in (tuned, base)]
        yield start * spec.columns, found[0] - found[1]


def open_vector(file: Path) -> Model:
    """A file's differences, read by rows as if they were all dense."""
    require(file.exists(), f"{file}: no such task vector")
    stored = open_files(file, [file], {})
    tensors = {name: spec for name, spec in stored.tensors.items() if not name.endswith(PARTS)}
    for name in [n.removesuffix(SHAPE) for n in stored.tensors if n.endswith(SHAPE)]:
        tensors[name] = Spec("float32", tuple(stored.whole(name + SHAPE).tolist()))
    sparse = lru_cache(8)(lambda n: (stored.whole(n + POSITIONS), stored.whole(n + VALUES)))

    def read(name: str, start: int, stop: int) -> np.ndarray:
        if name in stored.tensors:
            return stored.read(name, start, stop)
        (places, values), columns = sparse(name), tensors[name].columns
        found = np.zeros((stop - start, columns), dtype=np.float32)
        low, high = np.searchsorted(places, [start * columns, stop * columns])
        found.reshape(-1)[places[low:high] - start * columns] = values[low:high]
        return found

    return replace(stored, tensors=tensors, read=read)


def shifted(model: Model, file: Path) -> Model:
    """A model with a task vector added to what is read."""
    vector = open_vector(file)
    same_names(model.tensors, vector.tensors, f"{model.where} and {file}")

    def read(name: str, start: int, stop: int) -> np.ndarray:
        rows = model.read(name, start, stop)
        changed = cast(rows + vector.read(name, start, stop), rows.dtype.name)
        return rounded(changed, model.tensors[name].dtype)

    return replace(model, where=f"{model.where}+{file}", read=read)


def load_task_vector(file: str | Path) -> Weights:
    """A file's differences as a dense state dict."""
    import torch

    vector = open_vector(Path(file))
    return OrderedDict((name, torch.from_numpy(vector.whole(name))) for name in vector.tensors)
