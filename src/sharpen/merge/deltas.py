"""Merge methods on task vectors: prune each, mix them, add the result to the base.

Values are rounded to the working dtype after each step, as mergekit does, so that results agree.
Only methods that draw at random, which agree with nothing bit for bit, are rounded once at the end.
What is pruned is multiplied by 0, so that a NaN is still seen in the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from sharpen.merge.arrays import Array, bits, cast, like, module, packed, unpacked, wide
from sharpen.merge.method import Kernel, Method, PerTuned, add, parameters_of
from sharpen.merge.tiles import CHANCES, Tile, Tiles, magnitudes, select
from sharpen.types import SharpenError

Rescale = bool | Literal["density"]
Keep = Callable[[Tile, int, Array], Array | None]  # of tuned model i's delta; None keeps all
Pruning = tuple[Keep, Sequence[float]]  # and what each pruned delta is multiplied by


def deltas(x: Tiles, tile: Tile) -> list[Array]:
    """Task vectors, in the place of the tuned tensors."""
    base, *tuned = tile.tensors
    for tensor in tuned:
        tensor -= base
        x.round(tensor)
    return tuned


def total(arrays: Sequence[Array]) -> Array:
    """Their sum as a new array."""
    result = arrays[0] + (arrays[1] if len(arrays) > 1 else 0)
    for array in arrays[2:]:
        result += array
    return result


@dataclass(frozen=True)
class Mix:
    """How pruned task vectors become one. `elect` keeps only those that agree with the sign of
    their sum; None means that pruned places count like all others."""

    weight: Sequence[float]
    normalize: bool
    scale: float  # `lambda` of the configs
    elect: bool | None = None


def arithmetic(x: Tiles, mix: Mix, pruning: Pruning | None) -> Kernel:
    """base + mixed task vectors."""
    weights = x.round(np.array(mix.weight, dtype=wide(x.dtype)))
    keep, factors = pruning or (None, [1.0] * len(weights))

    def kernel(tile: Tile) -> Array:
        vectors = deltas(x, tile)
        for i, vector in enumerate(vectors):
            mask = keep(tile, i, vector) if keep else None
            if mask is not None:
                vector *= mask
            multiply(x, vector, float(weights[i]) * factors[i])
        if not vectors:
            return tile.tensors[0]
        if mix.elect is not None:
            mixed = agreed(x, vectors, weights, mix)
        else:
            mixed, divisor = x.round(total(vectors)), float(x.round(weights.sum(keepdims=True))[0])
            if mix.normalize and abs(divisor) >= 1e-8:
                mixed /= divisor
                x.round(mixed)
        multiply(x, mixed, mix.scale)
        mixed += tile.tensors[0]
        return mixed

    return kernel


def multiply(x: Tiles, values: Array, factor: float) -> None:
    if factor != 1:
        values *= factor
        if abs(math.frexp(factor)[0]) != 0.5:  # by a power of two nothing needs rounding
            x.round(values)


def agreed(x: Tiles, vectors: Sequence[Array], weights: np.ndarray, mix: Mix) -> Array:
    """The sum (or weighted mean) of those values whose sign is the sign of the sum."""
    sign = sign_of(total(vectors))
    if mix.elect:
        keep_sign(vectors, sign)
    mixed = x.round(total(vectors))
    if mix.normalize:
        pairs = zip(vectors, weights, strict=True)
        divisor = x.round(total([(vector != 0) * weight for vector, weight in pairs]))
        divisor += divisor == 0
        mixed /= divisor
        x.round(mixed)
    return turned(mixed, sign) if mix.elect else mixed


def sign_of(values: Array) -> Array:
    """Sign bits alone, in their place."""
    found = bits(values)
    found &= -1 << (8 * values.itemsize - 1)
    return found


def turned(values: Array, sign: Array) -> Array:
    """Values with their sign changed where `sign` is set; in place."""
    found = bits(values)
    found ^= sign
    return values


def keep_sign(vectors: Sequence[Array], sign: Array) -> None:
    """The size of values that have that sign, 0 for others; in place."""
    for vector in vectors:
        turned(vector, sign)
        module(vector).clip(vector, 0, None, out=vector)


def rescaled(x: Tiles, keep: Keep, density: Sequence[float], rescale: Rescale) -> Pruning:
    """`keep` with what brings each pruned task vector back to its size: the sum of magnitudes
    before pruning over that after it, or 1/density."""
    if not rescale or all(share >= 1 for share in density):
        return keep, [1.0] * len(density)
    if rescale == "density":
        return keep, [1 / share if 0 < share < 1 else 1.0 for share in density]

    masks: dict[tuple[int, int], Array] = {}  # so that nothing is chosen or drawn twice

    def sums(tile: Tile) -> np.ndarray:
        table = np.zeros((len(density), 2))
        for i, vector in enumerate(deltas(x, tile)):
            mask = keep(tile, i, vector)
            size = abs(vector).reshape(-1)
            table[i] = float(size.sum())
            if mask is not None:
                table[i, 1] = float(size @ cast(mask.reshape(-1), wide(x.dtype)))
                masks[tile.index, i] = packed(mask)
        return table

    def keep_again(tile: Tile, i: int, vector: Array) -> Array | None:
        mask = masks.pop((tile.index, i), None)
        return None if mask is None else unpacked(mask, vector.shape)

    table = np.asarray(sum(x.each(sums)))
    return keep_again, [a / b if min(a, b) >= 1e-7 else 1.0 for a, b in table.tolist()]


def largest(x: Tiles, density: Sequence[float], gamma: Sequence[float] | None = None) -> Keep:
    """Keep the `density` largest values; with `gamma`, after leaving out that share of the very
    largest."""
    size = x.elements
    wanted: list[list[int]] = []
    for i, share in enumerate(density):
        keep = int(share * size)
        if gamma is None:
            wanted.append([max(1, keep) if share > 0 else 0])
        else:
            bottom = max(0, size - keep - int(gamma[i] * size))
            wanted.append([size - bottom, size - bottom - keep])
    if all(share >= 1 for share in density):
        return lambda tile, i, vector: None
    tops = select(x, lambda tile: [magnitudes(vector) for vector in deltas(x, tile)], wanted)

    def keep_largest(tile: Tile, i: int, vector: Array) -> Array | None:
        if density[i] >= 1:
            return None
        found = magnitudes(vector)
        mask = tops[i][0].mask(tile.index, found)
        if gamma is not None:
            mask &= ~tops[i][1].mask(tile.index, found)
        return mask

    return keep_largest


def drawn(x: Tiles, density: Sequence[float], epsilon: Sequence[float] | None = None) -> Keep:
    """Keep each value with probability `density`; with `epsilon`, with a probability that rises by
    ± epsilon with its rank in its row."""
    for share, spread in zip(density, epsilon or (), strict=False):
        if 0 < share < 1 and not (share - spread > 0 and share + spread < 1):
            raise SharpenError(
                f"epsilon {spread}: density - epsilon and density + epsilon must lie between 0 "
                f"and 1 (density is {share})"
            )

    def keep_drawn(tile: Tile, i: int, vector: Array) -> Array | None:
        if density[i] >= 1:
            return None
        if density[i] <= 0:
            return vector != vector
        if epsilon is None:
            return x.random(tile, i) < int(limits_of(density[i]))
        order = abs(vector).argsort(axis=1, stable=True)
        shares = np.linspace(density[i] - epsilon[i], density[i] + epsilon[i], vector.shape[1])
        limits = cast(order, "int16")
        rows = like(order, np.arange(len(order))[:, None])
        limits[rows, order] = like(order, limits_of(shares))
        return x.random(tile, i) < limits

    return keep_drawn


def limits_of(shares: Any) -> np.ndarray:
    """Below which of the 65536 values of int16 lies that share of them; one at least, not all."""
    counts = np.clip(np.round(np.multiply(shares, CHANCES)), 1, CHANCES - 1)
    return (counts - CHANCES // 2).astype(np.int16)


def vector_method(
    name: str, elect: bool | None = None, normalize: bool = False, random: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a way of pruning under a name, with the parameters that all such methods share."""

    def register(prune: Callable[..., Pruning | None]) -> Callable[..., Pruning | None]:
        def method(
            x: Tiles,
            weight: PerTuned[float],
            normalize: bool = normalize,
            lambda_: float = 1.0,
            majority_sign: bool = True,
            **rest: Any,
        ) -> Kernel:
            x = replace(x, dtype=wide(x.dtype)) if random else x
            chosen = elect and majority_sign
            return arithmetic(x, Mix(weight, normalize, lambda_, chosen), prune(x, **rest))

        shared = parameters_of(method)
        for unused in ("rest",) if elect else ("rest", "majority_sign"):
            del shared[unused]
        add(Method(name, method, shared | parameters_of(prune), "required", 1, None))
        return prune

    return register


@vector_method("task_arithmetic")
def nothing(x: Tiles) -> None:
    """Prune nothing."""


@vector_method("ties", elect=True, normalize=True)
def ties(
    x: Tiles,
    density: PerTuned[float] = 1.0,  # type: ignore[assignment]
    rescale: Rescale = False,
) -> Pruning:
    """Keep the largest values."""
    return rescaled(x, largest(x, density), density, rescale)


@vector_method("breadcrumbs")
@vector_method("breadcrumbs_ties", elect=True)
def breadcrumbs(
    x: Tiles,
    density: PerTuned[float] = 1.0,  # type: ignore[assignment]
    gamma: PerTuned[float] = 0.01,  # type: ignore[assignment]
    rescale: Rescale = False,
) -> Pruning:
    """Leave out the very largest values and the smallest ones."""
    return rescaled(x, largest(x, density, gamma), density, rescale)


@vector_method("dare_linear", random=True)
@vector_method("dare_ties", elect=True, random=True)
def dare(
    x: Tiles,
    density: PerTuned[float] = 1.0,  # type: ignore[assignment]
    rescale: Rescale = True,
) -> Pruning:
    """Drop values at random and rescale what is left."""
    return rescaled(x, drawn(x, density), density, rescale)


@vector_method("della_linear", random=True)
@vector_method("della", elect=True, normalize=True, random=True)
def della(
    x: Tiles,
    density: PerTuned[float] = 1.0,  # type: ignore[assignment]
    epsilon: PerTuned[float] = 0.15,  # type: ignore[assignment]
    rescale: Rescale = True,
) -> Pruning:
    """Drop values at random, the small ones of a row more often, and rescale what is left."""
    return rescaled(x, drawn(x, density, epsilon), density, rescale)
