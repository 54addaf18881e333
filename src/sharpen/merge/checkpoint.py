"""Model folders of safetensors files: read by rows, written by pieces.

Reading goes through `pread` into buffers of our own: pages of a memory map would stay in the
process's resident size. An output's layout is known first, so that any process can write a piece.
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

NAMES = {code: name for name, (code, _) in DTYPES.items()}


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
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * np.dtype(DTYPES[self.dtype][1]).itemsize

    def row_ranges(self, elements: int) -> list[tuple[int, int]]:
        """First row and row after the last of pieces of about that size; one at least."""
        step = max(1, elements // max(1, self.columns))
        return [(n, min(self.rows, n + step)) for n in range(0, max(1, self.rows), step)]


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
    places: dict[str, tuple[Spec, Path, int]] = {}
    for file in files:
        places |= {name: (spec, file, at) for name, (spec, at) in read_header(file).items()}

    def read(name: str, start: int, stop: int) -> np.ndarray:
        spec, file, at = places[name]
        raw = np.empty((stop - start, spec.columns), dtype=DTYPES[spec.dtype][1])
        at += start * spec.columns * raw.itemsize
        with open(file, "rb") as stream:  # buffered: one plain read ends at 2 GiB
            stream.seek(at)
            count = stream.readinto(raw.data) if raw.size else 0
        require(count == raw.nbytes, f"{file}: ended while {name} was read")
        return decode(raw, spec.dtype)

    tensors = {name: spec for name, (spec, _, _) in places.items()}
    return Model(str(folder), folder, config, tensors, read)


def open_model(folder: str | Path) -> Model:
    """A model folder with `config.json` and safetensors weights."""
    folder = Path(folder)
    hint = "(a model of a hub is fetched by `sharpen models pull`)"
    require(folder.is_dir(), f"{folder}: no such model folder {hint}")
    config, index = folder / "config.json", folder / "model.safetensors.index.json"
    require(config.exists(), f"{folder}: has no config.json, so it is not a model folder")
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        files = [folder / Path(name).name for name in names]
    else:
        whole = folder / "model.safetensors"
        files = [whole] if whole.exists() else sorted(folder.glob("model*.safetensors"))
    pickled = [f.name for f in folder.iterdir() if f.suffix in (".bin", ".pt", ".pth")]
    advice = f": {pickled[0]} is a pickle, which can run code; convert it" if pickled else ""
    require(files, f"{folder}: has no .safetensors weights{advice}")
    return open_files(folder, files, read_json(config))


def read_header(file: Path) -> dict[str, tuple[Spec, int]]:
    """Tensor → its shape and its offset in the file."""
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
    found = dict[str, tuple[Spec, int]]()
    for name, entry in header.items():
        require(entry["dtype"] in NAMES, f"{file}: {name}: cannot read {entry['dtype']}")
        spec = Spec(NAMES[entry["dtype"]], tuple(entry["shape"]))
        found[name] = spec, 8 + length + entry["data_offsets"][0]
    return found


class ShardWriter:
    """Safetensors files of known layout, written piece by piece."""

    def __init__(self, folder: Path, specs: Mapping[str, Spec], shard_bytes: int):
        self.specs = specs
        self.places: dict[str, tuple[int, int]] = {}  # handle and offset of each tensor
        shards, used = [[]], 0
        for name, spec in specs.items():
            if shards[-1] and used + spec.nbytes > shard_bytes:
                shards.append([])
                used = 0
            shards[-1].append(name)
            used += spec.nbytes
        index: dict[str, str] = {}
        for i, names in enumerate(shards, 1):
            part = f"-{i:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
            self.open(folder / f"model{part}.safetensors", names)
            index |= dict.fromkeys(names, f"model{part}.safetensors")
        if len(shards) > 1:
            size = {"total_size": sum(spec.nbytes for spec in specs.values())}
            value = {"metadata": size, "weight_map": index}
            write_json(folder / "model.safetensors.index.json", value)

    def open(self, file: Path, names: Sequence[str]) -> None:
        header, end = dict[str, Json](__metadata__={"format": "pt"}), 0
        for name in names:
            spec, begin, end = self.specs[name], end, end + self.specs[name].nbytes
            header[name] = {"dtype": DTYPES[spec.dtype][0], "shape": list(spec.shape)}
            header[name]["data_offsets"] = [begin, end]
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
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
        for handle in {handle for handle, _ in self.places.values()}:
            os.close(handle)
