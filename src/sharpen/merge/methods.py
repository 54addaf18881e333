"""Merge methods that average, turn or choose whole weights; a base comes first in a tile. On the
sphere everything happens in the space that the inputs span: one look gives inner products, the rest
is scalars. `deltas` has the methods on task vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sharpen.merge import require
from sharpen.merge.deltas import deltas, elect, total
from sharpen.merge.method import Kernel, PerModel, PerTuned, merge_method
from sharpen.merge.tiles import Array, Look, Tile, Tiles, cast, magnitudes, module, select, wide


def blend(coefficients: Sequence[float], divisor: float = 1.0) -> Kernel:
    """The weighted sum of a tile's tensors."""
    shares = [float(np.float32(coefficient)) for coefficient in coefficients]

    def kernel(tile: Tile) -> Array:
        for tensor, share in zip(tile.tensors, shares, strict=True):
            if share != 1:
                tensor *= share
        result = total(tile.tensors)
        return result if divisor == 1 else result / divisor

    return kernel


@merge_method(base="ignored")
def linear(x: Tiles, weight: PerModel[float], normalize: bool = True) -> Kernel:
    shares = np.array(weight, dtype=np.float32)
    divisor = float(shares.sum()) if normalize else 1.0
    require(divisor, "linear: the weights sum to 0; set normalize: false or other weights")
    if all((math.frexp(share)[0] * 8192).is_integer() for share in shares):
        return blend(weight, divisor)  # products with half-precision values are exact

    def kernel(tile: Tile) -> Array:
        """mergekit rounds each product together with its sum, as float64 can show."""
        result = 0.0
        for tensor, share in zip(tile.tensors, shares.tolist(), strict=True):
            result = cast(cast(tensor, "float64") * share + result, wide(x.dtype))
        return result / divisor

    return kernel


@merge_method(base="ignored", most=1)
def passthrough(x: Tiles, scale: PerModel[float | None] = None) -> Kernel:  # type: ignore[assignment]
    factor = scale[0]
    return lambda tile: tile.tensors[0] if factor is None else tile.tensors[0] * factor


def gram(x: Tiles, look: Look) -> np.ndarray:
    """Inner products of whole tensors, [n, n], in float64."""

    def products(tile: Tile) -> np.ndarray:
        rows = [vector.reshape(-1) for vector in look(tile)]
        return np.array([[float(a @ b) for b in rows] for a in rows])

    return np.asarray(sum(x.each(products)))


@merge_method(least=2, most=2)
def slerp(x: Tiles, t: float) -> Kernel:
    """Along the arc from the base (t = 0) to the other model (t = 1), or the chord if near."""
    products = gram(x, lambda tile: tile.tensors)
    norms = [n if n > 1e-8 else 1.0 for n in np.sqrt(products.diagonal()).tolist()]
    cosine = max(-1.0, min(1.0, float(products[0, 1]) / (norms[0] * norms[1])))
    angle = math.acos(cosine)
    if abs(cosine) > 0.9995:
        return blend([1 - t, t])
    return blend([math.sin(part * angle) / math.sin(angle) for part in (1 - t, t)])


@merge_method(base="optional")
def multislerp(
    x: Tiles, weight: PerTuned[float], normalize_weights: bool = True, eps: float = 1e-8
) -> Kernel:
    """The weighted mean of directions, at that of lengths. With a base, the sphere is around it."""
    based = len(x.load(0).tensors) > len(weight)
    if len(weight) == 1:
        return lambda tile: tile.tensors[-1]
    weights = np.array(weight) / (sum(weight) if normalize_weights else 1)
    products = gram(x, lambda tile: deltas(x, tile) if based else tile.tensors)
    norms = np.sqrt(products.diagonal())
    direction = weights / (norms + eps)
    length = float(np.sqrt(abs(direction @ products @ direction)))
    cancelled = length < eps and len(weight) > 2
    require(not cancelled, f"multislerp: {x.name}: the weighted directions cancel out")
    if not length < eps:
        weights = direction / length * (norms @ weights)
    return blend([1 - weights.sum(), *weights] if based else weights.tolist())


@merge_method(base="ignored")
def karcher(x: Tiles, max_iter: int = 10, tol: float = 1e-5) -> Kernel:
    """The Karcher mean of the directions, at the mean length."""
    products = gram(x, lambda tile: tile.tensors)
    norms = np.sqrt(products.diagonal())
    used = norms > tol
    if len(norms) == 1 or not used.any():
        return blend([1.0 if len(norms) == 1 else 0.0] * len(norms))
    scale, alpha = used / norms.clip(tol), used / used.sum()
    cosines = products * np.outer(scale, scale)

    def length(v: np.ndarray) -> float:
        return math.sqrt(max(0.0, v @ cosines @ v))

    mean = alpha / length(alpha) if length(alpha) >= tol else np.eye(len(norms))[used.argmax()]
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
    return blend((norms.mean() * mean * scale).tolist())


@merge_method(least=3)
def model_stock(x: Tiles, filter_wise: bool = False) -> Kernel:
    """Towards the mean of the tuned models, as far as angles of task vectors (or rows) allow."""
    mean = None if filter_wise else float(mean_cosine(gram(x, lambda tile: deltas(x, tile))))

    def kernel(tile: Tile) -> Array:
        vectors, cosine = deltas(x, tile), mean
        if cosine is None:
            rows = module(vectors[0]).stack(vectors)
            cosine = mean_cosine(module(rows).einsum("irc,jrc->rij", rows, rows))[:, None]
        divisor = 1 + (len(vectors) - 1) * cosine
        singular = abs(divisor) < 1e-6  # opposing updates: stay at the base
        share: Any = cosine * (singular == 0) / (divisor + singular)
        return tile.tensors[0] + total(vectors) * share

    return kernel


def mean_cosine(products: Array) -> Array:
    """Of all pairs of vectors, from their inner products [..., n, n]."""
    einsum, count = module(products).einsum, products.shape[-1]
    norms = einsum("...ii->...i", products) ** 0.5
    cosines = products / (norms[..., :, None] * norms[..., None, :]).clip(1e-6)
    pairs = cosines.clip(-1, 1).sum((-2, -1)) - einsum("...ii->...", cosines)
    return pairs / (count * (count - 1))


@merge_method()
def sce(x: Tiles, select_topk: float = 1.0) -> Kernel:
    """Select what varies most, weigh models by their energy, erase what disagrees in sign."""

    def spread(vectors: Sequence[Array]) -> Array:
        xp = module(vectors[0])
        variance = xp.var(cast(xp.stack(vectors), "float64"), axis=0, correction=0)
        return magnitudes(x.round(cast(variance, wide(x.dtype))))

    tops = []
    if select_topk < 1:
        varying = sum(x.each(lambda tile: int((spread(deltas(x, tile)) != 0).sum())))
        wanted = [(0, int(varying * select_topk))]
        tops = select(x, lambda tile: [spread(deltas(x, tile))], wanted)

    def chosen(tile: Tile) -> Sequence[Array]:
        vectors = deltas(x, tile)
        masks = [top.mask(tile.index, spread(vectors)) for top in tops]
        return [vector * masks[0] for vector in vectors] if masks else vectors

    def energies(tile: Tile) -> np.ndarray:
        return np.array([float((vector * vector).sum()) for vector in chosen(tile)])

    energy = np.asarray(sum(x.each(energies))) / max(1, x.elements)
    energy = energy if energy.sum() >= 1e-6 else np.ones(len(energy))
    weights = (energy / energy.sum()).tolist()

    def kernel(tile: Tile) -> Array:
        vectors = chosen(tile)
        elect(vectors)
        pairs = list(zip(vectors, weights, strict=True))
        shares = total([cast(vector != 0, wide(x.dtype)) * weight for vector, weight in pairs])
        mixed = total([vector * weight for vector, weight in pairs])
        return tile.tensors[0] + mixed / shares.clip(1e-6)

    return kernel if weights else lambda tile: tile.tensors[0]


@merge_method(least=2, most=2)
def nearswap(x: Tiles, t: float) -> Kernel:
    """The base, moved to the other model where the two are already nearer than t."""

    def kernel(tile: Tile) -> Array:
        base, other = tile.tensors
        gap = x.round(x.round(abs(base - other)).clip(1e-6))
        share = x.round((x.round(1 / gap) * t).clip(0, 1))
        return x.round(share * other) + x.round(x.round(1 - share) * base)

    return kernel
