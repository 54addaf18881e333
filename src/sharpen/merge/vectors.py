"""Task vectors (what fine-tuning changed) as files, and checks of state dicts.

A file holds a tensor's differences densely, or as positions and values where that is smaller.
Differences are float32, so that base + vector is the tuned model again, bit for bit. `sharpen merge
vector` calls `write_task_vector`, and `adapters` lays a vector over a model.
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

from sharpen.merge import require
from sharpen.merge.checkpoint import Model, ShardWriter, TensorSpec, open_files
from sharpen.merge.tiles import cast, round_in_place
from sharpen.records import sync_file
from sharpen.types import Json

if TYPE_CHECKING:
    from torch import Tensor

StateDict = Mapping[str, "Tensor"]
StateDicts = Sequence[StateDict]
Weights = OrderedDict[str, "Tensor"]
# a sparse tensor is stored as three tensors, with these endings to its name
_SHAPE = ".shape"
_POSITIONS = ".positions"
_VALUES = ".values"
_SPARSE_PARTS = (_SHAPE, _POSITIONS, _VALUES)
_PIECE_ELEMENTS = 1 << 20  # elements compared at a time


def to_compute_dtype(tensor: Any) -> Any:
    """Returns a tensor in float64 if its elements have 8 bytes, otherwise in float32."""
    return cast(tensor, "float64" if tensor.itemsize == 8 else "float32")


def require_same_tensors(
    first: Mapping[str, Any], second: Mapping[str, Any], models: str = "models"
) -> None:
    """Raise unless both hold the same tensors in the same shapes; `models` names them."""
    only_in_one = sorted(first.keys() ^ second.keys())
    examples = ", ".join(only_in_one[:3])
    require(not only_in_one, f"{models} differ in {len(only_in_one)} tensors: {examples}")
    for name, tensor in first.items():
        shape = list(tensor.shape)
        other_shape = list(second[name].shape)
        require(shape == other_shape, f"{models}: {name}: shapes differ: {shape}, {other_shape}")


def write_task_vector(base: Model, tuned: Model, out: str | Path) -> Json:
    """Write the difference of two models to a file, piece by piece; return what was written."""
    out = Path(out)
    require(out.suffix == ".safetensors", f"{out}: a task vector's file ends in .safetensors")
    require_same_tensors(base.tensors, tuned.tensors, f"{base.where} and {tuned.where}")
    specs: dict[str, TensorSpec] = {}
    changed = 0
    for name, spec in base.tensors.items():
        pieces = _differences(base, tuned, name)
        count = sum(int(np.count_nonzero(piece)) for _, piece in pieces)
        if count > 0:
            changed += 1
        specs |= _specs_of_difference(name, spec, count)
    size = sum(spec.nbytes for spec in specs.values())
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        # shards of more than the whole size: always one file
        with closing(ShardWriter(Path(folder), specs, size + 1)) as writer:
            for name in base.tensors:
                _write_difference(writer, base, tuned, name)
        file = Path(folder) / "model.safetensors"
        sync_file(file)
        os.replace(file, out)
    sparse = sum(name.endswith(_POSITIONS) for name in specs)
    return {"tensors": len(base.tensors), "changed": changed, "sparse": sparse, "bytes": size}


def _specs_of_difference(name: str, spec: TensorSpec, count: int) -> dict[str, TensorSpec]:
    """Returns the tensors that store a difference with `count` values other than 0."""
    dense = TensorSpec("float32", spec.shape)
    dimensions = len(spec.shape)
    sparse_bytes = 12 * count + 8 * dimensions
    if sparse_bytes >= dense.nbytes:
        return {name: dense}
    return {
        name + _SHAPE: TensorSpec("int64", (dimensions,)),
        name + _POSITIONS: TensorSpec("int64", (count,)),
        name + _VALUES: TensorSpec("float32", (count,)),
    }


def _write_difference(writer: ShardWriter, base: Model, tuned: Model, name: str) -> None:
    """Write one tensor's difference, in the form that the writer's layout has for it."""
    if name in writer.places:
        for start, piece in _differences(base, tuned, name):
            writer.write(name, start, piece)
        return
    writer.write(name + _SHAPE, 0, np.array(base.tensors[name].shape))
    written = 0
    for start, piece in _differences(base, tuned, name):
        positions = np.flatnonzero(piece)
        writer.write(name + _POSITIONS, written, positions + start)
        writer.write(name + _VALUES, written, piece.reshape(-1)[positions])
        written += len(positions)


def _differences(base: Model, tuned: Model, name: str) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the number of the first element and the difference for each run of rows."""
    spec = base.tensors[name]
    for start, stop in spec.row_ranges(_PIECE_ELEMENTS):
        tuned_rows = cast(tuned.read(name, start, stop), "float32")
        base_rows = cast(base.read(name, start, stop), "float32")
        yield start * spec.columns, tuned_rows - base_rows


def _open_vector(file: Path) -> Model:
    """Open a file of differences, read by rows as if all tensors were dense."""
    require(file.exists(), f"{file}: no such task vector")
    stored = open_files(file, [file], {})
    tensors: dict[str, TensorSpec] = {}
    for name, spec in stored.tensors.items():
        if not name.endswith(_SPARSE_PARTS):
            tensors[name] = spec
    for part in stored.tensors:
        if part.endswith(_SHAPE):
            shape = tuple(stored.whole(part).tolist())
            tensors[part.removesuffix(_SHAPE)] = TensorSpec("float32", shape)

    @lru_cache(8)
    def positions_and_values(name: str) -> tuple[np.ndarray, np.ndarray]:
        return stored.whole(name + _POSITIONS), stored.whole(name + _VALUES)

    def read(name: str, start: int, stop: int) -> np.ndarray:
        if name in stored.tensors:
            return stored.read(name, start, stop)
        columns = tensors[name].columns
        positions, values = positions_and_values(name)
        rows = np.zeros((stop - start, columns), dtype=np.float32)
        low, high = np.searchsorted(positions, [start * columns, stop * columns])
        rows.reshape(-1)[positions[low:high] - start * columns] = values[low:high]
        return rows

    return replace(stored, tensors=tensors, read=read)


def apply_vector_file(model: Model, file: Path) -> Model:
    """Returns the model with a task vector added to what is read."""
    vector = _open_vector(file)
    require_same_tensors(model.tensors, vector.tensors, f"{model.where} and {file}")

    def read(name: str, start: int, stop: int) -> np.ndarray:
        rows = model.read(name, start, stop)
        changed = cast(rows + vector.read(name, start, stop), rows.dtype.name)
        return round_in_place(changed, model.tensors[name].dtype)

    return replace(model, where=f"{model.where}+{file}", read=read)


def load_task_vector(file: str | Path) -> Weights:
    """Read a file of differences as a dense state dict."""
    import torch

    vector = _open_vector(Path(file))
    state_dict: Weights = OrderedDict()
    for name in vector.tensors:
        state_dict[name] = torch.from_numpy(vector.whole(name))
    return state_dict
