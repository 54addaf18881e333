"""Merge methods that average, turn or choose whole weights. `deltas` has those on task vectors.

Where a method has a base it comes first in a tile. On the sphere everything happens in the space
that the inputs span: one look gives their inner products, the rest is scalars.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sharpen.merge.deltas import deltas, total, wide, wide_dtype
from sharpen.merge.method import Kernel, PerModel, PerTuned, merge_method
from sharpen.merge.tiles import Tile, Tiles, Top, magnitude_bits, masked, select
from sharpen.types import SharpenError


def blend(coefficients: Sequence[float], divisor: float = 1.0) -> Kernel:
    """The weighted sum of a tile's tensors, in float32 at least."""

    def kernel(tile: Tile) -> Tensor:
        first = tile.tensors[0]
        result = first.to(wide_dtype(first.dtype), copy=True)
        if coefficients[0] != 1:
            result.mul_(coefficients[0])
        for tensor, coefficient in zip(tile.tensors[1:], coefficients[1:], strict=True):
            result.add_(tensor, alpha=coefficient)
        return (result if divisor == 1 else result.div_(divisor)).to(first.dtype)

    return kernel


def single(value: float) -> float:
    """The nearest float32, in which coefficients are held."""
    return torch.tensor(value, dtype=torch.float32).item()


@merge_method(base="ignored")
def linear(x: Tiles, weight: PerModel[float], normalize: bool = True) -> Kernel:
    total = torch.tensor(weight, dtype=torch.float32).sum().item()
    if normalize and total == 0:
        raise SharpenError("linear: the weights sum to 0; set normalize: false or other weights")
    return blend([single(w) for w in weight], total if normalize else 1.0)


@merge_method(base="ignored", most=1)
def passthrough(x: Tiles, scale: PerModel[float | None] = None) -> Kernel:  # type: ignore[assignment]
    factor = scale[0]
    return lambda tile: tile.tensors[0] if factor is None else tile.tensors[0] * factor


def gram(x: Tiles, vectors: Callable[[Tile], Sequence[Tensor]]) -> Tensor:
    """Inner products of whole tensors, [n, n], in float64."""

    def products(tile: Tile) -> Tensor:
        rows = [wide(v).reshape(-1) for v in vectors(tile)]
        table = torch.zeros(len(rows), len(rows), dtype=torch.float64)
        for i, a in enumerate(rows):
            for j, b in enumerate(rows[: i + 1]):
                table[i, j] = table[j, i] = torch.dot(a, b).item()
        return table

    return torch.stack(x.measure(products)).sum(0)


@merge_method(least=2, most=2)
def slerp(x: Tiles, t: float) -> Kernel:
    """Along the arc from the base (t = 0) to the other model (t = 1); nearly parallel tensors go
    along the chord."""
    products = gram(x, lambda tile: tile.tensors)
    norms = [n if n > 1e-8 else 1.0 for n in products.diagonal().sqrt().tolist()]
    cosine = max(-1.0, min(1.0, products[0, 1].item() / (norms[0] * norms[1])))
    if abs(cosine) > 0.9995:
        return blend([single(1 - t), single(t)])
    angle = math.acos(cosine)
    parts = [math.sin((1 - t) * angle), math.sin(t * angle)]
    return blend([single(part / math.sin(angle)) for part in parts])


@merge_method(base="optional")
def multislerp(
    x: Tiles, weight: PerTuned[float], normalize_weights: bool = True, eps: float = 1e-8
) -> Kernel:
    """The weighted mean of the directions, at the weighted mean of the lengths. With a base, the
    sphere is around it."""
    based = len(x.load(0).tensors) > len(weight)
    if len(weight) == 1:
        return lambda tile: tile.tensors[-1]
    weights = torch.tensor(weight, dtype=torch.float64)
    weights = weights / weights.sum() if normalize_weights else weights
    products = gram(x, deltas if based else lambda tile: tile.tensors)
    norms = products.diagonal().sqrt()
    direction = weights / (norms + eps)
    length = (direction @ products @ direction).sqrt()
    if length < eps:
        if len(weight) > 2:
            raise SharpenError(f"multislerp: {x.name}: the weighted directions cancel out")
        return around_base(weights.tolist(), based)
    return around_base((direction / length * (norms * weights).sum()).tolist(), based)


@merge_method(base="ignored")
def karcher(x: Tiles, max_iter: int = 10, tol: float = 1e-5) -> Kernel:
    """The Karcher mean of the directions, at the mean length."""
    products = gram(x, lambda tile: tile.tensors)
    norms = products.diagonal().sqrt()
    used = norms > tol
    if len(norms) == 1 or not used.any():
        return blend([1.0 if len(norms) == 1 else 0.0] * len(norms))
    scale = torch.where(used, 1 / norms.clamp(min=tol), 0.0)
    cosines = products * scale[:, None] * scale[None, :]
    alpha = used.double() / used.sum()

    def length(v: Tensor) -> float:
        return math.sqrt(max(0.0, (v @ cosines @ v).item()))

    first = torch.zeros_like(alpha)
    first[used.nonzero()[0, 0]] = 1.0
    mean = alpha / length(alpha) if length(alpha) >= tol else first
    for _ in range(max_iter):
        tangent = torch.zeros_like(mean)
        for i in used.nonzero()[:, 0].tolist():
            cosine = float((cosines[i] @ mean).clamp(-1, 1))
            angle = math.acos(cosine)
            if angle >= tol:
                pull = alpha[i] * angle / math.sin(angle)
                tangent -= pull * cosine * mean
                tangent[i] += pull
        step = length(tangent)
        if step < tol:
            break
        mean = math.cos(step) * mean + math.sin(step) * tangent / step
        mean = mean / max(length(mean), tol)
    return blend((norms.mean() * mean * scale).tolist())


def around_base(coefficients: Sequence[float], based: bool) -> Kernel:
    """Σ c·tensor, or base + Σ c·(tensor - base)."""
    return blend([1 - sum(coefficients), *coefficients] if based else coefficients)


@merge_method(least=3)
def model_stock(x: Tiles, filter_wise: bool = False) -> Kernel:
    """Towards the mean of the tuned models, as far as the angles between their task vectors
    allow."""
    if filter_wise:
        return lambda tile: toward_mean(tile, row_cosines(deltas(tile)))
    products = gram(x, deltas)
    norms = products.diagonal().sqrt()
    cosines = (products / (norms[:, None] * norms[None, :]).clamp(min=1e-6)).clamp(-1, 1)
    pairs = torch.triu_indices(len(norms), len(norms), 1)
    mean = cosines[pairs[0], pairs[1]].mean()
    return lambda tile: toward_mean(tile, mean.to(tile.tensors[0].device))


def row_cosines(vectors: Sequence[Tensor]) -> Tensor:
    """Mean cosine between the vectors' rows, [rows, 1]."""
    rows = [wide(vector) for vector in vectors]
    norms = [row.norm(dim=-1) for row in rows]
    found = [
        ((rows[i] * rows[j]).sum(-1) / (norms[i] * norms[j]).clamp(min=1e-6)).clamp(-1, 1)
        for i in range(len(rows))
        for j in range(i + 1, len(rows))
    ]
    return torch.stack(found).mean(0).unsqueeze(-1)


def toward_mean(tile: Tile, cosine: Tensor) -> Tensor:
    base, *tuned = [wide(tensor) for tensor in tile.tensors]
    count = len(tuned)
    denominator = 1 + (count - 1) * cosine
    singular = denominator.abs() < 1e-6  # opposing updates: stay at the base
    share = count * cosine / torch.where(singular, 1.0, denominator)
    share = torch.where(singular, 0.0, share).to(base.dtype)
    mean = sum(tuned[1:], tuned[0]) / count
    return (share * mean + (1 - share) * base).to(tile.tensors[0].dtype)


@merge_method()
def sce(x: Tiles, select_topk: float = 1.0) -> Kernel:
    """Select the places that vary most, weigh models by the energy of their task vectors, erase
    what disagrees in sign."""
    spread = select_variance(x, select_topk) if select_topk < 1 else None

    def chosen(tile: Tile) -> list[Tensor]:
        vectors = deltas(tile)
        if spread is not None:
            mask = spread.mask(tile.index, variance_bits(tile))
            vectors = [masked(v, mask) for v in vectors]
        return vectors

    def energies(tile: Tile) -> Tensor:
        return torch.tensor([wide(v).square().sum().item() for v in chosen(tile)])

    energy = torch.stack(x.measure(energies)).sum(0, dtype=torch.float64) / max(1, x.elements)
    level = energy.sum().item()
    weights = energy / level if abs(level) >= 1e-6 else torch.ones_like(energy) / len(energy)

    def kernel(tile: Tile) -> Tensor:
        vectors = chosen(tile)
        side = torch.where(total(vectors) >= 0, 1.0, -1.0)
        agree = [vector.sign() == side for vector in vectors]
        shares = [w.item() * keep for w, keep in zip(weights, agree, strict=True)]
        mixed = total([wide(v) * share for v, share in zip(vectors, shares, strict=True)])
        divisor = total(shares).clamp(min=1e-6)
        return (tile.tensors[0] + mixed / divisor).to(tile.tensors[0].dtype)

    return kernel if len(energy) else lambda tile: tile.tensors[0]


def variance_bits(tile: Tile) -> Tensor:
    return magnitude_bits(torch.var(torch.stack(deltas(tile)), dim=0, unbiased=False))


def select_variance(x: Tiles, share: float) -> Top:
    varying = sum(x.measure(lambda tile: int(variance_bits(tile).count_nonzero())))
    return select(x, lambda tile: [variance_bits(tile)], [[int(varying * share)]])[0][0]


@merge_method(least=2, most=2)
def nearswap(x: Tiles, t: float) -> Kernel:
    """The base, moved to the other model where the two are already nearer than t."""

    def kernel(tile: Tile) -> Tensor:
        base, other = tile.tensors
        gap = (base - other).abs()
        gap = gap.float() if gap.dtype == torch.float16 else gap  # 1/1e-6 is beyond float16
        share = (t / gap.clamp(min=1e-6)).clamp(min=0, max=1).to(base.dtype)
        return share * other + (1 - share) * base

    return kernel
