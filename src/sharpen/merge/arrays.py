"""Numbers as files hold them and as methods compute with them.

Methods compute in float32 (float64 for float64 models) and round to the working dtype where
mergekit does. On the CPU an array is numpy's, so that a merge need not import torch; on a GPU it is
torch's. What is written here, and every method, keeps to what the two have in common.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from sharpen.types import SharpenError

Array = Any  # np.ndarray or torch.Tensor
DTYPES = {  # dtype → its code in safetensors files, and what numpy holds it in
    "float64": ("F64", "f8"),
    "float32": ("F32", "f4"),
    "float16": ("F16", "f2"),
    "bfloat16": ("BF16", "u2"),
    "float8_e4m3fn": ("F8_E4M3", "u1"),
    "float8_e5m2": ("F8_E5M2", "u1"),
    "int64": ("I64", "i8"),
    "int32": ("I32", "i4"),
    "int16": ("I16", "i2"),
    "int8": ("I8", "i1"),
    "uint8": ("U8", "u1"),
    "bool": ("BOOL", "?"),
}
WORKING = ("bfloat16", "float16", "float32", "float64")  # what can be computed in
NARROW = {"bfloat16": (16, 0), "float16": (13, 0x38800000)}  # digits fewer than float32's; least
EXPONENT = 0x7F800000


class NotFinite(SharpenError):
    """A merged value is not a number, or beyond the range of its dtype."""


def wide(dtype: str) -> str:
    """What a dtype is computed in."""
    return "float64" if dtype == "float64" else "float32"


def eight_bit_floats(dtype: str) -> np.ndarray:
    """The 256 values of a dtype: its bits, moved to where a wider dtype has them."""
    codes = np.arange(256, dtype=np.uint32)
    if dtype == "float8_e5m2":
        return (codes << 8).astype(np.uint16).view(np.float16).astype(np.float32)
    values = ((codes & 0x80) << 24 | (codes & 0x7F) << 20).view(np.float32) * np.float32(2.0**120)
    values[[0x7F, 0xFF]] = np.nan
    return values


def decode(raw: np.ndarray, dtype: str) -> np.ndarray:
    """What a file holds → float32 or float64; integers stay."""
    if dtype == "bfloat16":
        values = raw.astype(np.uint32)
        values <<= 16
        return values.view(np.float32)
    if dtype.startswith("float8"):
        return eight_bit_floats(dtype)[raw]
    return raw.astype(wide(dtype) if "float" in dtype else raw.dtype, copy=False)


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """The other way; `values` may be changed. What `dtype` cannot hold is an error."""
    if dtype == "bfloat16":
        values = rounded(values.astype(np.float32, copy=False), dtype)
    else:
        values = values.astype(DTYPES[dtype][1], copy=False)
    if "float" in dtype and not np.isfinite(values).all():
        raise NotFinite("a value is not a number, or infinite")
    if dtype != "bfloat16":
        return values
    found = values.view(np.uint32)
    found >>= 16
    return found.astype(np.uint16)


def module(values: Array) -> Any:
    """numpy or torch."""
    return np if isinstance(values, np.ndarray) else sys.modules["torch"]


def cast(values: Array, dtype: str) -> Array:
    if isinstance(values, np.ndarray):
        return values.astype(dtype, copy=False)
    return values.to(getattr(module(values), dtype))


def like(values: Array, array: np.ndarray) -> Array:
    """`array` where `values` are."""
    if isinstance(values, np.ndarray):
        return array
    return module(values).from_numpy(array).to(values.device)


def on_host(values: Array) -> np.ndarray:
    return values if isinstance(values, np.ndarray) else values.cpu().numpy()


def bits(values: Array) -> Array:
    """The integers that floats are made of, as a view."""
    return values.view(getattr(module(values), f"int{8 * values.itemsize}"))


def rounded(values: Array, dtype: str) -> Array:
    """To the nearest number of `dtype`, the even one of two; in place. With a number added that is
    so large that the sum has just the digits wanted, the others are lost (from 2^112 on all are,
    and end as an error)."""
    if dtype in NARROW:
        digits, least = NARROW[dtype]
        powers = bits(values) & EXPONENT
        large = (powers.clip(least) if least else powers).view(values.dtype)
        large *= 1.5 * 2**digits
        values += large
        values -= large
    return values
