"""Dense products of packed e4m3 weights on SM90a: the schedules of `dense.cu`, and their calls."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from deepinfer.kernels import nvcc
from deepinfer.kernels.packed import Packed

__all__ = ["SCHEDULES", "SOURCE", "multiply", "share_of"]

SOURCE: Final = Path(__file__).with_name("dense.cu")

SCHEDULES: Final = {
    "few_128": (32, 128),
    "few_192": (32, 192),
    "some_128": (64, 128),
    "some_192": (64, 192),
    "step_128": (128, 128),
    "step_192": (128, 192),
    "step_256": (128, 256),
    "wide_128": (192, 128),
    "wide_192": (192, 192),
    "wide_256": (192, 256),
}
"""Most tokens and outputs of a tile."""


def share_of(rows: int, most: int) -> int:
    """Return the tokens of a tile: equal parts, a multiple of 8."""
    parts = -(-rows // most)
    return -(-rows // (8 * parts)) * 8


def multiply(
    x: Tensor,
    weight: Packed,
    groups: int = 1,
    *,
    out: Tensor | None = None,
    name: str,
    split: int,
) -> Tensor:
    """Multiply all rows by an e4m3 matrix, each group of its outputs by its own inputs.

    x        [T, G, K] bf16, contiguous
    split    blocks that share one tile's K
    returns  [T, outputs] bf16, accumulated in fp32, rounded once
    """
    rows = x.shape[0]
    if out is None:
        out = torch.empty(rows, weight.outputs, dtype=torch.bfloat16, device=x.device)
    nvcc.call(
        nvcc.load(SOURCE), name, x.device,
        x, weight.data, weight.row_scale, out,
        groups, weight.outputs // groups, weight.inputs, x.stride(0) * x.element_size(),
        rows, share_of(rows, SCHEDULES[name][0]), weight.outputs,
        nvcc.processors(x.device), split,
    )  # fmt: skip
    return out
