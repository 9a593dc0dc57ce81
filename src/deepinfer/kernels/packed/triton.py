"""Tokens of packed products: folded into e4m3 codes, gated between the two of an expert."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.tiles import (
    act8_round_trip,
    act8_scale,
    e4m3_code,
    e4m3_round,
    launch,
    narrow,
    next_power,
    pow2_inverse,
)

__all__ = ["fold_tokens", "gate_tokens"]


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


@triton.jit
def _gate(
    gate_up, weight, out, scale, offsets, E, K, limit,
    WEIGHTED: tl.constexpr, CLAMPED: tl.constexpr, QUANTIZE: tl.constexpr, FOLD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(offsets + E):
        k = tl.arange(0, BLOCK)
        g = tl.load(gate_up + row * 2 * K + k, k < K, 0.0).to(tl.float32)
        u = tl.load(gate_up + row * 2 * K + K + k, k < K, 0.0).to(tl.float32)
        if CLAMPED:
            g = tl.where(g > limit, limit, g)
            u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
        hidden = tl.div_rn(g, 1.0 + tl.exp(-g)) * u
        if WEIGHTED:
            hidden = tl.load(weight + row) * hidden
        hidden = narrow(hidden, tl.bfloat16).to(tl.float32)
        if QUANTIZE:
            hidden = tl.reshape(act8_round_trip(tl.reshape(hidden, (1, BLOCK)), 1, BLOCK), (BLOCK,))
        if FOLD:
            factor = act8_scale(tl.max(tl.abs(hidden), 0))
            rounded = e4m3_round(hidden * pow2_inverse(factor))
            tl.store(out + row * K + k, e4m3_code(rounded).to(tl.uint8), k < K)
            tl.store(scale + row, factor)
        else:
            tl.store(out + row * K + k, narrow(hidden, tl.bfloat16), k < K)


def gate_tokens(
    gate_up: Tensor,
    weight: Tensor | None,
    offsets: Tensor,
    limit: float,
    quantize: bool,
    fold: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the tokens of the second product from the results of the first.

    gate_up   [R, 2K] bf16, gate and up side by side
    weight    [R] fp32 routing weights, or None
    offsets   [E+1] int64: rows from its last on are left alone
    quantize  round with ACT8
    fold      return e4m3 codes (uint8) and scales as `fold_tokens`, else bf16 and None
    returns   [R, K], [R]; what swiglu and round_trip compute one after the other
    """
    rows, inputs = gate_up.shape[0], gate_up.shape[1] // 2
    dtype = torch.uint8 if fold else torch.bfloat16
    out = torch.empty(rows, inputs, dtype=dtype, device=gate_up.device)
    scale = torch.empty(rows, dtype=torch.float32, device=gate_up.device)
    launch(
        _gate, (rows,), gate_up, scale if weight is None else weight, out, scale, offsets,
        offsets.shape[0] - 1, inputs, float(limit), WEIGHTED=weight is not None,
        CLAMPED=limit > 0, QUANTIZE=quantize, FOLD=fold, BLOCK=next_power(inputs, 32),
    )  # fmt: skip
    return out, scale if fold else None
