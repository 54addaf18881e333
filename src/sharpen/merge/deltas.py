"""Merge methods on task vectors: prune each, mix them, add the result to the base.

Values are rounded to the working dtype after each step, as mergekit does, so that results agree;
bit operations stand in for comparisons and selections, which are slow on half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sharpen.merge.method import Kernel, Method, PerTuned, add, merge_method, parameters_of
from sharpen.merge.tiles import (
    BITS,
    CHANCES,
    NotFinite,
    Tile,
    Tiles,
    all_finite,
    magnitude_bits,
    masked,
    select,
)
from sharpen.types import SharpenError

Rescale = bool | Literal["density"]
Sparse = Callable[[Tile, int, Tensor], Tensor]  # tile, which tuned model, its delta → pruned delta
Pruning = tuple[Sparse, list[float] | None]  # and what each pruned delta is multiplied by


def deltas(tile: Tile) -> list[Tensor]:
    """Task vectors of a tile, free to be changed."""
    base, *tuned = tile.tensors
    return tile.kept.pop("deltas", None) or [tensor - base for tensor in tuned]


def total(tensors: Sequence[Tensor]) -> Tensor:
    """Their sum as a new tensor, rounded once."""
    if len(tensors) <= 2:
        return tensors[0] + tensors[1] if len(tensors) == 2 else tensors[0].clone()
    result = torch.add(wide(tensors[0]), wide(tensors[1]))
    for tensor in tensors[2:]:
        result.add_(wide(tensor))
    return result.to(tensors[0].dtype)


def wide(tensor: Tensor) -> Tensor:
    return tensor.to(wide_dtype(tensor.dtype))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def present(vector: Tensor, weight: Tensor) -> Tensor:
    """The weight where a value is not 0, else 0; by bits, and in place."""
    kind = BITS[vector.dtype]
    bits = vector.view(kind).bitwise_and_(torch.iinfo(kind).max).neg_()
    bits.bitwise_right_shift_(torch.iinfo(kind).bits - 1)
    return bits.bitwise_and_(int(weight.view(kind))).view(vector.dtype)


@dataclass(frozen=True)
class Mix:
    """How pruned task vectors become one. `elect` keeps only those that agree with the sign of
    their sum; None means that pruned places count like all others."""

    weight: Sequence[float]
    normalize: bool
    scale: float  # `lambda` of the configs
    elect: bool | None = None


def arithmetic(mix: Mix, pruning: Pruning | None) -> Kernel:
    """base + mixed task vectors."""
    sparse, factors = pruning or (None, None)

    def kernel(tile: Tile) -> Tensor:
        base, vectors = tile.tensors[0], tile.kept.pop("pruned", None)
        if vectors is None:
            vectors = deltas(tile)
            for i, vector in enumerate(vectors if sparse else []):
                sparse(tile, i, vector)  # type: ignore[misc]
        if not vectors:
            return base
        weights = torch.tensor(mix.weight, dtype=base.dtype)
        for i, vector in enumerate(vectors):
            factor = weights[i].item() * (factors[i] if factors else 1.0)
            if factor != 1:
                vector.mul_(factor)
        if mix.elect is not None:
            mixed = agreed(vectors, weights, mix)
        else:
            mixed, divisor = total(vectors), weights.sum().item()
            if mix.normalize and abs(divisor) >= 1e-8:
                mixed = mixed.div_(divisor)
        return base + (mixed if mix.scale == 1 else mixed.mul_(mix.scale))

    return kernel


def agreed(vectors: Sequence[Tensor], weights: Tensor, mix: Mix) -> Tensor:
    """The sum (or weighted mean) of those values whose sign is the sign of the sum. Signs are moved
    as bits: a disagreeing value turns negative and is clamped away."""
    kind = BITS[vectors[0].dtype]
    sign = total(vectors).view(kind).bitwise_and_(torch.iinfo(kind).min)
    if mix.elect:
        for vector in vectors:
            vector.view(kind).bitwise_xor_(sign)
            vector.clamp_(min=0)
    mixed = total(vectors)
    if mix.normalize:
        divisor = total([present(v, w) for v, w in zip(vectors, weights, strict=True)])
        if min(weights.tolist()) > 0:  # zero only where nothing is left, and there mixed is 0 too
            divisor.clamp_(min=weights.min().item())
        else:
            divisor = torch.where(divisor == 0, torch.ones_like(divisor), divisor)
        mixed.div_(divisor)
    if mix.elect:
        mixed.view(kind).bitwise_xor_(sign)
    return mixed


def rescaled(x: Tiles, sparse: Sparse, density: Sequence[float], rescale: Rescale) -> Pruning:
    """`sparse` with what brings each pruned task vector back to its size: the sum of magnitudes
    before pruning over that after it, or 1/density."""
    if not rescale or all(share >= 1 for share in density):
        return sparse, None
    if rescale == "density":
        return sparse, [1 / share if 0 < share < 1 else 1.0 for share in density]

    def sums(tile: Tile) -> Tensor:
        table = torch.zeros(len(density), 2, dtype=torch.float64)
        vectors = deltas(tile)
        for i, vector in enumerate(vectors):
            table[i, 0] = size(vector)
            table[i, 1] = size(sparse(tile, i, vector))
        if not table.isfinite().all():
            raise NotFinite(tile)
        tile.kept["pruned"] = vectors
        return table

    table = torch.stack(x.measure(sums)).sum(0)
    return sparse, [a / b if a >= 1e-7 and b >= 1e-7 else 1.0 for a, b in table.tolist()]


def size(vector: Tensor) -> float:
    """Sum of magnitudes. bfloat16 is summed by rows in its own dtype, which is fast, has float32's
    range, and loses nothing that matters over many rows."""
    own = vector.dtype == torch.bfloat16
    rows = vector.abs().sum(dim=1, dtype=None if own else torch.float32)
    return rows.sum(dtype=torch.float64).item()


def largest(x: Tiles, density: Sequence[float], gamma: Sequence[float] | None = None) -> Sparse:
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
    dense = [share >= 1 for share in density]
    tops = [] if all(dense) else select(x, delta_bits, wanted)

    def sparse(tile: Tile, i: int, vector: Tensor) -> Tensor:
        if dense[i]:
            return vector
        found = magnitude_bits(vector)
        mask = tops[i][0].mask(tile.index, found)
        if gamma is not None:
            mask.bitwise_and_(tops[i][1].mask(tile.index, found).bitwise_not_())
        return masked(vector, mask)

    return sparse


def delta_bits(tile: Tile) -> list[Tensor]:
    tile.kept["deltas"] = deltas(tile)
    return [magnitude_bits(vector) for vector in tile.kept["deltas"]]


def drawn(
    x: Tiles, density: Sequence[float], rescale: Rescale, epsilon: Sequence[float] | None = None
) -> Sparse:
    """Keep each value with probability `density`; with `epsilon`, with a probability that rises by
    ± epsilon with its rank in its row."""
    for share, spread in zip(density, epsilon or (), strict=False):
        if 0 < share < 1 and not (share - spread > 0 and share + spread < 1):
            raise SharpenError(
                f"epsilon {spread}: density - epsilon and density + epsilon must lie between 0 "
                f"and 1 (density is {share})"
            )

    def sparse(tile: Tile, i: int, vector: Tensor) -> Tensor:
        if rescale is not True and not all_finite(vector):  # else the sums for rescaling show it
            raise NotFinite(tile)
        if density[i] >= 1:
            return vector
        chances: Tensor | int = chance(density[i])
        if epsilon is not None and density[i] > 0:
            chances = ranked(vector, density[i], epsilon[i])
        # all ones where the draw is below the chance
        return masked(vector, x.random(tile, i).sub_(chances).bitwise_right_shift_(15))

    return sparse


def chance(density: float) -> int:
    """Of 32768 draws, how many keep a value; one at least and not all, as 0 < density < 1."""
    return max(1, min(round(density * CHANCES), CHANCES - 1)) if density > 0 else 0


def ranked(vector: Tensor, density: float, epsilon: float) -> Tensor:
    """Chances that rise from density - epsilon to density + epsilon along the magnitudes of
    each row."""
    columns = vector.shape[1]
    order = vector.abs().float().argsort(dim=1, stable=True)
    places = torch.arange(columns, device=vector.device).expand_as(order)
    ranks = torch.empty_like(order).scatter_(1, order, places)
    share = ranks.double() / max(1, columns - 1)
    return ((density - epsilon + 2 * epsilon * share) * CHANCES).round_().to(torch.int16)


def vector_method(
    name: str, elect: bool | None = None, normalize: bool = False
) -> Callable[[Callable[..., Pruning]], Callable[..., Pruning]]:
    """Registers a way of pruning under a name, with the parameters that all such methods share."""

    def register(prune: Callable[..., Pruning]) -> Callable[..., Pruning]:
        def method(
            x: Tiles,
            weight: PerTuned[float],
            normalize: bool = normalize,
            lambda_: float = 1.0,
            **rest: Any,
        ) -> Kernel:
            return arithmetic(Mix(weight, normalize, lambda_, elect), prune(x, **rest))

        shared = parameters_of(method)
        del shared["rest"]
        add(Method(name, method, shared | parameters_of(prune), "required", 1, None))
        return prune

    return register


@merge_method()
def task_arithmetic(
    x: Tiles, weight: PerTuned[float], normalize: bool = False, lambda_: float = 1.0
) -> Kernel:
    return arithmetic(Mix(weight, normalize, lambda_), None)


@merge_method()
def ties(
    x: Tiles,
    weight: PerTuned[float],
    density: PerTuned[float] = 1.0,  # type: ignore[assignment]
    normalize: bool = True,
    rescale: Rescale = False,
    lambda_: float = 1.0,
    majority_sign: bool = True,
) -> Kernel:
    """Trim each task vector to its largest values, elect a sign, average those that agree. Without
    `majority_sign` all that are left are averaged."""
    pruning = rescaled(x, largest(x, density), density, rescale)
    return arithmetic(Mix(weight, normalize, lambda_, elect=majority_sign), pruning)


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


@vector_method("dare_linear")
@vector_method("dare_ties", elect=True)
def dare(
    x: Tiles,
    density: PerTuned[float] = 1.0,  # type: ignore[assignment]
    rescale: Rescale = True,
) -> Pruning:
    """Drop values at random and rescale what is left."""
    return rescaled(x, drawn(x, density, rescale), density, rescale)


@vector_method("della_linear")
@vector_method("della", elect=True, normalize=True)
def della(
    x: Tiles,
    density: PerTuned[float] = 1.0,  # type: ignore[assignment]
    epsilon: PerTuned[float] = 0.15,  # type: ignore[assignment]
    rescale: Rescale = True,
) -> Pruning:
    """Drop values at random, the small ones of a row more often, and rescale what is left."""
    return rescaled(x, drawn(x, density, rescale, epsilon), density, rescale)
