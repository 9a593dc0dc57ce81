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
    "few_64": (32, 64, 3),
    "few_128": (32, 128, 2),
    "few_192": (32, 192, 1),
    "some_128": (64, 128, 2),
    "half_128": (96, 128, 2),
    "step_128": (128, 128, 1),
    "step_192": (128, 192, 1),
    "step_256": (128, 256, 1),
    "wide_128": (192, 128, 1),
    "wide_192": (192, 192, 1),
    "wide_256": (192, 256, 1),
}
"""Most tokens and outputs of a tile, blocks of a multiprocessor."""


def share_of(rows: int, name: str) -> int:
    """Return the tokens of a schedule's tile: equal parts, a multiple of 8."""
    most = SCHEDULES[name][0]
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
        rows, share_of(rows, name), weight.outputs,
        nvcc.processors(x.device) * SCHEDULES[name][2], split,
    )  # fmt: skip
    return out
