"""Dense products of packed e4m3 weights on SM90a: the schedules of `dense.cu`, and their calls."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from deepinfer.kernels import nvcc
from deepinfer.kernels.packed import Packed

__all__ = ["SCHEDULES", "SOURCE", "multiply", "schedule_of", "share_of", "split_of"]

SOURCE: Final = Path(__file__).with_name("dense.cu")

SCHEDULES: Final = {
    "few_64": (32, 64, 3),
    "few_128": (32, 128, 2),
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

_HELD: Final = {
    1: (132, 66, 39, 30, 22, 17, 15, 15),
    2: (264, 132, 79, 62, 47, 39, 32, 30),
}
"""Blocks of a multiprocessor -> how many clusters of 1..8 blocks an H200 holds at once.

Not asked of the card: which blocks share a sum decides its bits, on all cards alike.
"""


@cache
def split_of(outputs: int, groups: int, inputs: int) -> int:
    """Return how many blocks share the K of a matrix's tiles, whatever the number of rows."""
    names = ("wide_128", "wide_192")
    each = [
        (_cycles(name, outputs, groups, inputs, 192, split), split)
        for name in names
        for split in range(1, 9)
        if inputs // 128 >= 2 * split
    ]
    return min(each)[1]


@cache
def schedule_of(outputs: int, groups: int, inputs: int, rows: int) -> str:
    """Return the schedule for a number of rows."""
    split = split_of(outputs, groups, inputs)
    if rows <= 32:
        names: tuple[str, ...] = ("few_128",)
    elif rows <= 64:
        names = ("some_128",)
    elif rows <= 96:
        names = ("half_128",)
    elif rows <= 128:
        names = ("step_128", "step_192")
    else:
        names = ("wide_128", "wide_192")
    return min(names, key=lambda name: _cycles(name, outputs, groups, inputs, rows, split))


def _cycles(name: str, outputs: int, groups: int, inputs: int, rows: int, split: int) -> float:
    """Estimate a product's time: rounds of tiles, each with its start and end."""
    most, height, resident = SCHEDULES[name]
    tiles = groups * -(-outputs // height) * -(-rows // most)
    rounds = -(-tiles // _HELD[resident][split - 1])
    product = inputs / split / 16 * height / 64 * max(32, share_of(rows, name) / 2)
    around = 2000 + 20 * share_of(rows, name) * (split > 1)
    return rounds * (product * resident + around)


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
    name: str = "",
    split: int = 0,
) -> Tensor:
    """Multiply all rows by an e4m3 matrix, each group of its outputs by its own inputs.

    x        [T, G, K] bf16, contiguous
    name     the schedule, by default chosen by the number of rows
    split    blocks that share one tile's K, by default chosen by the matrix: bits depend on it
    returns  [T, outputs] bf16, accumulated in fp32, rounded once
    """
    rows = x.shape[0]
    size = (weight.outputs // groups, groups, weight.inputs)
    name, split = name or schedule_of(*size, rows), split or split_of(*size)
    if out is None:
        out = torch.empty(rows, weight.outputs, dtype=torch.bfloat16, device=x.device)
    nvcc.call(
        nvcc.load(SOURCE), name, x.device,
        x, weight.data, weight.row_scale, out,
        groups, size[0], weight.inputs, x.stride(0) * x.element_size(),
        rows, share_of(rows, name), weight.outputs,
        nvcc.processors(x.device) * SCHEDULES[name][2], split,
    )  # fmt: skip
    return out
