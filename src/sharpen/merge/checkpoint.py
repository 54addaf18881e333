"""Model folders of safetensors files: read by rows, written by pieces.

Reading goes through plain reads into buffers of our own: pages of a memory map would count as the
process's memory. The layout of an output is known before its values, so that any process can write
any piece. `adapters`, `plan`, `stream`, `vectors` and `vocabulary` read and write through here.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from sharpen.merge import require
from sharpen.merge.tiles import DTYPES, decode, encode
from sharpen.records import read_json, write_json
from sharpen.types import Json, SharpenError

_DTYPE_OF_CODE = {code: dtype for dtype, (code, _) in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Dtype and shape of a stored tensor, seen as a matrix of rows."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        """The first dimension; a vector or a scalar is one row."""
        return self.shape[0] if len(self.shape) > 1 else 1

    @property
    def columns(self) -> int:
        """Elements per row."""
        return math.prod(self.shape[1:] if len(self.shape) > 1 else self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in a file."""
        return self.size * np.dtype(DTYPES[self.dtype][1]).itemsize

    def row_ranges(self, elements: int) -> list[tuple[int, int]]:
        """Cut the rows into pieces of about `elements` elements, one piece at least.

        Each piece is its first row and the row after its last.
        """
        step = max(1, elements // max(1, self.columns))
        starts = range(0, max(1, self.rows), step)
        return [(start, min(self.rows, start + step)) for start in starts]


@dataclass(frozen=True, eq=False)
class Model:
    """Named tensors that can be read by rows: a model folder, or one with a layer over it."""

    where: str  # for messages
    folder: Path
    config: Json
    tensors: Mapping[str, TensorSpec]
    read: Callable[[str, int, int], np.ndarray]  # tensor, first row, row after the last

    def whole(self, name: str) -> np.ndarray:
        """Read a whole tensor in its own shape."""
        spec = self.tensors[name]
        return self.read(name, 0, spec.rows).reshape(spec.shape)


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """Where a tensor lies in a file."""

    spec: TensorSpec
    file: Path
    offset: int


def open_files(folder: Path, files: Sequence[Path], config: Json) -> Model:
    """Open the tensors of one or several safetensors files as a model."""
    stored: dict[str, _StoredTensor] = {}
    for file in files:
        for name, (spec, offset) in read_header(file).items():
            stored[name] = _StoredTensor(spec, file, offset)

    def read(name: str, start: int, stop: int) -> np.ndarray:
        tensor = stored[name]
        spec = tensor.spec
        raw = np.empty((stop - start, spec.columns), dtype=DTYPES[spec.dtype][1])
        with open(tensor.file, "rb") as stream:  # buffered: one unbuffered read ends at 2 GiB
            stream.seek(tensor.offset + start * spec.columns * raw.itemsize)
            count = stream.readinto(raw.data) if raw.size else 0
        require(count == raw.nbytes, f"{tensor.file}: ended while {name} was read")
        return decode(raw, spec.dtype)

    tensors = {name: tensor.spec for name, tensor in stored.items()}
    return Model(str(folder), folder, config, tensors, read)


def open_model(folder: str | Path) -> Model:
    """Open a model folder with `config.json` and safetensors weights."""
    folder = Path(folder)
    hint = "(download a model from a hub with `sharpen models pull`)"
    require(folder.is_dir(), f"{folder}: no such model folder {hint}")
    config = folder / "config.json"
    require(config.exists(), f"{folder}: has no config.json, so it is not a model folder")
    files = _weight_files(folder)
    pickled = [file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth")]
    advice = ""
    if pickled:
        advice = f": {pickled[0]} is a pickle, which can run code; convert it to safetensors"
    require(files, f"{folder}: has no .safetensors weights{advice}")
    return open_files(folder, files, read_json(config))


def _weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a model folder: those of the index, if it has one."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        return [folder / Path(name).name for name in names]
    single_file = folder / "model.safetensors"
    if single_file.exists():
        return [single_file]
    return sorted(folder.glob("model*.safetensors"))


def read_header(file: Path) -> dict[str, tuple[TensorSpec, int]]:
    """Read the dtype, shape and offset in the file of every tensor."""
    require(file.exists(), f"{file}: No such file")
    try:
        with safe_open(file, framework="numpy"):  # checks sizes and offsets
            pass
    except (SafetensorError, OSError) as error:
        raise SharpenError(f"{file}: truncated, or not a safetensors file: {error}") from None
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    tensors: dict[str, tuple[TensorSpec, int]] = {}
    for name, entry in header.items():
        code = entry["dtype"]
        require(code in _DTYPE_OF_CODE, f"{file}: {name}: cannot read {code}")
        spec = TensorSpec(_DTYPE_OF_CODE[code], tuple(entry["shape"]))
        tensors[name] = (spec, 8 + length + entry["data_offsets"][0])
    return tensors


class ShardWriter:
    """Safetensors files of known layout, written piece by piece."""

    def __init__(self, folder: Path, specs: Mapping[str, TensorSpec], shard_bytes: int):
        self.specs = specs
        self.places: dict[str, tuple[int, int]] = {}  # file handle and offset of each tensor
        shards = _split_into_shards(specs, shard_bytes)
        file_of: dict[str, str] = {}
        for number, names in enumerate(shards, 1):
            suffix = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
            file = f"model{suffix}.safetensors"
            self._create_file(folder / file, names)
            for name in names:
                file_of[name] = file
        if len(shards) > 1:
            total_size = sum(spec.nbytes for spec in specs.values())
            index = {"metadata": {"total_size": total_size}, "weight_map": file_of}
            write_json(folder / "model.safetensors.index.json", index)

    def _create_file(self, file: Path, names: Sequence[str]) -> None:
        """Write a file's header and give the file its full size."""
        header: dict[str, Json] = {"__metadata__": {"format": "pt"}}
        data_bytes = 0
        for name in names:
            spec = self.specs[name]
            begin = data_bytes
            data_bytes += spec.nbytes
            header[name] = {
                "dtype": DTYPES[spec.dtype][0],
                "shape": list(spec.shape),
                "data_offsets": [begin, data_bytes],
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # data begins at a multiple of 8
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        os.pwrite(handle, len(text).to_bytes(8, "little") + text, 0)
        data_start = 8 + len(text)
        os.ftruncate(handle, data_start + data_bytes)
        for name in names:
            self.places[name] = (handle, data_start + header[name]["data_offsets"][0])

    def write(self, name: str, start: int, values: np.ndarray) -> None:
        """Write values from element `start` of a tensor on; the values may be changed."""
        raw = encode(np.ascontiguousarray(values), self.specs[name].dtype)
        handle, offset = self.places[name]
        begin = offset + start * raw.itemsize
        end = begin
        remaining = raw.reshape(-1).view(np.uint8).data
        while remaining:
            count = os.pwrite(handle, remaining, end)
            remaining = remaining[count:]
            end += count
        if hasattr(os, "posix_fadvise"):  # starts writing back, so that the last sync is short
            os.posix_fadvise(handle, begin, end - begin, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        for handle in {handle for handle, _ in self.places.values()}:
            os.close(handle)


def _split_into_shards(specs: Mapping[str, TensorSpec], shard_bytes: int) -> list[list[str]]:
    """Distribute tensors, in order, over files of at most `shard_bytes` each.

    A tensor larger than that gets a file of its own.
    """
    shards: list[list[str]] = [[]]
    used = 0
    for name, spec in specs.items():
        if shards[-1] and used + spec.nbytes > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += spec.nbytes
    return shards
