"""Arrays, dtypes and row tiles: what every merge method computes with.

A `Tile` holds the same rows of one tensor in several models; `Tiles` are all tiles of a tensor.
Methods compute in float32 (float64 for float64 models) and round to the working dtype where
mergekit does. On the CPU an array is numpy's, so that a merge need not import torch; on a GPU it
is torch's. Neither the selection by magnitude nor the random numbers depend on the tile size, the
number of processes or the device.
"""

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
DTYPES = {  # dtype → its code in safetensors files, and the numpy dtype that holds its bytes
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
Dtype = Literal["bfloat16", "float16", "float32", "float64"]  # the working dtypes
WORKING_DTYPES: tuple[str, ...] = get_args(Dtype)
# dtype → how many mantissa bits it has fewer than float32, and its smallest normal number as the
# bits of a float32 (0: the same as float32's)
HALF_PRECISION = {"bfloat16": (16, 0), "float16": (13, 0x38800000)}
_EXPONENT_BITS = 0x7F800000  # of a float32
_MAGNITUDE_BITS = 0x7FFFFFFF  # of a float32: all but the sign
CHANCES = 1 << 16  # probabilities are multiples of 1/65536
_Counts = tuple[np.ndarray, np.ndarray]  # the numbers that occur, and how often each does


class NotFinite(SharpenError):
    """A merged value is not a number, or beyond the range of its dtype."""


def compute_dtype(dtype: str) -> str:
    """Returns the dtype that values of a dtype are computed in."""
    return "float64" if dtype == "float64" else "float32"


def decode(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Convert what a file holds to float32 or float64; integers stay as they are."""
    if dtype == "bfloat16":
        values = raw.astype(np.uint32)
        values <<= 16
        return values.view(np.float32)
    if dtype == "float8_e4m3fn":
        return _decode_float8_e4m3fn(raw)
    if dtype == "float8_e5m2":  # its bits are the upper half of a float16
        raw = (raw.astype(np.uint16) << 8).view(np.float16)
    if "float" in dtype:
        return raw.astype(compute_dtype(dtype), copy=False)
    return raw


def _decode_float8_e4m3fn(raw: np.ndarray) -> np.ndarray:
    """Move sign, exponent and mantissa to where float32 has them, then correct the exponent."""
    codes = raw.astype(np.uint32)
    sign = (codes & 0x80) << 24
    exponent_and_mantissa = (codes & 0x7F) << 20
    values = (sign | exponent_and_mantissa).view(np.float32) * 2.0**120
    values[(codes & 0x7F) == 0x7F] = np.nan
    return values


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """Convert computed values to what a file holds; `values` may be changed.

    Raises `NotFinite` for what `dtype` cannot hold.
    """
    if dtype == "bfloat16":
        values = values.astype("f4", copy=False)
        round_in_place(values, dtype)
    else:
        values = values.astype(DTYPES[dtype][1], copy=False)
    if "float" in dtype and not np.isfinite(values).all():
        raise NotFinite("a value is not a number, or infinite")
    if dtype != "bfloat16":
        return values
    codes = values.view(np.uint32)
    codes >>= 16
    return codes.astype(np.uint16)


def array_library(values: Array) -> Any:
    """Returns the module that the array belongs to, numpy or torch."""
    return np if isinstance(values, np.ndarray) else sys.modules["torch"]


def cast(values: Array, dtype: str) -> Array:
    """Returns the values in another dtype, without a copy where they have it already."""
    if array_library(values) is np:
        return values.astype(dtype, copy=False)
    return values.to(getattr(array_library(values), dtype))


def move_like(values: Array, array: np.ndarray) -> Array:
    """Returns a numpy array as an array of the library and device of `values`."""
    if array_library(values) is np:
        return array
    return array_library(values).from_numpy(array).to(values.device)


def to_numpy(values: Array) -> np.ndarray:
    """Returns the values as a numpy array in main memory."""
    return values if array_library(values) is np else values.cpu().numpy()


def _view_as_integers(values: Array) -> Array:
    """Returns a view of floats as the integers with the same bits."""
    return values.view(getattr(array_library(values), f"int{8 * values.itemsize}"))


def magnitudes(values: Array) -> Array:
    """Returns int32 numbers that order like |values|: the bit patterns without their signs."""
    return _view_as_integers(cast(values, "float32")) & _MAGNITUDE_BITS


def round_in_place(values: Array, dtype: str) -> Array:
    """Round each value to the nearest number of `dtype`, the even one of two; return `values`.

    Adding a number so large that the sum has only as many digits as `dtype` drops the others, and
    subtracting it again leaves the rounded value. (From 2^112 on all digits are lost: such values
    end as an error.)
    """
    if dtype in HALF_PRECISION:
        dropped_bits, smallest_normal = HALF_PRECISION[dtype]
        exponents = _view_as_integers(values) & _EXPONENT_BITS
        if smallest_normal:
            exponents = exponents.clip(smallest_normal)
        large = exponents.view(values.dtype)
        large *= 1.5 * 2**dropped_bits
        values += large
        values -= large
    return values


@dataclass(frozen=True, slots=True)
class Tile:
    """The same rows of one tensor in every input model."""

    tensors: tuple[Array, ...]  # one [rows, columns] per model; the base first if there is one
    index: int
    start: int  # position of its first element in the whole tensor


TileArrays = Callable[[Tile], Sequence[Array]]  # the arrays of a tile that are looked at


@dataclass(frozen=True)
class Tiles:
    """One tensor of all input models, cut into tiles that are read when they are needed."""

    count: int
    load: Callable[[int], Tile]  # fresh arrays on every call, which may be changed
    elements: int  # of the whole tensor
    dtype: str  # the working dtype, which the result of each step is rounded to
    name: str = ""
    seed: int = 0

    def map(self, function: Callable[[Tile], R]) -> Iterable[R]:
        """Yields the function's result for every tile, in order."""
        return (function(self.load(index)) for index in range(self.count))

    def round(self, values: Array) -> Array:
        """Round values to the working dtype in place and return them."""
        return round_in_place(values, self.dtype)

    def random_integers(self, tile: Tile, model: int, dtype: str = "int16") -> Array:
        """Returns one random number per element of a tile, the same wherever tiles begin."""
        shape = tile.tensors[0].shape
        needed = math.prod(shape)
        per_draw = 8 // np.dtype(dtype).itemsize  # a draw of 64 bits serves several elements
        skipped = tile.start % per_draw
        generator = np.random.PCG64(0)
        generator.state = _generator_state(self.seed, self.name, model)
        generator.advance(tile.start // per_draw)
        draws = -(-(needed + skipped) // per_draw)  # rounded up
        numbers = generator.random_raw(draws).view(dtype)
        return move_like(tile.tensors[0], numbers[skipped : skipped + needed].reshape(shape))


@lru_cache(maxsize=64)
def _generator_state(seed: int, name: str, model: int) -> Any:
    """Returns the state in which the random numbers of a tensor and a model begin."""
    sequence = np.random.SeedSequence([seed, zlib.crc32(name.encode()), model])
    return np.random.PCG64(sequence).state


@dataclass(frozen=True, slots=True)
class TopK:
    """The k largest magnitudes of a tensor; of those equal to the smallest, the first ones."""

    limit: int  # the smallest magnitude among the k
    kept_at_limit: Sequence[int]  # per tile: how many elements equal to the limit are kept
    at_limit: Sequence[int]  # per tile: how many elements are equal to the limit

    def mask(self, index: int, sizes: Array) -> Array:
        """Returns which elements of tile `index` belong to the k largest."""
        kept = self.kept_at_limit[index]
        if kept == self.at_limit[index]:
            return sizes >= self.limit
        mask = sizes > self.limit
        places = np.flatnonzero(to_numpy(sizes) == self.limit)[:kept]
        mask.reshape(-1)[move_like(mask, places)] = True
        return mask


def find_top_k(
    tiles: Tiles, sizes_of: TileArrays, requests: Sequence[tuple[int, int]]
) -> list[TopK]:
    """Find for each (i, k) the k largest of the i-th array of magnitudes from `sizes_of`."""
    if not requests:
        return []

    def count_leading_bits(tile: Tile) -> list[_Counts]:
        return [_count_values(sizes >> 16) for sizes in sizes_of(tile)]

    counts_of_tiles = list(tiles.map(count_leading_bits))
    tops = []
    for i, k in requests:
        leading_counts = [counts[i] for counts in counts_of_tiles]
        tops.append(_find_top(tiles, sizes_of, i, leading_counts, k))
    return tops


def _count_values(numbers: Array) -> _Counts:
    """Returns the distinct numbers and how often each occurs."""
    counts = to_numpy(array_library(numbers).bincount(numbers.reshape(-1)))
    distinct = np.flatnonzero(counts)
    return distinct, counts[distinct]


def _find_top(
    tiles: Tiles, sizes_of: TileArrays, i: int, leading_counts: Sequence[_Counts], k: int
) -> TopK:
    """Find the limit of the k largest from the counts of leading 16 bits in each tile.

    Magnitudes have 32 bits. For bfloat16 the leading 16 decide; for other dtypes a second pass
    counts the trailing 16 bits of the elements whose leading bits are those of the limit.
    """
    if k <= 0:
        return TopK(_MAGNITUDE_BITS, [0] * tiles.count, [0] * tiles.count)
    counts_of_tiles = leading_counts
    last_bits, kept = _find_kth_largest(counts_of_tiles, k)
    limit = last_bits << 16
    if tiles.dtype != "bfloat16":
        leading = last_bits

        def count_trailing_bits(tile: Tile) -> _Counts:
            sizes = sizes_of(tile)[i]
            return _count_values(sizes[(sizes >> 16) == leading] & 0xFFFF)

        counts_of_tiles = list(tiles.map(count_trailing_bits))
        last_bits, kept = _find_kth_largest(counts_of_tiles, kept)
        limit |= last_bits
    at_limit = [int(counts[numbers == last_bits].sum()) for numbers, counts in counts_of_tiles]
    # the first tiles keep their elements at the limit, until `kept` are used up
    kept_so_far = np.minimum(np.cumsum(at_limit), kept)
    return TopK(limit, np.diff(kept_so_far, prepend=0).tolist(), at_limit)


def _find_kth_largest(counts_of_tiles: Sequence[_Counts], k: int) -> tuple[int, int]:
    """Returns the k-th largest number, and how many equal to it are among the k largest."""
    numbers = np.concatenate([numbers for numbers, _ in counts_of_tiles])
    counts = np.concatenate([counts for _, counts in counts_of_tiles])
    # from the largest number down: how many values are at least as large
    at_least = np.bincount(numbers, weights=counts)[::-1].cumsum()
    place = int(np.searchsorted(at_least, k))
    larger = int(at_least[place - 1]) if place else 0
    return len(at_least) - 1 - place, k - larger
