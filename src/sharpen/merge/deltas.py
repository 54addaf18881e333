"""Merge methods on task vectors: prune each, mix them, add the result to the base.

Values are rounded to the working dtype after each step, so that results agree with mergekit; those
of methods that draw at random, which agree with nothing bit for bit, once at the end.
What is left out is multiplied by 0, so that a NaN is still seen in the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from sharpen.merge import require, tiles
from sharpen.merge.method import METHODS, F, Kernel, Method, PerTuned, parameters_of
from sharpen.merge.tiles import CHANCES, Array, Look, Tile, Tiles, cast, like, magnitudes, wide

Floats = PerTuned[float]
DENSITY: Any = 1.0  # defaults, for each model
GAMMA: Any = 0.01
EPSILON: Any = 0.15
Rescale = bool | Literal["density"]
Keep = Callable[[Tile, int, Array], Array]  # the mask of tuned model i's task vector


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


def elect(vectors: Sequence[Array]) -> None:
    """Keep only values whose sign is the sign of the sum; in place."""
    side = total(vectors) >= 0
    for vector in vectors:
        vector *= (vector > 0) == side


def multiply(x: Tiles, values: Array, factor: float) -> None:
    if factor != 1:
        values *= factor
        if abs(math.frexp(factor)[0]) != 0.5:  # by a power of two nothing needs rounding
            x.round(values)


def vector_method(
    name: str, consensus: bool = False, normalize: bool = False, random: bool = False
) -> Callable[[F], F]:
    """Registers a way of pruning under a name, with the parameters that all such methods share.
    With `consensus`, a sign is elected, and a mean is one of the values that are left."""

    def register(prune: F) -> F:
        def method(
            x: Tiles,
            weight: Floats,
            normalize: bool = normalize,
            lambda_: float = 1.0,
            majority_sign: bool = True,
            **rest: Any,
        ) -> Kernel:
            x = replace(x, dtype=wide(x.dtype)) if random else x
            weights = x.round(np.array(weight, dtype=wide(x.dtype)))
            look = prune(x, **rest)

            def kernel(tile: Tile) -> Array:
                vectors = look(tile)
                for vector, share in zip(vectors, weights.tolist(), strict=True):
                    multiply(x, vector, share)
                if consensus and majority_sign:
                    elect(vectors)
                mixed = x.round(total(vectors))
                if normalize:
                    mixed /= divisor(x, vectors if consensus else None, weights)
                    x.round(mixed)
                multiply(x, mixed, lambda_)
                mixed += tile.tensors[0]
                return mixed

            return kernel if weight else lambda tile: tile.tensors[0]

        shared = parameters_of(method)
        if not consensus:
            del shared["majority_sign"]
        METHODS[name] = Method(name, method, shared | parameters_of(prune), "required", 1, None)
        return prune

    return register


def divisor(x: Tiles, vectors: Sequence[Array] | None, weights: np.ndarray) -> Any:
    """The sum of all weights, or at each place of those whose vector is not 0 there."""
    if vectors is None:
        whole = float(x.round(weights.sum(keepdims=True))[0])
        return whole if abs(whole) >= 1e-8 else 1.0
    pairs = zip(vectors, weights, strict=True)
    found = x.round(total([(vector != 0) * weight for vector, weight in pairs]))
    found += found == 0
    return found


def pruned(x: Tiles, keep: Keep, density: Sequence[float], rescale: Rescale) -> Look:
    """Task vectors without what `keep` leaves out. With `rescale`, they are brought back to their
    sum of magnitudes, or divided by the density."""
    factors = [1 / share if rescale == "density" and 0 < share < 1 else 1.0 for share in density]
    masks: dict[tuple[int, int], np.ndarray] = {}  # so that nothing is chosen or drawn twice

    def sums(tile: Tile) -> np.ndarray:
        """Of magnitudes, before and after."""
        table = np.ones((len(density), 2))
        for i, vector in enumerate(deltas(x, tile)):
            if density[i] < 1:
                mask = keep(tile, i, vector).reshape(-1)
                masks[tile.index, i] = np.packbits(tiles.on_host(mask))
                size = tiles.module(vector).abs(vector, out=vector).reshape(-1)
                part = size @ cast(mask, wide(x.dtype))
                table[i] = float(tiles.module(size).einsum("i->", size)), float(part)
        return table

    if rescale is True and min(density, default=1) < 1:
        pairs = np.asarray(sum(x.each(sums))).tolist()
        factors = [a / b if min(a, b) >= 1e-7 else 1.0 for a, b in pairs]

    def look(tile: Tile) -> list[Array]:
        vectors = deltas(x, tile)
        for i, vector in enumerate(vectors):
            if density[i] < 1:
                if (found := masks.pop((tile.index, i), None)) is None:
                    vector *= keep(tile, i, vector)
                else:
                    mask = np.unpackbits(found, count=math.prod(vector.shape)).view(bool)
                    vector *= like(vector, mask.reshape(vector.shape))
                multiply(x, vector, factors[i])
        return vectors

    return look


def largest(x: Tiles, density: Sequence[float], gamma: Sequence[float] | None = None) -> Keep:
    """Keep the `density` largest values; with `gamma`, without that share of the very largest."""
    wanted: dict[tuple[int, str], int] = {}  # how many are kept or lie above them; lie above
    for i, share in enumerate(density):
        if share < 1:
            keep = max(int(share * x.elements), int(share > 0 and not gamma))
            above = min(x.elements - keep, int(gamma[i] * x.elements)) if gamma else 0
            wanted |= {(i, "kept"): keep + above} | ({(i, "above"): above} if gamma else {})
    sizes = [(i, k) for (i, _), k in wanted.items()]
    found = tiles.select(x, lambda tile: [magnitudes(v) for v in deltas(x, tile)], sizes)
    tops = dict(zip(wanted, found, strict=True))

    def keep_largest(tile: Tile, i: int, vector: Array) -> Array:
        sizes = magnitudes(vector)
        mask = tops[i, "kept"].mask(tile.index, sizes)
        if gamma:
            mask &= ~tops[i, "above"].mask(tile.index, sizes)
        return mask

    return keep_largest


def drawn(x: Tiles, density: Sequence[float], epsilon: Sequence[float] | None = None) -> Keep:
    """Keep each value with probability `density`, ± `epsilon` by its rank in its row."""
    bounds = "density - epsilon and density + epsilon must lie between 0 and 1"
    for share, spread in zip(density, epsilon or (), strict=False):
        within = not 0 < share < 1 or 0 < share - spread <= share + spread < 1
        require(within, f"epsilon {spread}: {bounds} (density is {share})")

    def keep_drawn(tile: Tile, i: int, vector: Array) -> Array:
        if epsilon is None or density[i] <= 0:
            limit = int(limits_of(density[i]))
            if limit % 256 == 0:  # eight bits tell
                return x.random(tile, i, "int8") < limit // 256
            return x.random(tile, i) < limit
        order = abs(vector).argsort(axis=1, stable=True)
        shares = np.linspace(density[i] - epsilon[i], density[i] + epsilon[i], vector.shape[1])
        limits, rows = cast(order, "int16"), like(order, np.arange(len(order))[:, None])
        limits[rows, order] = like(order, limits_of(shares))
        return x.random(tile, i) < limits

    return keep_drawn


def limits_of(shares: Any) -> np.ndarray:
    """Below which value of int16 lies that share of all 65536; one at least and never all."""
    counts = np.round(np.multiply(shares, CHANCES)).clip(np.greater(shares, 0), CHANCES - 1)
    return (counts - CHANCES // 2).astype(np.int16)


@vector_method("task_arithmetic")
def whole(x: Tiles) -> Look:
    return lambda tile: deltas(x, tile)


@vector_method("ties", consensus=True, normalize=True)
def ties(x: Tiles, density: Floats = DENSITY, rescale: Rescale = False) -> Look:
    return pruned(x, largest(x, density), density, rescale)


@vector_method("breadcrumbs")
@vector_method("breadcrumbs_ties", consensus=True)
def breadcrumbs(
    x: Tiles, density: Floats = DENSITY, gamma: Floats = GAMMA, rescale: Rescale = False
) -> Look:
    return pruned(x, largest(x, density, gamma), density, rescale)


@vector_method("dare_linear", random=True)
@vector_method("dare_ties", consensus=True, random=True)
def dare(x: Tiles, density: Floats = DENSITY, rescale: Rescale = True) -> Look:
    return pruned(x, drawn(x, density), density, rescale)


@vector_method("della_linear", random=True)
@vector_method("della", consensus=True, normalize=True, random=True)
def della(
    x: Tiles, density: Floats = DENSITY, epsilon: Floats = EPSILON, rescale: Rescale = True
) -> Look:
    return pruned(x, drawn(x, density, epsilon), density, rescale)
