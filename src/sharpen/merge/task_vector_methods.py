"""Merge methods on task vectors: prune each vector, mix them, add the result to the base.

Values are rounded to the working dtype after each step, so that results agree with mergekit. The
methods that draw at random cannot agree with it bit for bit; they round once, at the end. Pruned
values are multiplied by 0 rather than replaced, so that a NaN still shows in the result. `recipe`
imports this module so that its methods are registered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from sharpen.merge import require
from sharpen.merge.method import METHODS, F, Kernel, Method, PerTuned, read_parameters
from sharpen.merge.tiles import (
    CHANCES,
    Array,
    Tile,
    TileArrays,
    Tiles,
    TopK,
    array_library,
    cast,
    compute_dtype,
    find_top_k,
    magnitudes,
    move_like,
    to_numpy,
)

_Floats = PerTuned[float]
_Rescale = bool | Literal["density"]
_DENSITY: Any = 1.0  # defaults, the same for every model
_GAMMA: Any = 0.01
_EPSILON: Any = 0.15
# tile, number of the tuned model, its task vector → the mask of the values to keep
_KeepMask = Callable[[Tile, int, Array], Array]


def task_vectors(tiles: Tiles, tile: Tile) -> list[Array]:
    """Subtract the base from the tuned tensors, in place, and return them."""
    base, *tuned = tile.tensors
    for tensor in tuned:
        tensor -= base
        tiles.round(tensor)
    return tuned


def sum_arrays(arrays: Sequence[Array]) -> Array:
    """Returns the sum of the arrays as a new array."""
    second = arrays[1] if len(arrays) > 1 else 0
    result = arrays[0] + second
    for array in arrays[2:]:
        result += array
    return result


def elect_signs(vectors: Sequence[Array]) -> None:
    """Set values to 0, in place, whose sign is not the sign of the vectors' sum."""
    sum_is_positive = sum_arrays(vectors) >= 0
    for vector in vectors:
        vector *= (vector > 0) == sum_is_positive


def _multiply(tiles: Tiles, values: Array, factor: float) -> None:
    """Multiply values in place and round them."""
    if factor == 1:
        return
    values *= factor
    is_power_of_two = abs(math.frexp(factor)[0]) == 0.5
    if not is_power_of_two:  # a product with a power of two is exact
        tiles.round(values)


def _vector_method(
    name: str, consensus: bool = False, normalize: bool = False, random: bool = False
) -> Callable[[F], F]:
    """Register a way of pruning as a method, with the parameters that all such methods share.

    The decorated function takes the tiles and its own parameters and returns the function that
    gives the pruned task vectors of a tile. With `consensus` the vectors elect a sign, and a mean
    counts only the values that are left. `normalize` is the default of the parameter of that name.
    """

    def register(prune: F) -> F:
        def method(
            tiles: Tiles,
            weight: _Floats,
            normalize: bool = normalize,
            lambda_: float = 1.0,
            majority_sign: bool = True,
            **pruning: Any,
        ) -> Kernel:
            if random:
                tiles = replace(tiles, dtype=compute_dtype(tiles.dtype))
            weights = tiles.round(np.array(weight, dtype=compute_dtype(tiles.dtype)))
            pruned_vectors = prune(tiles, **pruning)

            def kernel(tile: Tile) -> Array:
                vectors = pruned_vectors(tile)
                for vector, share in zip(vectors, weights.tolist(), strict=True):
                    _multiply(tiles, vector, share)
                if consensus and majority_sign:
                    elect_signs(vectors)
                mixed = tiles.round(sum_arrays(vectors))
                if normalize:
                    mixed /= _divisor(tiles, vectors if consensus else None, weights)
                    tiles.round(mixed)
                _multiply(tiles, mixed, lambda_)
                mixed += tile.tensors[0]
                return mixed

            return kernel if weight else _return_base

        parameters = read_parameters(method)
        if not consensus:
            del parameters["majority_sign"]
        parameters |= read_parameters(prune)
        METHODS[name] = Method(name, method, parameters, "required", 1, None)
        return prune

    return register


def _return_base(tile: Tile) -> Array:
    """The kernel of a merge without a tuned model."""
    return tile.tensors[0]


def _divisor(tiles: Tiles, vectors: Sequence[Array] | None, weights: np.ndarray) -> Any:
    """Returns what the weighted sum is divided by for a mean.

    That is the sum of all weights, or, with `vectors`, at each place the sum of the weights of
    those vectors that are not 0 there.
    """
    if vectors is None:
        weight_sum = float(tiles.round(weights.sum(keepdims=True))[0])
        return weight_sum if abs(weight_sum) >= 1e-8 else 1.0
    shares = []
    for vector, weight in zip(vectors, weights, strict=True):
        shares.append((vector != 0) * weight)
    divisor = tiles.round(sum_arrays(shares))
    divisor += divisor == 0  # no division by 0: the mean is 0 there
    return divisor


def _prune(
    tiles: Tiles, keep: _KeepMask, density: Sequence[float], rescale: _Rescale
) -> TileArrays:
    """Returns the function that gives a tile's task vectors without what `keep` leaves out.

    With `rescale: true` a vector is scaled back to its sum of magnitudes before pruning, with
    `rescale: density` it is divided by its density.
    """
    packed_masks: dict[tuple[int, int], np.ndarray] = {}  # masks of the first pass, by tile, model
    factors = [1.0] * len(density)
    if rescale is True and min(density, default=1) < 1:
        factors = _restoring_factors(tiles, keep, density, packed_masks)
    elif rescale == "density":
        factors = [1 / share if 0 < share < 1 else 1.0 for share in density]

    def pruned_vectors(tile: Tile) -> list[Array]:
        vectors = task_vectors(tiles, tile)
        for i, vector in enumerate(vectors):
            if density[i] < 1:
                packed = packed_masks.pop((tile.index, i), None)
                if packed is None:
                    vector *= keep(tile, i, vector)
                else:
                    mask = np.unpackbits(packed, count=math.prod(vector.shape)).view(bool)
                    vector *= move_like(vector, mask.reshape(vector.shape))
                _multiply(tiles, vector, factors[i])
        return vectors

    return pruned_vectors


def _restoring_factors(
    tiles: Tiles,
    keep: _KeepMask,
    density: Sequence[float],
    packed_masks: dict[tuple[int, int], np.ndarray],
) -> list[float]:
    """Returns each vector's sum of magnitudes, divided by the sum that is left after pruning.

    Saves the masks in `packed_masks`, so that nothing has to be selected or drawn twice.
    """

    def sums_before_and_after(tile: Tile) -> np.ndarray:
        table = np.ones((len(density), 2))
        for i, vector in enumerate(task_vectors(tiles, tile)):
            if density[i] < 1:
                mask = keep(tile, i, vector).reshape(-1)
                packed_masks[tile.index, i] = np.packbits(to_numpy(mask))
                library = array_library(vector)
                sizes = library.abs(vector, out=vector).reshape(-1)
                kept_sum = sizes @ cast(mask, compute_dtype(tiles.dtype))
                table[i, 0] = float(library.einsum("i->", sizes))
                table[i, 1] = float(kept_sum)
        return table

    sums = np.asarray(sum(tiles.map(sums_before_and_after))).tolist()
    factors = []
    for before, after in sums:
        factors.append(before / after if min(before, after) >= 1e-7 else 1.0)
    return factors


def _keep_largest(
    tiles: Tiles, density: Sequence[float], gamma: Sequence[float] | None = None
) -> _KeepMask:
    """Keep the `density` largest values; with `gamma`, without that share of the very largest."""
    counts: dict[tuple[int, str], int] = {}  # model, kind of limit → values above that limit
    for i, share in enumerate(density):
        if share < 1:
            count = max(0, int(share * tiles.elements))
            if gamma:
                too_large = min(tiles.elements - count, int(gamma[i] * tiles.elements))
                counts[i, "kept"] = count + too_large
                counts[i, "too large"] = too_large
            else:
                counts[i, "kept"] = max(count, 1) if share > 0 else count

    def sizes_of(tile: Tile) -> list[Array]:
        return [magnitudes(vector) for vector in task_vectors(tiles, tile)]

    requests = [(model, count) for (model, _), count in counts.items()]
    tops: dict[tuple[int, str], TopK] = {}
    for key, top in zip(counts, find_top_k(tiles, sizes_of, requests), strict=True):
        tops[key] = top

    def keep(tile: Tile, i: int, vector: Array) -> Array:
        sizes = magnitudes(vector)
        mask = tops[i, "kept"].mask(tile.index, sizes)
        if gamma:
            mask &= ~tops[i, "too large"].mask(tile.index, sizes)
        return mask

    return keep


def _keep_at_random(
    tiles: Tiles, density: Sequence[float], epsilon: Sequence[float] | None = None
) -> _KeepMask:
    """Keep each value with probability `density`.

    With `epsilon` the probability goes from density - epsilon for the smallest value of a row to
    density + epsilon for the largest.
    """
    bounds = "density - epsilon and density + epsilon must lie between 0 and 1"
    for share, spread in zip(density, epsilon or (), strict=False):
        fits = not 0 < share < 1 or 0 < share - spread <= share + spread < 1
        require(fits, f"epsilon {spread}: {bounds} (density is {share})")

    def keep(tile: Tile, i: int, vector: Array) -> Array:
        if epsilon is None or density[i] <= 0:
            limit = int(_limits_of(density[i]))
            if limit % 256 == 0:  # eight random bits are enough to decide
                return tiles.random_integers(tile, i, "int8") < limit // 256
            return tiles.random_integers(tile, i) < limit
        order = abs(vector).argsort(axis=1, stable=True)
        columns = vector.shape[1]
        shares = np.linspace(density[i] - epsilon[i], density[i] + epsilon[i], columns)
        limits = cast(order, "int16")  # for its shape and device; every value is replaced
        rows = move_like(order, np.arange(len(order))[:, None])
        limits[rows, order] = move_like(order, _limits_of(shares))
        return tiles.random_integers(tile, i) < limits

    return keep


def _limits_of(shares: float | np.ndarray) -> np.ndarray:
    """Returns the int16 numbers below which the given shares of all 65536 int16 numbers lie.

    A share above 0 gets one number at least, and no share gets all of them.
    """
    least = np.greater(shares, 0)
    counts = np.round(np.multiply(shares, CHANCES)).clip(least, CHANCES - 1)
    return (counts - CHANCES // 2).astype(np.int16)


@_vector_method("task_arithmetic")
def task_arithmetic(tiles: Tiles) -> TileArrays:
    """Add the weighted task vectors as they are."""
    return lambda tile: task_vectors(tiles, tile)


@_vector_method("ties", consensus=True, normalize=True)
def ties(tiles: Tiles, density: _Floats = _DENSITY, rescale: _Rescale = False) -> TileArrays:
    """TIES: keep the largest changes, elect a sign, average the changes that agree."""
    return _prune(tiles, _keep_largest(tiles, density), density, rescale)


@_vector_method("breadcrumbs")
@_vector_method("breadcrumbs_ties", consensus=True)
def breadcrumbs(
    tiles: Tiles, density: _Floats = _DENSITY, gamma: _Floats = _GAMMA, rescale: _Rescale = False
) -> TileArrays:
    """Breadcrumbs: drop the smallest changes and the very largest ones."""
    return _prune(tiles, _keep_largest(tiles, density, gamma), density, rescale)


@_vector_method("dare_linear", random=True)
@_vector_method("dare_ties", consensus=True, random=True)
def dare(tiles: Tiles, density: _Floats = _DENSITY, rescale: _Rescale = True) -> TileArrays:
    """DARE: drop changes at random and rescale the rest."""
    return _prune(tiles, _keep_at_random(tiles, density), density, rescale)


@_vector_method("della_linear", random=True)
@_vector_method("della", consensus=True, normalize=True, random=True)
def della(
    tiles: Tiles, density: _Floats = _DENSITY, epsilon: _Floats = _EPSILON, rescale: _Rescale = True
) -> TileArrays:
    """DELLA: drop changes at random, small ones more often, and rescale the rest."""
    return _prune(tiles, _keep_at_random(tiles, density, epsilon), density, rescale)
