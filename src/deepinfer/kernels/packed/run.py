"""Products of packed weights on SM90a: the schedules of `sm90.cu`, and which one a call takes."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from deepinfer.kernels import nvcc
from deepinfer.kernels.packed import Decoded, Packed

__all__ = ["SOURCE", "dense", "fixed_split", "launches", "multiply"]

SOURCE: Final = Path(__file__).with_name("sm90.cu")

_SCHEDULES: Final = {
    Decoded.FP4_E4M3: ((30, "fp8_32"), (80, "fp8_64"), (None, "fp8_128")),
    Decoded.FP4_BF16: ((30, "exact_32"), (80, "exact_64"), (None, "exact_144")),
}
"""Schedules by the most rows that an expert has on average."""


_DENSE: Final = {
    "dense_32": (32, 32, 128, 2),
    "dense_96": (1024, 96, 256, 1),
    "dense_128": (1 << 62, 128, 256, 1),
}
"""Dense schedules: most rows, rows and outputs of a tile, programs of a multiprocessor."""


_ALL: Final = (1 << 31) - 1


def launches(decoded: Decoded, rows: int, experts: int) -> list[tuple[str, int, int]]:
    """Return what to launch for at most `rows` rows: schedules, each with its range of row counts.

    How many rows there really are stands on the device alone; every launch but one finds its range
    missed there and ends. Bits do not depend on the schedule.
    """
    found = []
    least = 0
    for limit, name in _SCHEDULES[decoded]:
        most = _ALL if limit is None else limit * experts + 1
        found.append((name, least, most))
        if rows < most:
            break
        least = most
    return found


@cache
def _programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def multiply(
    x: Tensor,
    weight: Packed,
    offsets: Tensor,
    *,
    token_scale: Tensor | None = None,
    source: Tensor | None = None,
    out: Tensor | None = None,
    name: str = "",
) -> Tensor:
    """Multiply rows sorted by expert by their expert's matrix; returns [R, N] bf16.

    x            [R, K] bf16, or e4m3 codes where the weights decode to e4m3
    offsets      [E+1] int64 on the device: rows offsets[e]..offsets[e+1]-1 belong to expert e
    token_scale  one fp32 per row of x, of e4m3 codes
    source       [R] int64: row r of the result is of row source[r] of x
    name         the schedule, by default those that the number of rows allows
    """
    rows = x.shape[0] if source is None else source.shape[0]
    if out is None:
        out = torch.empty(rows, weight.outputs, dtype=torch.bfloat16, device=x.device)
    chosen = [(name, 0, _ALL)] if name else launches(weight.decoded, rows, weight.experts)
    for schedule, least, most in chosen:
        nvcc.call(
            nvcc.load(SOURCE), schedule, x.device,
            x, token_scale, source, weight.data, weight.row_scale, offsets, out,
            weight.experts, weight.outputs, weight.inputs, x.stride(0) * x.element_size(),
            0, 0, weight.outputs, least, most, _programs(x.device), 1,
        )  # fmt: skip
    return out


def dense(
    x: Tensor,
    weight: Packed,
    groups: int = 1,
    *,
    out: Tensor | None = None,
    name: str = "",
    split: int = 0,
) -> Tensor:
    """Multiply all rows by an e4m3 matrix, each group of its outputs by its own inputs.

    x        [T, G, K] bf16, the last dimension contiguous
    split    programs that share one tile's K, by default chosen for the size
    returns  [T, outputs] bf16, accumulated in fp32, rounded once
    """
    rows = x.shape[0]
    if out is None:
        out = torch.empty(rows, weight.outputs, dtype=torch.bfloat16, device=x.device)
    chosen = name or next(n for n, (most, *_) in _DENSE.items() if rows <= most)
    most, tokens, height, resident = _DENSE[chosen]
    tiles = weight.outputs // height * -(-rows // tokens)
    slots = resident * _programs(x.device)
    if not split:
        split = _split(tiles, weight.inputs // 64, _held(chosen, x.device)) if most <= 1024 else 1
    blocks = tiles * split if split > 1 else min(tiles, slots)
    nvcc.call(
        nvcc.load(SOURCE), chosen, x.device,
        x, None, None, weight.data, weight.row_scale, None, out,
        groups, weight.outputs // groups, weight.inputs, x.stride(0) * x.element_size(),
        rows, x.stride(1) * x.element_size(), weight.outputs, 0, 0, blocks, split,
    )  # fmt: skip
    return out


def fixed_split(weight: Packed, device: torch.device) -> int:
    """Return how many programs share a tile's K whatever the number of rows: the best for few.

    Schedules add in the same order where the split is the same, so rows have the same bits then.
    """
    _, _, height, _ = _DENSE["dense_32"]
    return _split(weight.outputs // height, weight.inputs // 64, _held("dense_32", device))


@cache
def _held(name: str, device: torch.device) -> tuple[int, ...]:
    """How many clusters of 1..8 programs of a schedule the device runs at once."""
    with torch.cuda.device(device):
        function = nvcc.load(SOURCE)[f"{name}_held"]
        return tuple(function(ctypes.c_longlong(size)) for size in range(1, 9))


def _split(tiles: int, blocks: int, held: tuple[int, ...]) -> int:
    """Return how many programs share a tile's K: few full rounds, at least 5 blocks each."""

    def cost(split: int) -> float:
        return -(-tiles // max(1, held[split - 1])) / split + 0.01 * split

    return min((s for s in range(1, 9) if s == 1 or blocks // s >= 5), key=cost)
