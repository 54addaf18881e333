"""Model folders of safetensors files: read by rows, written by pieces.

Reading goes through `pread` into buffers of our own, because pages of a memory map would stay in
the process's resident size. The layout of an output is known before its first byte, so that any
thread can write any piece.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sharpen.merge.arrays import DTYPES, NAMES, decode, encode, itemsize
from sharpen.records import read_json, write_json
from sharpen.types import Json, SharpenError

MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class Spec:
    dtype: str
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.shape[0] if len(self.shape) > 1 else 1

    @property
    def columns(self) -> int:
        return math.prod(self.shape[1:] if len(self.shape) > 1 else self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True, eq=False)
class Model:
    """Named tensors that can be read by rows: a model folder, or one with a layer over it."""

    where: str
    folder: Path
    config: Json
    tensors: Mapping[str, Spec]
    read: Callable[[str, int, int], np.ndarray]  # tensor, first row, row after the last

    def whole(self, name: str) -> np.ndarray:
        spec = self.tensors[name]
        return self.read(name, 0, spec.rows).reshape(spec.shape)


def open_files(folder: Path, files: Sequence[Path], config: Json) -> Model:
    """Tensors of one or several safetensors files."""
    tensors: dict[str, Spec] = {}
    places: dict[str, tuple[Path, int]] = {}
    for file in files:
        for name, (spec, offset) in read_header(file).items():
            tensors[name], places[name] = spec, (file, offset)

    def read(name: str, start: int, stop: int) -> np.ndarray:
        spec, (file, offset) = tensors[name], places[name]
        raw = np.empty((stop - start, spec.columns), dtype=DTYPES[spec.dtype][1])
        handle = os.open(file, os.O_RDONLY)
        try:
            at = offset + start * spec.columns * raw.itemsize
            if raw.size and os.preadv(handle, [raw.data], at) != raw.nbytes:
                raise SharpenError(f"{file}: ended while {name} was read")
        finally:
            os.close(handle)
        return decode(raw, spec.dtype)

    return Model(str(folder), folder, config, tensors, read)


def open_model(folder: str | Path) -> Model:
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
    return open_files(folder, files, read_json(folder / "config.json"))


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
    end = 8 + length + max((offset + spec.nbytes for spec, offset in found.values()), default=0)
    if end > size:
        raise SharpenError(
            f"{file}: truncated: its header promises {end:,} bytes, the file has {size:,}"
        )
    return {name: (spec, 8 + length + offset) for name, (spec, offset) in found.items()}


def entry_of(file: Path, name: str, entry: Any) -> tuple[Spec, int]:
    try:
        spec = Spec(NAMES[entry["dtype"]], tuple(int(n) for n in entry["shape"]))
        begin, end = entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise SharpenError(f"{file}: cannot read tensor {name}: {str(entry)[:80]}") from None
    if begin < 0 or end - begin != spec.nbytes:
        raise SharpenError(f"{file}: {name}: {end - begin} bytes do not fit its shape {spec.shape}")
    return spec, begin


class ShardWriter:
    """Safetensors files of known layout, written piece by piece."""

    def __init__(self, folder: Path, specs: Mapping[str, Spec], shard_bytes: int):
        self.specs = specs
        self.places: dict[str, tuple[int, int]] = {}  # handle and offset of each tensor
        self.handles: list[int] = []
        shards = split(specs, shard_bytes)
        self.files = [f"model-{i + 1:05d}-of-{len(shards):05d}" for i in range(len(shards))]
        self.files = [f"{n}.safetensors" for n in (self.files if len(shards) > 1 else ["model"])]
        for file, names in zip(self.files, shards, strict=True):
            self.open(folder / file, names)
        if len(shards) > 1:
            pairs = zip(self.files, shards, strict=True)
            index: Json = {"metadata": {"total_size": sum(s.nbytes for s in specs.values())}}
            index["weight_map"] = {name: file for file, names in pairs for name in names}
            write_json(folder / "model.safetensors.index.json", index)

    def open(self, file: Path, names: Sequence[str]) -> None:
        header: Json = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            spec, begin = self.specs[name], end
            end += spec.nbytes
            header[name] = {"dtype": DTYPES[spec.dtype][0], "shape": list(spec.shape)}
            header[name]["data_offsets"] = [begin, end]
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self.handles.append(handle)
        os.pwrite(handle, len(text).to_bytes(8, "little") + text, 0)
        os.ftruncate(handle, 8 + len(text) + end)
        for name in names:
            self.places[name] = handle, 8 + len(text) + header[name]["data_offsets"][0]

    def write(self, name: str, start: int, values: np.ndarray) -> None:
        """Values from element `start` of a tensor on; they may be changed."""
        raw = encode(np.ascontiguousarray(values), self.specs[name].dtype)
        handle, begin = self.places[name]
        begin = at = begin + start * raw.itemsize
        view = raw.reshape(-1).view(np.uint8).data
        while view:
            count = os.pwrite(handle, view, at)
            view, at = view[count:], at + count
        if hasattr(os, "posix_fadvise"):  # starts writing back: the last sync has less to do
            os.posix_fadvise(handle, begin, at - begin, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        while self.handles:
            os.close(self.handles.pop())


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
