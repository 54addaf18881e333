"""Row tiles of one tensor in several models: what every merge method is written on.

A method may look at all tiles as often as it likes (`Tiles.each`) and returns the function that
merges one tile. The same method therefore runs on tensors in memory and on files that are read in
pieces. Selection by magnitude is exact through histograms of the bit patterns, and random numbers
belong to an element's position, so that neither depends on tile size, threads or device.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from sharpen.merge.arrays import Array, bits, cast, like, module, on_host, rounded

R = TypeVar("R")
CHANCES = 1 << 16  # probabilities are multiples of 1/65536
MAGNITUDE = 0x7FFFFFFF
Run = Callable[[Callable[[int], Any], Iterable[int]], Iterable[Any]]


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
    run: Run = map

    def each(self, look: Callable[[Tile], R]) -> Iterable[R]:
        """`look` at every tile; the results in order."""
        return self.run(lambda index: look(self.load(index)), range(self.count))

    def round(self, values: Array) -> Array:
        return rounded(values, self.dtype)

    def random(self, tile: Tile, model: int) -> Array:
        """A random int16 for every element of a tile, the same wherever tiles begin."""
        shape = tile.tensors[0].shape
        key = np.random.SeedSequence([self.seed, zlib.crc32(self.name.encode()), model])
        source = np.random.PCG64(key)
        source.advance(tile.start // 4)  # a draw of 64 bits serves four elements
        skip, wanted = tile.start % 4, math.prod(shape)
        draws = np.random.Generator(source).integers(
            0, 2**64 - 1, size=(wanted + skip + 3) // 4, dtype=np.uint64, endpoint=True
        )
        found = draws.view(np.int16)[skip : skip + wanted].reshape(shape)
        return like(tile.tensors[0], found)


def magnitudes(values: Array) -> Array:
    """int32 that order like |values|: the bit pattern without its sign."""
    return bits(cast(values, "float32")) & MAGNITUDE


@dataclass(frozen=True, slots=True)
class Top:
    """The k largest magnitudes of a tensor. Of those that equal the smallest kept one, the first
    are kept."""

    limit: int
    kept: Sequence[int]  # of a tile's elements at exactly the limit, how many are kept
    equal: Sequence[int]

    def mask(self, index: int, found: Array) -> Array:
        kept, equal = self.kept[index], self.equal[index]
        if kept == equal:
            return found >= self.limit
        mask = found > self.limit
        if kept:
            places = np.flatnonzero(on_host(found) == self.limit)[:kept]
            mask.reshape(-1)[like(mask, places)] = True
        return mask


def select(x: Tiles, look: Look, wanted: Sequence[tuple[int, int]]) -> list[Top]:
    """For each (i, k) the k largest of the i-th array of magnitudes that `look` gives."""
    if not wanted:
        return []
    counts: dict[int, Any] = dict.fromkeys((i for i, _ in wanted), 0)
    for parts in x.each(lambda tile: [histogram(found >> 16, 15) for found in look(tile)]):
        for i in counts:
            counts[i] += parts[i]
    limits = [limit_of(x, look, i, counts[i], k) for i, k in wanted]

    def equals(tile: Tile) -> list[int]:
        found = look(tile)
        same = [found[i] == limit for (i, _), (limit, _) in zip(wanted, limits, strict=True)]
        return [int(module(mask).count_nonzero(mask)) for mask in same]

    columns = zip(*x.each(equals), strict=True)
    return [
        Top(limit, shared_out(rest, equal), equal)
        for (limit, rest), equal in zip(limits, columns, strict=True)
    ]


def histogram(digits: Array, width: int) -> np.ndarray:
    return on_host(module(digits).bincount(digits.reshape(-1), minlength=1 << width))


def limit_of(x: Tiles, look: Look, i: int, counts: np.ndarray, k: int) -> tuple[int, int]:
    """The k-th largest magnitude and how many of that size are among the k largest, from the counts
    of leading bits and, where values have more of them, one more look."""
    if k <= 0:
        return MAGNITUDE, 0
    digit, rest = kth(counts, k)
    if x.dtype == "bfloat16":
        return digit << 16, rest

    def trailing(tile: Tile) -> np.ndarray:
        found = look(tile)[i]
        return histogram(found[(found >> 16) == digit] & 0xFFFF, 16)

    low, rest = kth(np.asarray(sum(x.each(trailing))), rest)
    return digit << 16 | low, rest


def kth(counts: np.ndarray, k: int) -> tuple[int, int]:
    """Which bin holds the k-th largest element, and how many of that bin belong to the top k."""
    above = counts[::-1].cumsum()
    place = int(np.searchsorted(above, k))
    before = int(above[place - 1]) if place else 0
    return len(above) - 1 - place, k - before


def shared_out(rest: int, equal: Sequence[int]) -> list[int]:
    """The places left at the limit, given to the first tiles that can fill them."""
    ends = np.minimum(np.cumsum(equal), rest)
    return np.diff(ends, prepend=0).tolist()
