"""Row tiles of one tensor in several models: what every merge method is written on.

A method may look at all tiles as often as it likes (`Tiles.measure`) and returns the function that
merges one tile. The same method therefore runs on tensors in memory and on files that are read in
pieces. Selection by magnitude is exact through histograms of the bit patterns, and random numbers
belong to an element's position, so that neither depends on tile size, threads or device.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from sharpen.types import SharpenError

R = TypeVar("R")
TILE_ELEMENTS = 1 << 19  # a few tiles of every input stay within the processor's cache
CHANCES = 1 << 15  # probabilities are multiples of 1/32768
BITS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
Run = Callable[[Callable[[int], Any], Iterable[int]], Iterable[Any]]


@dataclass(frozen=True, slots=True)
class Tile:
    tensors: tuple[Tensor, ...]  # one [rows, columns] of each model; the base first if there is one
    index: int
    start: int  # position of its first element in the whole tensor
    kept: dict[str, list[Tensor]] = field(default_factory=dict)  # made in one look, for the next


class NotFinite(SharpenError):
    """A tile holds a value that is not a number, or infinite."""

    def __init__(self, tile: Tile):
        super().__init__("a value is not a number, or infinite")
        self.index = tile.index


@dataclass(frozen=True)
class Tiles:
    count: int
    load: Callable[[int], Tile]
    elements: int
    dtype: torch.dtype
    name: str = ""
    seed: int = 0
    run: Run = map

    def measure(self, look: Callable[[Tile], R]) -> list[R]:
        """`look` at every tile; the results in order."""
        return list(self.run(lambda index: look(self.load(index)), range(self.count)))

    def random(self, tile: Tile, model: int) -> Tensor:
        """15 random bits for every element of a tile, the same wherever tiles begin."""
        shape = tile.tensors[0].shape
        key = np.random.SeedSequence([self.seed, zlib.crc32(self.name.encode()), model])
        source = np.random.PCG64(key)
        source.advance(tile.start // 4)  # a draw of 64 bits serves four elements
        skip, wanted = tile.start % 4, shape.numel()
        draws = np.random.Generator(source).integers(
            0, 2**64 - 1, size=(wanted + skip + 3) // 4, dtype=np.uint64, endpoint=True
        )
        bits = torch.from_numpy(draws.view(np.int16)[skip : skip + wanted]).reshape(shape)
        return bits.to(tile.tensors[0].device).bitwise_and_(CHANCES - 1)


def in_memory(tensors: Sequence[Tensor], name: str = "", seed: int = 0) -> Tiles:
    """Whole tensors as one tile."""
    tile = Tile(tuple(as_rows(tensor) for tensor in tensors), 0, 0)
    return Tiles(1, lambda index: tile, tensors[0].numel(), tensors[0].dtype, name, seed)


def as_rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor.reshape(1, -1)


def magnitude_bits(values: Tensor) -> Tensor:
    """Integers that order like |values|: the bit pattern without its sign."""
    values = values.float() if values.dtype == torch.float64 else values  # precise enough to rank
    kind = BITS[values.dtype]
    return values.view(kind).bitwise_and(torch.iinfo(kind).max)


def all_finite(values: Tensor) -> bool:
    """No NaN and no infinity: in bits, nothing from infinity's pattern on."""
    if not values.is_floating_point():
        return True
    if not values.numel() or values.dtype.itemsize not in (2, 4):
        return bool(values.double().isfinite().all())
    bits = magnitude_bits(values)
    infinity = magnitude_bits(torch.tensor(torch.inf, dtype=values.dtype))
    return int(bits.max()) < int(infinity)


def at_least(bits: Tensor, limit: int) -> Tensor:
    """All ones where `bits >= limit`, else zero: subtract and shift, several times faster than a
    comparison followed by a selection."""
    shift = torch.iinfo(bits.dtype).bits - 1
    return torch.rsub(bits, limit - 1).bitwise_right_shift_(shift)


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where the mask is all ones, 0 elsewhere; in place."""
    kind = BITS[values.dtype]
    values.view(kind).bitwise_and_(mask.to(kind))
    return values


@dataclass(frozen=True, slots=True)
class Top:
    """The k largest magnitudes of a tensor. Of those that equal the smallest kept one, the first
    are kept."""

    limit: int
    kept: tuple[int, ...]  # of a tile's elements at exactly the limit, how many are kept
    equal: tuple[int, ...]

    def mask(self, index: int, bits: Tensor) -> Tensor:
        kept, equal = self.kept[index], self.equal[index]
        if kept == equal:
            return at_least(bits, self.limit)
        mask = at_least(bits, self.limit + 1)
        if kept:
            places = np.flatnonzero(bits.cpu().numpy().reshape(-1) == self.limit)[:kept]
            mask.view(-1)[torch.from_numpy(places).to(mask.device)] = -1
        return mask


def select(
    x: Tiles, look: Callable[[Tile], Sequence[Tensor]], wanted: Sequence[Sequence[int]]
) -> list[list[Top]]:
    """For every tensor of bits that `look` gives, the `Top` of each wanted size."""
    infinity = int(magnitude_bits(torch.tensor(torch.inf, dtype=x.dtype)))
    infinity >>= 16 if x.dtype.itemsize > 2 else 0

    def counted(tile: Tile) -> Tensor:
        found = histogram(look(tile))
        if found[:, infinity:].any():
            raise NotFinite(tile)
        return found

    counts = torch.stack(x.measure(counted))
    return [
        [top_of(x, lambda tile, i=i: look(tile)[i], counts[:, i], k) for k in sizes]
        for i, sizes in enumerate(wanted)
    ]


def histogram(bits: Sequence[Tensor]) -> Tensor:
    """Counts of the leading 15 bits, one row a tensor."""
    digits = [(b >> 16 if b.dtype == torch.int32 else b).reshape(-1) for b in bits]
    return torch.stack([torch.bincount(d, minlength=1 << 15) for d in digits]).int().cpu()


def top_of(x: Tiles, look: Callable[[Tile], Tensor], counts: Tensor, k: int) -> Top:
    """The Top k, from the counts of the leading bits of each tile and, for 32-bit magnitudes, one
    more look at the rest."""
    wide = x.dtype.itemsize > 2
    if k <= 0:
        none = torch.iinfo(torch.int32 if wide else torch.int16).max
        return Top(none, (0,) * x.count, (1,) * x.count)
    digit, rest = kth(counts, k)
    if not wide:
        return shared_out(digit, rest, counts[:, digit])

    def tail(tile: Tile) -> Tensor:
        bits = look(tile)
        return torch.bincount(bits[(bits >> 16) == digit] & 0xFFFF, minlength=1 << 16).int().cpu()

    fine = torch.stack(x.measure(tail))
    low, rest = kth(fine, rest)
    return shared_out((digit << 16) | low, rest, fine[:, low])


def kth(counts: Tensor, k: int) -> tuple[int, int]:
    """Which bin holds the k-th largest element, and how many of that bin belong to the top k."""
    above = counts.sum(0, dtype=torch.int64).flip(0).cumsum(0)
    place = int(torch.searchsorted(above, k))
    before = int(above[place - 1]) if place else 0
    return len(above) - 1 - place, k - before


def shared_out(limit: int, rest: int, equal: Tensor) -> Top:
    """Give the places left at the limit to the first tiles that can fill them."""
    kept = []
    for count in equal.tolist():
        kept.append(min(rest, count))
        rest -= kept[-1]
    return Top(limit, tuple(kept), tuple(equal.tolist()))
