"""What every merge method is written on: numbers, and row tiles of one tensor in several models.

Methods compute in float32 (float64 for float64 models) and round to the working dtype where
mergekit does. On the CPU an array is numpy's, so that a merge need not import torch, on a GPU it is
torch's. Neither selection by magnitude nor random numbers depend on tiles, processes or device."""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from sharpen.types import SharpenError

R = TypeVar("R")
Array = Any  # np.ndarray or torch.Tensor
DTYPES = {  # dtype → its code in safetensors files, and what numpy holds it in
    "float64": ("F64", "f8"),
    "float32": ("F32", "f4"),
    "float16": ("F16", "f2"),
    "bfloat16": ("BF16", "u2"),
    "float8_e4m3fn": ("F8_E4M3", "u1"),
    "float8_e5m2": ("F8_E5M2", "u1"),
    "int64": ("I64", "i8"),
    "int32": ("I32", "i4"),
    "int16": ("I16", "i2"),
    "int8": ("I8", "i1"),
    "uint8": ("U8", "u1"),
    "bool": ("BOOL", "?"),
}
Dtype = Literal["bfloat16", "float16", "float32", "float64"]  # what can be computed in
WORKING: tuple[str, ...] = get_args(Dtype)
NARROW = {"bfloat16": (16, 0), "float16": (13, 0x38800000)}  # digits fewer than float32's; least
EXPONENT, MAGNITUDE = 0x7F800000, 0x7FFFFFFF  # bits of a float32
CHANCES = 1 << 16  # probabilities are multiples of 1/65536
Counts = tuple[np.ndarray, np.ndarray]  # numbers that occur, and how often


class NotFinite(SharpenError):
    """A merged value is not a number, or beyond the range of its dtype."""


def wide(dtype: str) -> str:
    """What a dtype is computed in."""
    return "float64" if dtype == "float64" else "float32"


def decode(raw: np.ndarray, dtype: str) -> np.ndarray:
    """What a file holds → float32 or float64; integers stay."""
    if dtype == "bfloat16":
        values = raw.astype(np.uint32)
        values <<= 16
        return values.view(np.float32)
    if dtype == "float8_e5m2":
        raw = (raw.astype(np.uint16) << 8).view(np.float16)
    if dtype == "float8_e4m3fn":  # its bits, moved to where float32 has them
        codes = raw.astype(np.uint32)
        values = ((codes & 0x80) << 24 | (codes & 0x7F) << 20).view(np.float32) * 2.0**120
        values[(codes & 0x7F) == 0x7F] = np.nan
        return values
    return raw.astype(wide(dtype) if "float" in dtype else raw.dtype, copy=False)


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """The other way; `values` may be changed. What `dtype` cannot hold is an error."""
    half = dtype == "bfloat16"
    values = values.astype("f4" if half else DTYPES[dtype][1], copy=False)
    if "float" in dtype and not np.isfinite(rounded(values, dtype) if half else values).all():
        raise NotFinite("a value is not a number, or infinite")
    if not half:
        return values
    found = values.view(np.uint32)
    found >>= 16
    return found.astype(np.uint16)


def module(values: Array) -> Any:
    """numpy or torch."""
    return np if isinstance(values, np.ndarray) else sys.modules["torch"]


def cast(values: Array, dtype: str) -> Array:
    if module(values) is np:
        return values.astype(dtype, copy=False)
    return values.to(getattr(module(values), dtype))


def like(values: Array, array: np.ndarray) -> Array:
    """`array` where `values` are."""
    return array if module(values) is np else module(values).from_numpy(array).to(values.device)


def on_host(values: Array) -> np.ndarray:
    return values if module(values) is np else values.cpu().numpy()


def bits(values: Array) -> Array:
    """The integers that floats are made of, as a view."""
    return values.view(getattr(module(values), f"int{8 * values.itemsize}"))


def magnitudes(values: Array) -> Array:
    """int32 that order like |values|: the bit pattern without its sign."""
    return bits(cast(values, "float32")) & MAGNITUDE


def rounded(values: Array, dtype: str) -> Array:
    """To the nearest number of `dtype`, the even one of two; in place. With a number added that is
    so large that the sum has just the digits wanted, the others are lost (from 2^112 on all are,
    and end as an error)."""
    if dtype in NARROW:
        digits, least = NARROW[dtype]
        powers = bits(values) & EXPONENT
        large = (powers.clip(least) if least else powers).view(values.dtype)
        large *= 1.5 * 2**digits
        values += large
        values -= large
    return values


@dataclass(frozen=True, slots=True)
class Tile:
    tensors: tuple[Array, ...]  # one [rows, columns] of each model; the base first if there is one
    index: int
    start: int  # position of its first element in the whole tensor


Look = Callable[[Tile], Sequence[Array]]


@dataclass(frozen=True)
class Tiles:
    count: int
    load: Callable[[int], Tile]  # fresh tensors each time, which may be changed
    elements: int
    dtype: str  # which results of a step are rounded to
    name: str = ""
    seed: int = 0

    def each(self, look: Callable[[Tile], R]) -> Iterable[R]:
        """`look` at every tile; the results in order."""
        return (look(self.load(index)) for index in range(self.count))

    def round(self, values: Array) -> Array:
        return rounded(values, self.dtype)

    def random(self, tile: Tile, model: int, dtype: str = "int16") -> Array:
        """A random number for every element of a tile, the same wherever tiles begin."""
        shape, share = tile.tensors[0].shape, 8 // np.dtype(dtype).itemsize
        wanted, skip = math.prod(shape), tile.start % share
        source = np.random.PCG64(0)
        source.state = start_of(self.seed, self.name, model)
        source.advance(tile.start // share)  # a draw of 64 bits serves several elements
        draws = source.random_raw(-(-(wanted + skip) // share)).view(dtype)
        return like(tile.tensors[0], draws[skip : skip + wanted].reshape(shape))


@lru_cache(maxsize=64)
def start_of(seed: int, name: str, model: int) -> Any:
    """Where the random numbers of a tensor and a model begin."""
    return np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode()), model])).state


@dataclass(frozen=True, slots=True)
class Top:
    """The k largest magnitudes of a tensor; of those that equal the smallest, the first."""

    limit: int
    kept: Sequence[int]  # of a tile's elements at exactly the limit, how many are kept
    equal: Sequence[int]

    def mask(self, index: int, found: Array) -> Array:
        kept, equal = self.kept[index], self.equal[index]
        if kept == equal:
            return found >= self.limit
        mask = found > self.limit
        places = np.flatnonzero(on_host(found) == self.limit)[:kept]
        mask.reshape(-1)[like(mask, places)] = True
        return mask


def select(x: Tiles, look: Look, wanted: Sequence[tuple[int, int]]) -> list[Top]:
    """For each (i, k) the k largest of the i-th array of magnitudes that `look` gives."""
    if not wanted:
        return []
    tables = list(x.each(lambda tile: [counted(found >> 16) for found in look(tile)]))
    return [top_of(x, look, i, [table[i] for table in tables], k) for i, k in wanted]


def counted(numbers: Array) -> Counts:
    found = on_host(module(numbers).bincount(numbers.reshape(-1)))
    places = np.flatnonzero(found)
    return places, found[places]


def top_of(x: Tiles, look: Look, i: int, table: Sequence[Counts], k: int) -> Top:
    """From counts of leading bits in each tile and, where values have more bits, another look."""
    if k <= 0:
        return Top(MAGNITUDE, [0] * x.count, [0] * x.count)
    last, rest = kth(table, k)
    limit = last << 16
    if x.dtype != "bfloat16":

        def trailing(tile: Tile) -> Counts:
            found = look(tile)[i]
            return counted(found[(found >> 16) == limit >> 16] & 0xFFFF)

        table = list(x.each(trailing))
        last, rest = kth(table, rest)
        limit |= last
    equal = [int(counts[numbers == last].sum()) for numbers, counts in table]
    ends = np.minimum(np.cumsum(equal), rest)  # the first tiles take what is left at the limit
    return Top(limit, np.diff(ends, prepend=0).tolist(), equal)


def kth(table: Sequence[Counts], k: int) -> tuple[int, int]:
    """The k-th largest number, and how many of its like are among the k largest."""
    numbers, counts = (np.concatenate(column) for column in zip(*table, strict=True))
    above = np.bincount(numbers, weights=counts)[::-1].cumsum()
    place = int(np.searchsorted(above, k))
    return len(above) - 1 - place, k - int(above[place - 1] if place else 0)
