"""Matrix products in Triton: stored weights are decoded tile by tile, on the way to the product.

A row's bits do not depend on its batch: tiles and the order of the sum are fixed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.tiles import (
    act8_round_trip,
    ceil_div,
    dot,
    e4m3_value,
    launch,
    narrow,
    runs_on_bf16,
    ue8m0_value,
)

if TYPE_CHECKING:
    from deepinfer.kernels.linear import DenseWeight, Fp8Weight

_ROWS, _OUTPUTS, _INPUTS = 16, 64, 64


@triton.jit
def _fp8(
    x, codes, scale, out, T, N, K, x_row, x_group, out_row,
    QUANTIZE: tl.constexpr, BF16: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile [BT, BN] of group program_id(2); N outputs and K inputs per group."""
    group = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1).to(tl.int64) * BT + tl.arange(0, BT)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    weight_row = group * N + column
    acc = tl.zeros((BT, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        at = x + row[:, None] * x_row + group * x_group + k[None, :]
        values = tl.load(at, (row < T)[:, None] & (k < K)[None, :], 0.0).to(tl.float32)
        if QUANTIZE:
            values = act8_round_trip(values, BT, BK)
        held = (column < N)[:, None] & (k < K)[None, :]
        code = tl.load(codes + weight_row[:, None] * K + k[None, :], held, 0)
        part = start // 32 + tl.arange(0, BK // 32)
        held_part = (column < N)[:, None] & (part < K // 32)[None, :]
        at_scale = scale + (weight_row // 32)[:, None] * (K // 32) + part[None, :]
        factor = ue8m0_value(tl.load(at_scale, held_part, 127))
        weights = tl.reshape(e4m3_value(code), (BN, BK // 32, 32)) * factor[:, :, None]
        acc = dot(values, tl.trans(tl.reshape(weights, (BN, BK))), acc, BF16)
    at = out + row[:, None] * out_row + group * N + column[None, :]
    tl.store(at, narrow(acc, out.dtype.element_ty), (row < T)[:, None] & (column < N)[None, :])


def _launch_fp8(x: Tensor, weight: Fp8Weight, quantize: bool, groups: int) -> Tensor:
    """x [T, G, K]."""
    num_rows, outputs, inputs = x.shape[0], weight.codes.shape[0] // groups, x.shape[2]
    x = x if x.stride(2) == 1 else x.contiguous()
    out = torch.empty(num_rows, groups * outputs, dtype=x.dtype, device=x.device)
    launch(
        _fp8, (ceil_div(outputs, _OUTPUTS), ceil_div(num_rows, _ROWS), groups),
        x, weight.codes.view(torch.uint8), weight.scale, out, num_rows, outputs, inputs,
        x.stride(0), x.stride(1), groups * outputs,
        QUANTIZE=quantize, BF16=runs_on_bf16(x.dtype), BT=_ROWS, BN=_OUTPUTS, BK=_INPUTS,
    )  # fmt: skip
    return out


def fp8_linear(x: Tensor, weight: Fp8Weight, quantize_input: bool) -> Tensor:
    """As the reference."""
    return _launch_fp8(x.unsqueeze(1), weight, quantize_input, 1)


def grouped_linear(x: Tensor, weight: Fp8Weight, quantize_input: bool) -> Tensor:
    """As the reference."""
    return _launch_fp8(x, weight, quantize_input, x.shape[1])


@triton.jit
def _dense(
    x, weight, out, T, N, K, x_row,
    BF16: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * BT + tl.arange(0, BT)
    column = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    acc = tl.zeros((BT, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        held = (row < T)[:, None] & (k < K)[None, :]
        values = tl.load(x + row[:, None] * x_row + k[None, :], held, 0.0).to(tl.float32)
        held = (column < N)[:, None] & (k < K)[None, :]
        weights = tl.load(weight + column[:, None] * K + k[None, :], held, 0.0).to(tl.float32)
        acc = dot(values, tl.trans(weights), acc, BF16)
    at = out + row[:, None] * N + column[None, :]
    tl.store(at, narrow(acc, out.dtype.element_ty), (row < T)[:, None] & (column < N)[None, :])


def dense_linear(x: Tensor, weight: DenseWeight, out: torch.dtype) -> Tensor:
    """As the reference."""
    stored = weight.stored.contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, outputs = x.shape[0], stored.shape[0]
    result = torch.empty(num_rows, outputs, dtype=out, device=x.device)
    launch(
        _dense, (ceil_div(outputs, _OUTPUTS), ceil_div(num_rows, _ROWS)),
        x, stored, result, num_rows, outputs, x.shape[1], x.stride(0),
        BF16=runs_on_bf16(x.dtype) and runs_on_bf16(stored.dtype),
        BT=_ROWS, BN=_OUTPUTS, BK=_INPUTS,
    )  # fmt: skip
    return result
