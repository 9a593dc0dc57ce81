"""The one matrix product of the CPU ops, and sums in a written order.

A CPU library picks another routine for few rows, so a row's bits would depend on its batch. Here
every product runs in zero-padded blocks of exactly 16 rows. Source: runtime specification, 6.1.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

__all__ = ["ROW_BLOCK", "bmm_rows", "matmul_rows", "sigmoid", "sum_in_order"]

ROW_BLOCK: Final = 16


def matmul_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [T, K] by weight [N, K] transposed, both fp32; returns [T, N] fp32.

    A row's bits do not depend on the other rows.
    """
    num_rows = x.shape[0]
    if num_rows == ROW_BLOCK:
        return x @ weight.T
    pad = -num_rows % ROW_BLOCK
    if pad:
        x = torch.constant_pad_nd(x, (0, 0, 0, pad))
    if num_rows < ROW_BLOCK:
        return (x @ weight.T)[:num_rows]
    transposed = weight.T
    out = x.new_empty(num_rows + pad, weight.shape[0])
    for start in range(0, num_rows, ROW_BLOCK):
        rows = slice(start, start + ROW_BLOCK)
        torch.mm(x[rows], transposed, out=out[rows])
    return out[:num_rows]


def bmm_rows(x: Tensor, y: Tensor) -> Tensor:
    """Multiply x [T, H, K] by y [T, K, N], both fp32, row by row; returns [T, H, N] fp32.

    A single row is computed twice where H is no multiple of 4: alone, the library divides its heads
    among threads, and 5, 6, 7 or 10 of them then have other bits than among other rows.
    """
    if x.shape[0] == 1 and x.shape[1] % 4:
        return torch.bmm(x.expand(2, -1, -1), y.expand(2, -1, -1))[:1]
    return torch.bmm(x, y)


def sum_in_order(x: Tensor, dim: int) -> Tensor:
    """Sum over a short dimension from left to right, whatever the shape around it."""
    parts = x.unbind(dim)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)): unlike the library's, independent of an element's place in memory."""
    return 1.0 / (1.0 + torch.exp(-x))
