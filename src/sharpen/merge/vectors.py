"""Task vectors: what fine-tuning changed, as arithmetic on state dicts and as files.

A file holds a tensor's differences densely, or as positions and values where that is smaller.
Differences are float32, so that base + vector is the tuned model again, bit for bit.
"""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sharpen.merge.checkpoint import Safetensors, ShardWriter, Spec, Weights
from sharpen.merge.deltas import wide
from sharpen.merge.tiles import TILE_ELEMENTS
from sharpen.records import sync_file
from sharpen.types import Json, SharpenError

StateDict = Mapping[str, Tensor]
POSITIONS, VALUES, SHAPE = ".positions", ".values", ".shape"


class TaskVectorArithmetic:
    """Task vectors as state dicts: compute, apply, add, negate."""

    @staticmethod
    def compute_task_vector(
        base_state_dict: StateDict, finetuned_state_dict: StateDict
    ) -> OrderedDict[str, Tensor]:
        same_names(base_state_dict, finetuned_state_dict)
        return OrderedDict(
            (name, wide(finetuned_state_dict[name]) - wide(base))
            for name, base in base_state_dict.items()
        )

    @staticmethod
    def apply_task_vector(
        base_state_dict: StateDict, task_vector: StateDict, scaling: float = 1.0
    ) -> OrderedDict[str, Tensor]:
        same_names(base_state_dict, task_vector)
        return OrderedDict(
            (name, (wide(base) + scaling * task_vector[name]).to(base.dtype))
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
        return OrderedDict(
            (name, sum(w * vector[name] for w, vector in zip(shares, task_vectors, strict=True)))
            for name in task_vectors[0]
        )  # type: ignore[return-value]

    @staticmethod
    def negate_task_vector(
        task_vector: StateDict, scaling: float = 1.0
    ) -> OrderedDict[str, Tensor]:
        return OrderedDict((name, -scaling * tensor) for name, tensor in task_vector.items())


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


def write_task_vector(base: Weights, tuned: Weights, out: str | Path) -> Json:
    """The difference of two models → a file, read and written in pieces."""
    same_names(base.tensors, tuned.tensors, f"{base.where} and {tuned.where}")
    counts = {
        name: sum(int(piece.count_nonzero()) for _, piece in pieces(base, tuned, name))
        for name in base.tensors
    }
    specs: dict[str, Spec] = {}
    for name, spec in base.tensors.items():
        size = spec.rows * spec.columns
        if counts[name] * (8 + 4) + 8 * len(spec.shape) < size * 4:
            specs[name + SHAPE] = Spec(torch.int64, (len(spec.shape),))
            specs[name + POSITIONS] = Spec(torch.int64, (counts[name],))
            specs[name + VALUES] = Spec(torch.float32, (counts[name],))
        else:
            specs[name] = Spec(torch.float32, spec.shape)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        writer = ShardWriter(Path(folder), specs, sum(s.nbytes for s in specs.values()) + 1)
        try:
            for name, spec in base.tensors.items():
                write_difference(writer, name, spec, pieces(base, tuned, name))
        finally:
            writer.close()
        file = Path(folder) / writer.names[0]
        sync_file(file)
        os.replace(file, out)
    return {
        "tensors": len(counts),
        "changed": sum(1 for count in counts.values() if count),
        "sparse": sum(1 for name in specs if name.endswith(POSITIONS)),
        "bytes": writer.total,
    }


def write_difference(
    writer: ShardWriter, name: str, spec: Spec, found: Iterator[tuple[int, Tensor]]
) -> None:
    if name in writer.places:
        for start, piece in found:
            writer.write(name, start, piece)
        return
    writer.write(name + SHAPE, 0, torch.tensor(spec.shape, dtype=torch.int64))
    done = 0
    for start, piece in found:
        flat = piece.reshape(-1)
        places = flat.nonzero()[:, 0]
        writer.write_at(name + POSITIONS, done * 8, places + start * spec.columns)
        writer.write_at(name + VALUES, done * 4, flat[places])
        done += len(places)


def pieces(base: Weights, tuned: Weights, name: str) -> Iterator[tuple[int, Tensor]]:
    """First row and difference of each run of rows."""
    spec = base.tensors[name]
    step = max(1, TILE_ELEMENTS // max(1, spec.columns))
    for start in range(0, spec.rows, step):
        stop = min(spec.rows, start + step)
        yield start, tuned.rows(name, start, stop).float() - base.rows(name, start, stop).float()


class Shifted:
    """A model with a task vector added to what is read."""

    def __init__(self, model: Weights, file: Path):
        if not file.exists():
            raise SharpenError(f"{file}: no such task vector")
        self.where, self.folder, self.config = f"{model.where}+{file}", model.folder, model.config
        self.model, self.tensors = model, model.tensors
        self.stored = Safetensors(file, [file], {})
        for name, spec in model.tensors.items():
            found = self.stored.tensors.get(name)
            if found is None and name + POSITIONS not in self.stored.tensors:
                raise SharpenError(f"{file}: has no difference for {name} of {model.where}")
            if found is not None and found.shape != spec.shape:
                raise SharpenError(
                    f"{file}: {name}: shape {list(found.shape)}, not {list(spec.shape)}"
                )

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        rows = self.model.rows(name, start, stop)
        if name in self.stored.tensors:
            return (rows.float() + self.stored.rows(name, start, stop)).to(rows.dtype)
        places = self.stored.rows(name + POSITIONS, 0, 1)[0]
        values = self.stored.rows(name + VALUES, 0, 1)[0]
        columns = self.tensors[name].columns
        low, high = torch.searchsorted(
            places, torch.tensor([start * columns, stop * columns])
        ).tolist()
        wide_rows = rows.float()
        wide_rows.view(-1)[places[low:high] - start * columns] += values[low:high]
        return wide_rows.to(rows.dtype)


def load_task_vector(file: str | Path) -> OrderedDict[str, Tensor]:
    """A file's differences as a dense state dict."""
    stored = Safetensors(Path(file), [Path(file)], {})
    vector: OrderedDict[str, Tensor] = OrderedDict()
    for name, spec in stored.tensors.items():
        if name.endswith(POSITIONS):
            name = name.removesuffix(POSITIONS)
            shape = stored.rows(name + SHAPE, 0, 1)[0].tolist()
            flat = torch.zeros(shape).reshape(-1)
            flat[stored.rows(name + POSITIONS, 0, 1)[0]] = stored.rows(name + VALUES, 0, 1)[0]
            vector[name] = flat.reshape(shape)
        elif not name.endswith((VALUES, SHAPE)):
            vector[name] = stored.rows(name, 0, spec.rows).reshape(spec.shape)
    return vector
