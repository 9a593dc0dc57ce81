"""Kept buffers for the CPU's products: making and slicing small tensors costs more than filling
them.

A product runs in blocks of 16 rows (`rows.py`). Rows beyond those that count may hold anything: a
row of a product does not depend on the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.kernels.rows import ROW_BLOCK

__all__ = [
    "FloatArray",
    "Pair",
    "Rows",
    "as_array",
    "as_tensor",
    "kept_rows",
    "largest",
    "multiply",
    "shared",
    "total",
]

FloatArray = NDArray[np.float32]
HalfArray = NDArray[np.uint16]

total: Final[Callable[..., FloatArray]] = np.add.reduce
largest: Final[Callable[..., NDArray[Any]]] = np.maximum.reduce
"""Of (x, axis, None, out, keepdims): arguments by place cost less than by name."""


class Rows:
    """The first rows of a [16, K] fp32 buffer, as tensor and as array over the same memory.

    They hold until the same thread asks for as many rows of the same width and purpose again.
    """

    __slots__ = ("array", "block", "tensor")

    def __init__(self, num_rows: int, width: int) -> None:
        with torch.inference_mode(False):
            self.block = torch.zeros(ROW_BLOCK, width)
            self.tensor = self.block[:num_rows]
            self.array: FloatArray = self.tensor.numpy()


class _Kept(threading.local):
    def __init__(self) -> None:
        self.rows: dict[tuple[int, int, str], Rows] = {}


_KEPT = _Kept()


def kept_rows(num_rows: int, width: int, purpose: str = "in") -> Rows:
    """Return this thread's buffer for up to 16 rows of a width."""
    key = (num_rows, width, purpose)
    kept = _KEPT.rows
    found = kept.get(key)
    if found is None:
        found = kept[key] = Rows(num_rows, width)
    return found


def shared(num_rows: int, width: int, padded: bool = True) -> tuple[Tensor, Tensor, FloatArray]:
    """Return fp32 zeros as a block of 16 rows (or without padding of as many as count), and the
    rows that count as tensor and as array over the same memory.
    """
    with torch.inference_mode(False):
        block = torch.zeros(ROW_BLOCK if padded else num_rows, width)
        tensor = block[:num_rows]
        return block, tensor, tensor.numpy()


class Pair:
    """Rows of fp32 values, in the 16-row block of a product, and the same rounded to bf16.

    tensor, array  [T, K] fp32, the first rows of `block` unless not `padded`
    half, bits     [T, K] bf16, and as uint16
    """

    __slots__ = ("array", "bits", "block", "half", "tensor")

    def __init__(self, num_rows: int, width: int, padded: bool = True) -> None:
        self.block, self.tensor, self.array = shared(num_rows, width, padded)
        with torch.inference_mode(False):
            self.half = torch.zeros(num_rows, width, dtype=torch.bfloat16)
            self.bits: HalfArray = self.half.view(torch.int16).numpy().view(np.uint16)

    def round(self) -> None:
        """Bring the fp32 values to the bf16 grid and to `half`."""
        self.half.copy_(self.tensor)
        self.tensor.copy_(self.half)


def multiply(x: Rows, weight: Tensor) -> Rows:
    """Multiply by weight [N, K] fp32 transposed; the bits of `rows.matmul_rows`."""
    out = kept_rows(x.array.shape[0], weight.shape[0], "out")
    torch.mm(x.block, weight.T, out=out.block)
    return out


def as_array(x: Tensor) -> FloatArray:
    """Return fp32 values; the tensor's own memory if they are fp32 already: not to be written."""
    return x.float().numpy()


def as_tensor(values: FloatArray, dtype: torch.dtype) -> Tensor:
    """Return values as a type; fp32 keeps their memory."""
    return torch.from_numpy(values).to(dtype)
