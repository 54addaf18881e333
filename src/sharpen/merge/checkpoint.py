"""Model folders of safetensors files: read by rows, written by pieces.

Reading goes through `pread` into buffers of our own, because pages of a memory map would stay in
the process's resident size. The layout of an output is known before its first byte, so that any
thread can write any piece.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from sharpen.records import read_json, write_json
from sharpen.types import Json, SharpenError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class Spec:
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.shape[0] if len(self.shape) > 1 else 1

    @property
    def columns(self) -> int:
        return math.prod(self.shape[1:]) if len(self.shape) > 1 else math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Weights(Protocol):
    """Named tensors that can be read by rows: a model folder, or one with a layer over it."""

    where: str
    folder: Path
    config: Json

    @property
    def tensors(self) -> Mapping[str, Spec]: ...

    def rows(self, name: str, start: int, stop: int) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Place:
    file: Path
    offset: int


class Safetensors:
    """Tensors of one or several safetensors files."""

    def __init__(self, folder: Path, files: Sequence[Path], config: Json):
        self.where, self.folder, self.config = str(folder), folder, config
        self.tensors: dict[str, Spec] = {}
        self.places: dict[str, Place] = {}
        self.handles: dict[Path, int] = {}
        for file in files:
            for name, (spec, offset) in read_header(file).items():
                self.tensors[name], self.places[name] = spec, Place(file, offset)
            self.handles[file] = os.open(file, os.O_RDONLY)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        spec, place = self.tensors[name], self.places[name]
        width = spec.columns * spec.dtype.itemsize
        buffer = torch.empty((stop - start) * width, dtype=torch.uint8)
        view, at = buffer.numpy().data, place.offset + start * width
        while view:
            count = os.preadv(self.handles[place.file], [view], at)
            if count == 0:
                raise SharpenError(f"{place.file}: ended while {name} was read")
            view, at = view[count:], at + count
        return buffer.view(spec.dtype).reshape(stop - start, spec.columns)

    def __del__(self) -> None:
        for handle in getattr(self, "handles", {}).values():
            os.close(handle)


def open_model(folder: str | Path) -> Safetensors:
    """A model folder with `config.json` and safetensors weights; anything else is an error that
    says what to do."""
    folder = Path(folder)
    if not folder.is_dir():
        raise SharpenError(
            f"{folder}: no such model folder (a model of a hub is fetched by `sharpen models pull`)"
        )
    if not (folder / "config.json").exists():
        raise SharpenError(f"{folder}: has no config.json, so it is not a model folder")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        files = [folder / Path(name).name for name in names]
    else:
        whole = folder / "model.safetensors"
        files = [whole] if whole.exists() else sorted(folder.glob("model*.safetensors"))
    if not files:
        pickled = sorted(f.name for f in folder.iterdir() if f.suffix in (".bin", ".pt", ".pth"))
        if pickled:
            raise SharpenError(
                f"{folder}: {pickled[0]} is a pickle, which can run code; convert it to safetensors"
            )
        raise SharpenError(f"{folder}: has no .safetensors weights")
    return Safetensors(folder, files, read_json(folder / "config.json"))


def read_header(file: Path) -> dict[str, tuple[Spec, int]]:
    """Tensor → its shape and its offset in the file; every size is checked against the file's."""
    try:
        size = file.stat().st_size
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise SharpenError(f"{file}: not a safetensors file, or cut within its header")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise SharpenError(f"{file}: {error.strerror}") from None
    except ValueError:
        raise SharpenError(f"{file}: its header is not JSON") from None
    header.pop("__metadata__", None)
    found = {name: entry_of(file, name, entry) for name, entry in header.items()}
    end = max((offset + spec.nbytes for spec, offset in found.values()), default=0)
    if 8 + length + end > size:
        raise SharpenError(
            f"{file}: truncated: its header promises {8 + length + end:,} bytes, the file has "
            f"{size:,}"
        )
    return {name: (spec, 8 + length + offset) for name, (spec, offset) in found.items()}


def entry_of(file: Path, name: str, entry: Any) -> tuple[Spec, int]:
    try:
        spec = Spec(DTYPES[entry["dtype"]], tuple(int(n) for n in entry["shape"]))
        begin, end = entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise SharpenError(f"{file}: cannot read tensor {name}: {str(entry)[:80]}") from None
    if begin < 0 or end - begin != spec.nbytes:
        raise SharpenError(f"{file}: {name}: {end - begin} bytes do not fit its shape {spec.shape}")
    return spec, begin


class ShardWriter:
    """Safetensors files of known layout, written piece by piece."""

    def __init__(self, folder: Path, specs: Mapping[str, Spec], shard_bytes: int):
        self.folder, self.total = folder, sum(spec.nbytes for spec in specs.values())
        self.places: dict[str, tuple[int, int, int]] = {}  # handle, offset, bytes a row
        self.handles: list[int] = []
        shards = split(specs, shard_bytes)
        self.names = [shard_name(i, len(shards)) for i in range(len(shards))]
        self.index = {
            name: file for shard, file in zip(shards, self.names, strict=True) for name in shard
        }
        for shard, file in zip(shards, self.names, strict=True):
            self.open(folder / file, {name: specs[name] for name in shard})

    def open(self, file: Path, specs: Mapping[str, Spec]) -> None:
        header: Json = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, spec in specs.items():
            header[name] = {
                "dtype": NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [end, end + spec.nbytes],
            }
            end += spec.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self.handles.append(handle)
        os.pwrite(handle, len(text).to_bytes(8, "little") + text, 0)
        os.ftruncate(handle, 8 + len(text) + end)
        for name, spec in specs.items():
            offset = 8 + len(text) + header[name]["data_offsets"][0]
            self.places[name] = handle, offset, spec.columns * spec.dtype.itemsize

    def write(self, name: str, start: int, rows: Tensor) -> None:
        """Rows of a tensor, from row `start` on."""
        self.write_at(name, start * self.places[name][2], rows)

    def write_at(self, name: str, offset: int, values: Tensor) -> None:
        """Values from byte `offset` of a tensor on."""
        handle, begin, _ = self.places[name]
        begin = at = begin + offset
        view = values.contiguous().reshape(-1).view(torch.uint8).numpy().data
        while view:
            count = os.pwrite(handle, view, at)
            view, at = view[count:], at + count
        if hasattr(
            os, "posix_fadvise"
        ):  # starts writing back, so that the last sync has less to do
            os.posix_fadvise(handle, begin, at - begin, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        for handle in self.handles:
            os.close(handle)
        self.handles = []

    def finish(self) -> None:
        self.close()
        if len(self.names) > 1:
            write_json(
                self.folder / "model.safetensors.index.json",
                {"metadata": {"total_size": self.total}, "weight_map": self.index},
            )


def split(specs: Mapping[str, Spec], limit: int) -> list[list[str]]:
    """Names in order, in groups of at most `limit` bytes (one tensor at least)."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, spec in specs.items():
        if shards[-1] and used + spec.nbytes > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += spec.nbytes
    return shards


def shard_name(index: int, count: int) -> str:
    return (
        "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"
    )
