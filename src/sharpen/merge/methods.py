"""Merge methods that average, rotate or select whole weights; a base comes first in a tile.

Methods on the sphere work in the space that the inputs span: one pass over the tensor gives their
inner products, everything after that is scalars. The methods on task vectors are in
`task_vector_methods`. `recipe` imports this module so that its methods are registered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sharpen.merge import require
from sharpen.merge.method import Kernel, PerModel, PerTuned, merge_method
from sharpen.merge.task_vector_methods import elect_signs, sum_arrays, task_vectors
from sharpen.merge.tiles import (
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
)


def _weighted_sum(coefficients: Sequence[float], divisor: float = 1.0) -> Kernel:
    """Returns the kernel that sums a tile's tensors with these coefficients."""
    shares = [float(np.float32(coefficient)) for coefficient in coefficients]

    def kernel(tile: Tile) -> Array:
        for tensor, share in zip(tile.tensors, shares, strict=True):
            if share != 1:
                tensor *= share
        result = sum_arrays(tile.tensors)
        return result if divisor == 1 else result / divisor

    return kernel


@merge_method(base="ignored")
def linear(tiles: Tiles, weight: PerModel[float], normalize: bool = True) -> Kernel:
    """The weighted average, or with `normalize: false` the weighted sum."""
    shares = np.array(weight, dtype=np.float32)
    divisor = float(shares.sum()) if normalize else 1.0
    require(divisor, "linear: the weights sum to 0; set normalize: false or other weights")
    # with at most 13 significant bits in a share, products with half-precision values are exact
    if all((math.frexp(share)[0] * 8192).is_integer() for share in shares):
        return _weighted_sum(weight, divisor)

    def kernel(tile: Tile) -> Array:
        # mergekit rounds each product together with its sum; float64 reproduces that
        result = 0.0
        for tensor, share in zip(tile.tensors, shares.tolist(), strict=True):
            exact = cast(tensor, "float64") * share + result
            result = cast(exact, compute_dtype(tiles.dtype))
        return result / divisor

    return kernel


@merge_method(base="ignored", most=1)
def passthrough(tiles: Tiles, scale: PerModel[float | None] = None) -> Kernel:  # type: ignore[assignment]
    """One model's tensor, multiplied by `scale` if that is set."""
    factor = scale[0]

    def kernel(tile: Tile) -> Array:
        return tile.tensors[0] if factor is None else tile.tensors[0] * factor

    return kernel


def _inner_products(tiles: Tiles, arrays_of: TileArrays) -> np.ndarray:
    """Returns the inner products of whole tensors, [n, n], in float64."""

    def products(tile: Tile) -> np.ndarray:
        vectors = [array.reshape(-1) for array in arrays_of(tile)]
        return np.array([[float(a @ b) for b in vectors] for a in vectors])

    return np.asarray(sum(tiles.map(products)))


def _tensors_of(tile: Tile) -> Sequence[Array]:
    """Returns a tile's tensors as they are."""
    return tile.tensors


@merge_method(least=2, most=2)
def slerp(tiles: Tiles, t: float) -> Kernel:
    """Along the arc from the base (t = 0) to the other model (t = 1), or the chord if near."""
    products = _inner_products(tiles, _tensors_of)
    norms = [norm if norm > 1e-8 else 1.0 for norm in np.sqrt(products.diagonal()).tolist()]
    cosine = max(-1.0, min(1.0, float(products[0, 1]) / (norms[0] * norms[1])))
    angle = math.acos(cosine)
    if abs(cosine) > 0.9995:
        return _weighted_sum([1 - t, t])
    return _weighted_sum([math.sin(part * angle) / math.sin(angle) for part in (1 - t, t)])


@merge_method(base="optional")
def multislerp(
    tiles: Tiles, weight: PerTuned[float], normalize_weights: bool = True, eps: float = 1e-8
) -> Kernel:
    """The weighted mean direction at the weighted mean length; with a base, of task vectors."""
    has_base = len(tiles.load(0).tensors) > len(weight)
    if len(weight) == 1:
        return lambda tile: tile.tensors[-1]
    weights = np.array(weight) / (sum(weight) if normalize_weights else 1)

    def vectors_of(tile: Tile) -> Sequence[Array]:
        return task_vectors(tiles, tile) if has_base else tile.tensors

    products = _inner_products(tiles, vectors_of)
    norms = np.sqrt(products.diagonal())
    direction = weights / (norms + eps)
    length = float(np.sqrt(abs(direction @ products @ direction)))
    cancelled = length < eps and len(weight) > 2
    require(not cancelled, f"multislerp: {tiles.name}: the weighted directions cancel out")
    if not length < eps:
        weights = direction / length * (norms @ weights)
    if has_base:
        # base + sum of weight * (tuned - base)
        return _weighted_sum([1 - weights.sum(), *weights])
    return _weighted_sum(weights.tolist())


@merge_method(base="ignored")
def karcher(tiles: Tiles, max_iter: int = 10, tol: float = 1e-5) -> Kernel:
    """The Karcher mean of the directions, at the mean length."""
    products = _inner_products(tiles, _tensors_of)
    norms = np.sqrt(products.diagonal())
    used = norms > tol  # a tensor of zeros has no direction
    count = len(norms)
    if count == 1:
        return _weighted_sum([1.0])
    if not used.any():
        return _weighted_sum([0.0] * count)
    scale = used / norms.clip(tol)
    alpha = used / used.sum()
    cosines = products * np.outer(scale, scale)

    # A direction is a vector of coefficients for the unit vectors of the inputs.
    def length(coefficients: np.ndarray) -> float:
        return math.sqrt(max(0.0, coefficients @ cosines @ coefficients))

    mean_length = length(alpha)
    mean = alpha / mean_length if mean_length >= tol else np.eye(count)[used.argmax()]
    for _ in range(max_iter):
        cosine = (cosines @ mean).clip(-1, 1)
        angle = np.arccos(cosine)
        pull = alpha * (angle >= tol) / np.sinc(angle / math.pi)  # alpha * angle / sin(angle)
        tangent = pull - (pull @ cosine) * mean
        step = length(tangent)
        if step < tol:
            break
        mean = math.cos(step) * mean + math.sin(step) * tangent / step
        mean = mean / max(length(mean), tol)
    return _weighted_sum((norms.mean() * mean * scale).tolist())


@merge_method(least=3)
def model_stock(tiles: Tiles, filter_wise: bool = False) -> Kernel:
    """Towards the mean of the tuned models, as far as the angles of their task vectors allow.

    The angles are those of whole tensors, or with `filter_wise` those of each row.
    """

    def vectors_of(tile: Tile) -> Sequence[Array]:
        return task_vectors(tiles, tile)

    cosine_of_tensor = None
    if not filter_wise:
        cosine_of_tensor = float(_mean_cosine(_inner_products(tiles, vectors_of)))

    def kernel(tile: Tile) -> Array:
        vectors = task_vectors(tiles, tile)
        cosine: Any = cosine_of_tensor
        if cosine is None:
            rows = array_library(vectors[0]).stack(vectors)
            products = array_library(rows).einsum("irc,jrc->rij", rows, rows)
            cosine = _mean_cosine(products)[:, None]
        divisor = 1 + (len(vectors) - 1) * cosine
        # opposing updates: stay at the base (a factor of 0, and a divisor that is not 0)
        singular = abs(divisor) < 1e-6
        share = cosine * (singular == 0) / (divisor + singular)
        return tile.tensors[0] + sum_arrays(vectors) * share

    return kernel


def _mean_cosine(products: Array) -> Array:
    """Returns the mean cosine over all pairs of vectors, from inner products [..., n, n]."""
    einsum = array_library(products).einsum
    count = products.shape[-1]
    norms = einsum("...ii->...i", products) ** 0.5
    cosines = products / (norms[..., :, None] * norms[..., None, :]).clip(1e-6)
    pairs = cosines.clip(-1, 1).sum((-2, -1)) - einsum("...ii->...", cosines)
    return pairs / (count * (count - 1))


@merge_method()
def sce(tiles: Tiles, select_topk: float = 1.0) -> Kernel:
    """Select what varies most, weight models by their energy, erase what disagrees in sign."""
    top = _most_varying(tiles, select_topk) if select_topk < 1 else None

    def selected_vectors(tile: Tile) -> Sequence[Array]:
        vectors = task_vectors(tiles, tile)
        if top is None:
            return vectors
        mask = top.mask(tile.index, _spread(tiles, vectors))
        return [vector * mask for vector in vectors]

    def energies_of(tile: Tile) -> np.ndarray:
        return np.array([float((vector * vector).sum()) for vector in selected_vectors(tile)])

    energies = np.asarray(sum(tiles.map(energies_of))) / max(1, tiles.elements)
    if not energies.sum() >= 1e-6:
        energies = np.ones(len(energies))
    weights = (energies / energies.sum()).tolist()

    def kernel(tile: Tile) -> Array:
        vectors = selected_vectors(tile)
        elect_signs(vectors)
        shares = []
        weighted = []
        for vector, weight in zip(vectors, weights, strict=True):
            shares.append(cast(vector != 0, compute_dtype(tiles.dtype)) * weight)
            weighted.append(vector * weight)
        return tile.tensors[0] + sum_arrays(weighted) / sum_arrays(shares).clip(1e-6)

    return kernel if weights else lambda tile: tile.tensors[0]


def _spread(tiles: Tiles, vectors: Sequence[Array]) -> Array:
    """Returns the variance of the vectors at each place, as a magnitude."""
    library = array_library(vectors[0])
    variance = library.var(cast(library.stack(vectors), "float64"), axis=0, correction=0)
    return magnitudes(tiles.round(cast(variance, compute_dtype(tiles.dtype))))


def _most_varying(tiles: Tiles, share: float) -> TopK:
    """Find the places where the task vectors vary most: this share of those that vary at all."""

    def spread_of(tile: Tile) -> Array:
        return _spread(tiles, task_vectors(tiles, tile))

    varying = sum(tiles.map(lambda tile: int((spread_of(tile) != 0).sum())))
    (top,) = find_top_k(tiles, lambda tile: [spread_of(tile)], [(0, int(varying * share))])
    return top


@merge_method(least=2, most=2)
def nearswap(tiles: Tiles, t: float) -> Kernel:
    """The base, moved to the other model where the two are already nearer than t."""

    def kernel(tile: Tile) -> Array:
        base, other = tile.tensors
        gap = tiles.round(tiles.round(abs(base - other)).clip(1e-6))
        share = tiles.round((tiles.round(1 / gap) * t).clip(0, 1))
        from_other = tiles.round(share * other)
        from_base = tiles.round(tiles.round(1 - share) * base)
        return from_other + from_base

    return kernel
