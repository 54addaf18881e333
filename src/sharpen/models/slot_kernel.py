"""Attention of a decoding step on a GPU as one kernel: each row's new key and value go into its row
of the cache, and its query looks at all of them. Needs triton, which comes with torch for CUDA."""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[reportMissingImports]
import triton.language as tl  # type: ignore[reportMissingImports]

BLOCK = 64  # places that are read at a time


@triton.jit
def one_token(
    q, k, v, keys, values, at, used, out,
    scale, window, q_row, q_head, k_row, k_head, v_row, v_head, places,
    SHARED: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program for each row and key head: `SHARED` query heads look at the same keys. The new key
    is taken from where it was computed, so that nothing waits for its way through the cache."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wide, some = tl.arange(0, WIDTH), tl.arange(0, 16)
    real = some < SHARED
    mine = head * SHARED + some
    q_S_D = tl.load(
        q + row * q_row + mine[:, None] * q_head + wide[None], mask=real[:, None], other=0.0
    )
    k_D = tl.load(k + row * k_row + head * k_head + wide)
    v_D = tl.load(v + row * v_row + head * v_head + wide)
    here = (tl.load(at + row) * HEADS + head) * WIDTH + wide
    tl.store(keys + here, k_D)
    tl.store(values + here, v_D)
    best_S = tl.sum(q_S_D.to(tl.float32) * k_D.to(tl.float32)[None], 1) * scale
    sum_S = tl.full((16,), 1.0, tl.float32)
    out_S_D = tl.zeros((16, WIDTH), tl.float32) + v_D.to(tl.float32)[None]
    behind = tl.load(used + row).to(tl.int32) - 1  # places before the new one
    first = tl.maximum(behind + 1 - window, 0)
    base = (row * places * HEADS + head) * WIDTH
    for start in range(first, behind, BLOCK):
        place = start + tl.arange(0, BLOCK)
        there = place < behind
        spot = base + place[:, None].to(tl.int64) * (HEADS * WIDTH) + wide[None]
        k_P_D = tl.load(keys + spot, mask=there[:, None], other=0.0)
        score_S_P = tl.dot(q_S_D, tl.trans(k_P_D)) * scale
        score_S_P = tl.where(there[None], score_S_P, float("-inf"))
        top_S = tl.maximum(best_S, tl.max(score_S_P, 1))
        share_S_P = tl.exp(score_S_P - top_S[:, None])
        fade_S = tl.exp(best_S - top_S)
        v_P_D = tl.load(values + spot, mask=there[:, None], other=0.0)
        out_S_D = out_S_D * fade_S[:, None] + tl.dot(share_S_P.to(v_P_D.dtype), v_P_D)
        sum_S = sum_S * fade_S + tl.sum(share_S_P, 1)
        best_S = top_S
    found_S_D = (out_S_D / sum_S[:, None]).to(out.dtype.element_ty)
    target = out + (row * HEADS * SHARED + mine[:, None]) * WIDTH + wide[None]
    tl.store(target, found_S_D, mask=real[:, None])


def fits(q_N_H_D: Any, k_N_H_D: Any) -> bool:
    """Whether the kernel is written for heads like these."""
    width, shared = q_N_H_D.shape[2], q_N_H_D.shape[1] // k_N_H_D.shape[1]
    return width in (16, 32, 64, 128, 256) and shared <= 16


def attend(
    q: Any, k: Any, v: Any, cache: Any, at_N: Any, used: Any, scale: Any, window: Any
) -> Any:
    """`cache`: keys and values of one layer. Queries, keys and values: rows, heads, width."""
    q, k, v = (t if t.stride(2) == 1 else t.contiguous() for t in (q, k, v))
    rows, queries, width = q.shape
    heads, places = k.shape[1], cache.shape[2]
    out = torch.empty(rows, queries, width, dtype=q.dtype, device=q.device)
    kernel: Any = one_token
    kernel[(rows, heads)](
        q, k, v, cache[0], cache[1], at_N, used, out,
        scale if scale is not None else width**-0.5, window or places,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), places,
        SHARED=queries // heads, HEADS=heads, WIDTH=width, BLOCK=BLOCK,
    )  # fmt: skip
    return out
