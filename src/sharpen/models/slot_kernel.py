"""Attention of one decoding step on a GPU as a single Triton kernel.

Each row's new key and value are written into its row of the cache, and its query looks at all keys
of that row. `attention` calls it for steps of one token per row. Needs triton, which comes with
torch for CUDA.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[reportMissingImports]
import triton.language as tl  # type: ignore[reportMissingImports]

_BLOCK = 64  # places of the cache that are read at a time


# Suffixes of tensor names: S query heads that share a key head (padded to 16), D width of a head,
# P places of a block. Arguments named `…_row` and `…_head` are strides.
@triton.jit
def _attend_one_token(
    q, k, v, keys, values, at, used, out,
    scale, window, q_row, q_head, k_row, k_head, v_row, v_head, places,
    SHARED: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row and key head; `SHARED` query heads look at the same keys.

    The new key and value are taken from where they were computed, so that nothing waits for their
    way through the cache. The softmax runs over blocks of places (online softmax): `best_S` is the
    largest score so far, `sum_S` and `out_S_D` are relative to it.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, WIDTH)
    shared = tl.arange(0, 16)  # tl.dot needs 16 rows at least
    is_real = shared < SHARED
    query_head = head * SHARED + shared
    q_S_D = tl.load(
        q + row * q_row + query_head[:, None] * q_head + column[None],
        mask=is_real[:, None],
        other=0.0,
    )
    k_D = tl.load(k + row * k_row + head * k_head + column)
    v_D = tl.load(v + row * v_row + head * v_head + column)
    new_place = (tl.load(at + row) * HEADS + head) * WIDTH + column
    tl.store(keys + new_place, k_D)
    tl.store(values + new_place, v_D)
    # begin with the new token alone
    best_S = tl.sum(q_S_D.to(tl.float32) * k_D.to(tl.float32)[None], 1) * scale
    sum_S = tl.full((16,), 1.0, tl.float32)
    out_S_D = tl.zeros((16, WIDTH), tl.float32) + v_D.to(tl.float32)[None]
    earlier = tl.load(used + row).to(tl.int32) - 1  # places before the new one
    first = tl.maximum(earlier + 1 - window, 0)
    row_start = (row * places * HEADS + head) * WIDTH
    for start in range(first, earlier, BLOCK):
        place = start + tl.arange(0, BLOCK)
        is_used = place < earlier
        offset = row_start + place[:, None].to(tl.int64) * (HEADS * WIDTH) + column[None]
        k_P_D = tl.load(keys + offset, mask=is_used[:, None], other=0.0)
        score_S_P = tl.dot(q_S_D, tl.trans(k_P_D)) * scale
        score_S_P = tl.where(is_used[None], score_S_P, float("-inf"))
        new_best_S = tl.maximum(best_S, tl.max(score_S_P, 1))
        share_S_P = tl.exp(score_S_P - new_best_S[:, None])
        rescale_S = tl.exp(best_S - new_best_S)
        v_P_D = tl.load(values + offset, mask=is_used[:, None], other=0.0)
        out_S_D = out_S_D * rescale_S[:, None] + tl.dot(share_S_P.to(v_P_D.dtype), v_P_D)
        sum_S = sum_S * rescale_S + tl.sum(share_S_P, 1)
        best_S = new_best_S
    result_S_D = (out_S_D / sum_S[:, None]).to(out.dtype.element_ty)
    target = out + (row * HEADS * SHARED + query_head[:, None]) * WIDTH + column[None]
    tl.store(target, result_S_D, mask=is_real[:, None])


def fits(q_N_H_D: torch.Tensor, k_N_H_D: torch.Tensor) -> bool:
    """Returns whether the kernel is written for heads like these."""
    width = q_N_H_D.shape[2]
    shared = q_N_H_D.shape[1] // k_N_H_D.shape[1]
    return width in (16, 32, 64, 128, 256) and shared <= 16


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: torch.Tensor,
    at_N: torch.Tensor,
    used: torch.Tensor,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Store the new keys and values in the cache and return the attention's output.

    `q`, `k` and `v` are [rows, heads, width]; `cache` holds the keys and values of one layer,
    `at_N` says where each new token lies in it, and `used` how many places each row has, the new
    token included.
    """
    q, k, v = (t if t.stride(2) == 1 else t.contiguous() for t in (q, k, v))
    rows, query_heads, width = q.shape
    heads = k.shape[1]
    places = cache.shape[2]
    out = torch.empty(rows, query_heads, width, dtype=q.dtype, device=q.device)
    kernel: Any = _attend_one_token
    kernel[(rows, heads)](
        q, k, v, cache[0], cache[1], at_N, used, out,
        scale if scale is not None else width**-0.5, window or places,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), places,
        SHARED=query_heads // heads, HEADS=heads, WIDTH=width, BLOCK=_BLOCK,
    )  # fmt: skip
    return out
