"""Products of packed weights on SM90a: the schedules of `sm90.cu`, and which one a call takes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels import nvcc
from deepinfer.kernels.packed import Decoded, Packed
from deepinfer.kernels.tiles import (
    act8_round_trip,
    act8_scale,
    e4m3_code,
    e4m3_round,
    launch,
    next_power,
    pow2_inverse,
)

__all__ = ["SOURCE", "dense", "fold_tokens", "multiply", "schedule"]

SOURCE: Final = Path(__file__).with_name("sm90.cu")

_SCHEDULES: Final = {
    Decoded.FP4_E4M3: ((24, "fp8_32"), (80, "fp8_64"), (None, "fp8_128")),
    Decoded.FP4_BF16: ((24, "exact_32"), (80, "exact_64"), (None, "exact_128")),
}


_DENSE: Final = (("dense_32", 32, 128), ("dense_96", 1024, 256), ("dense_128", 1 << 62, 256))
"""Dense schedules: name, most rows, outputs of a tile."""
_TOKENS: Final = {"dense_32": 32, "dense_96": 96, "dense_128": 128}
_PER_SM: Final = {"dense_32": 2, "dense_96": 1, "dense_128": 1}


def schedule(decoded: Decoded, rows: int, experts: int) -> str:
    """Return the launcher for a number of rows, by their mean per expert.

    Bits do not depend on it, except between e4m3 schedules with and without promotion.
    """
    for limit, name in _SCHEDULES[decoded]:
        if limit is None or rows <= limit * experts:
            return name
    raise AssertionError


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
    offsets      [E+1] int32 on the device: rows offsets[e]..offsets[e+1]-1 belong to expert e
    token_scale  [R] fp32, of e4m3 codes
    source       [R] int32: take row source[r] of x for row r, and of token_scale row r
    name         the schedule, by default chosen by the number of rows
    """
    rows = x.shape[0] if source is None else source.shape[0]
    if out is None:
        out = torch.empty(rows, weight.outputs, dtype=torch.bfloat16, device=x.device)
    nvcc.call(
        nvcc.load(SOURCE), name or schedule(weight.decoded, rows, weight.experts), x.device,
        x, token_scale, source, weight.data, weight.row_scale, offsets, out,
        weight.experts, weight.outputs, weight.inputs, x.stride(0) * x.element_size(),
        0, 0, weight.outputs, _programs(x.device), 1,
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
    chosen, tokens, height = next(s for s in _DENSE if s[0] == name or (not name and rows <= s[1]))
    tiles = weight.outputs // height * -(-rows // min(tokens, _TOKENS[chosen]))
    programs = _programs(x.device)
    if not split:
        split = (
            1 if tokens > 1024 else _split(tiles, weight.inputs // 64, _PER_SM[chosen] * programs)
        )
    blocks = tiles * split if split > 1 else min(tiles, _PER_SM[chosen] * programs)
    nvcc.call(
        nvcc.load(SOURCE), chosen, x.device,
        x, None, None, weight.data, weight.row_scale, None, out,
        groups, weight.outputs // groups, weight.inputs, x.stride(0) * x.element_size(),
        rows, x.stride(1) * x.element_size(), weight.outputs, blocks, split,
    )  # fmt: skip
    return out


def _split(tiles: int, blocks: int, slots: int) -> int:
    """Return how many programs share a tile's K: as many as fit, of at least 5 blocks each."""
    return max(1, min(8, slots // tiles, blocks // 5))


@triton.jit
def _fold(x, codes, scale, K, x_row, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    values = tl.load(x + row * x_row + k, k < K, 0.0).to(tl.float32)
    if QUANTIZE:
        values = tl.reshape(act8_round_trip(tl.reshape(values, (1, BLOCK)), 1, BLOCK), (BLOCK,))
    factor = act8_scale(tl.max(tl.abs(values), 0))
    rounded = e4m3_round(values * pow2_inverse(factor))
    tl.store(codes + row * K + k, e4m3_code(rounded).to(tl.uint8), k < K)
    tl.store(scale + row, factor)


def fold_tokens(x: Tensor, quantize: bool) -> tuple[Tensor, Tensor]:
    """Return e4m3 codes [R, K] (uint8) and one power of two per row [R] fp32 of x [R, K].

    quantize  round with ACT8 first. Its groups' powers of two are folded into the codes: values
              below 2^-14 of the row's largest keep fewer bits, all others are ACT8's.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, inputs = x.shape
    codes = torch.empty(rows, inputs, dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    launch(
        _fold, (rows,), x, codes, scale, inputs, x.stride(0),
        QUANTIZE=quantize, BLOCK=next_power(inputs, 32),
    )  # fmt: skip
    return codes, scale
