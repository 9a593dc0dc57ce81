"""Expert products in Triton: one tile of one expert's rows per program, weights decoded there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.tiles import (
    act8_round_trip,
    ceil_div,
    dot,
    e2m1_value,
    launch,
    narrow,
    next_power,
    runs_on_bf16,
    ue8m0_value,
)

if TYPE_CHECKING:
    from deepinfer.kernels.expert_linear import Fp4Weight

_ROWS, _OUTPUTS, _INPUTS = 16, 64, 64


@triton.jit
def _experts(
    x, codes, scale, offsets, out, E, N, K, x_row,
    QUANTIZE: tl.constexpr, BF16: tl.constexpr,
    BE: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Tile program_id(1) of all experts' tiles of BT rows, in order; those behind do nothing."""
    every = tl.arange(0, BE)
    begins = tl.load(offsets + every, every < E, 0)
    ends = tl.load(offsets + every + 1, every < E, 0)
    tiles = (ends - begins + BT - 1) // BT
    last = tl.cumsum(tiles, 0)
    tile = tl.program_id(1)
    expert = tl.sum(((last <= tile) & (every < E)).to(tl.int64), 0)
    if expert >= E:
        return
    mine = every == expert
    end = tl.sum(tl.where(mine, ends, 0), 0)
    inside = tile - tl.sum(tl.where(mine, last - tiles, 0), 0)
    row = tl.sum(tl.where(mine, begins, 0), 0) + inside * BT + tl.arange(0, BT)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    weight_row = expert * N + column
    acc = tl.zeros((BT, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        held = (row < end)[:, None] & (k < K)[None, :]
        values = tl.load(x + row[:, None] * x_row + k[None, :], held, 0.0).to(tl.float32)
        if QUANTIZE:
            values = act8_round_trip(values, BT, BK)
        pair = start // 2 + tl.arange(0, BK // 2)
        held = (column < N)[:, None] & (pair < K // 2)[None, :]
        at = codes + weight_row[:, None] * (K // 2) + pair[None, :]
        both = tl.load(at, held, 0).to(tl.int32)
        part = start // 32 + tl.arange(0, BK // 32)
        held = (column < N)[:, None] & (part < K // 32)[None, :]
        at = scale + weight_row[:, None] * (K // 32) + part[None, :]
        factor = ue8m0_value(tl.load(at, held, 127))
        weights = tl.join(e2m1_value(both & 15), e2m1_value(both >> 4))
        weights = tl.reshape(weights, (BN, BK // 32, 32)) * factor[:, :, None]
        acc = dot(values, tl.trans(tl.reshape(weights, (BN, BK))), acc, BF16)
    at = out + row[:, None] * N + column[None, :]
    tl.store(at, narrow(acc, out.dtype.element_ty), (row < end)[:, None] & (column < N)[None, :])


def expert_linear(
    x: Tensor, weight: Fp4Weight, offsets: Sequence[int] | Tensor, quantize_input: bool
) -> Tensor:
    """As the reference. Which tiles there are is found on the device, from the offsets."""
    experts, outputs = weight.codes.shape[:2]
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(x.shape[0], outputs, dtype=x.dtype, device=x.device)
    if not isinstance(offsets, Tensor):
        offsets = torch.tensor(offsets, dtype=torch.int64).to(x.device, non_blocking=True)
    most = ceil_div(x.shape[0], _ROWS) + min(experts, x.shape[0])
    launch(
        _experts, (ceil_div(outputs, _OUTPUTS), most),
        x, weight.codes, weight.scale, offsets, out, experts, outputs, x.shape[1], x.stride(0),
        QUANTIZE=quantize_input, BF16=runs_on_bf16(x.dtype),
        BE=next_power(experts), BT=_ROWS, BN=_OUTPUTS, BK=_INPUTS,
    )  # fmt: skip
    return out


@triton.jit
def _swiglu(
    gate, up, weight, out, dim, gate_row, up_row, limit,
    WEIGHTED: tl.constexpr, CLAMPED: tl.constexpr, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = column < dim
    g = tl.load(gate + row * gate_row + column, held, 0.0).to(tl.float32)
    u = tl.load(up + row * up_row + column, held, 0.0).to(tl.float32)
    if CLAMPED:
        g = tl.where(g > limit, limit, g)
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    hidden = tl.div_rn(g, 1.0 + tl.exp(-g)) * u
    if WEIGHTED:
        hidden = tl.load(weight + row) * hidden
    if QUANTIZE:
        hidden = narrow(hidden, out.dtype.element_ty).to(tl.float32)
        hidden = tl.reshape(act8_round_trip(tl.reshape(hidden, (1, BLOCK)), 1, BLOCK), (BLOCK,))
    tl.store(out + row * dim + column, narrow(hidden, out.dtype.element_ty), held)


def swiglu(
    gate: Tensor, up: Tensor, limit: float, weight: Tensor | None, quantize: bool = False
) -> Tensor:
    """As the reference."""
    gate, up = (t if t.stride(1) == 1 else t.contiguous() for t in (gate, up))
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    num_rows, dim = gate.shape
    block = min(1024, next_power(dim, 32))
    launch(
        _swiglu, (ceil_div(dim, block), num_rows), gate, up,
        gate if weight is None else weight.contiguous(), out, dim, gate.stride(0), up.stride(0),
        float(limit), WEIGHTED=weight is not None, CLAMPED=limit > 0, QUANTIZE=quantize,
        BLOCK=block,
    )  # fmt: skip
    return out
