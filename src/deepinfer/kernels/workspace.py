"""Kept buffers for the CPU's products: making and slicing small tensors costs more than filling
them.

A product runs in blocks of 16 rows (`rows.py`). Rows beyond those that count may hold anything: a
row of a product does not depend on the others.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.kernels.rows import ROW_BLOCK

__all__ = ["FloatArray", "Rows", "as_array", "as_tensor", "kept_rows", "multiply"]

FloatArray = NDArray[np.float32]


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
