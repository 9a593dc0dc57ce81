"""Tokens of packed products: folded into e4m3 codes, gated between the two of an expert."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.tiles import (
    act8_scale,
    e4m3_code,
    e4m3_round,
    launch,
    narrow,
    pow2_inverse,
)

__all__ = ["fold_tokens", "gate_tokens"]

_GROUPS = 32
"""Groups of 32 values that a program takes at a time."""


@triton.jit
def _fold(x, codes, scale, K, x_row, G: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, G)[:, None] * 32 + tl.arange(0, 32)[None, :]
    most = tl.zeros((G, 32), tl.float32)
    for start in range(0, K, G * 32):
        k = start + place
        most = tl.maximum(most, tl.abs(tl.load(x + row * x_row + k, k < K, 0.0).to(tl.float32)))
    factor = act8_scale(tl.max(tl.max(most, 1), 0))
    for start in range(0, K, G * 32):
        k = start + place
        values = tl.load(x + row * x_row + k, k < K, 0.0).to(tl.float32)
        rounded = e4m3_round(values * pow2_inverse(factor))
        tl.store(codes + row * K + k, e4m3_code(rounded).to(tl.uint8), k < K)
    tl.store(scale + row, factor)


def fold_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 codes [R, K] (uint8) and one power of two per row [R] fp32 of x [R, K].

    Codes are ACT8's with its groups' powers of two folded in: values below 2^-14 of the row's
    largest keep fewer bits, all others are those of ACT8, whether or not x went through it.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, inputs = x.shape
    codes = torch.empty(rows, inputs, dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    launch(_fold, (rows,), x, codes, scale, inputs, x.stride(0), G=_GROUPS)
    return codes, scale


@triton.jit
def _hidden(gate_up, routed, k, K, limit, CLAMPED: tl.constexpr):
    """Gated values of a row at k, rounded to bf16."""
    g = tl.load(gate_up + k, k < K, 0.0).to(tl.float32)
    u = tl.load(gate_up + K + k, k < K, 0.0).to(tl.float32)
    if CLAMPED:
        g = tl.where(g > limit, limit, g)
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    return narrow(routed * (tl.div_rn(g, 1.0 + tl.exp(-g)) * u), tl.bfloat16).to(tl.float32)


@triton.jit
def _gate(
    gate_up, weight, out, scale, offsets, E, K, limit,
    WEIGHTED: tl.constexpr, CLAMPED: tl.constexpr, QUANTIZE: tl.constexpr, FOLD: tl.constexpr,
    G: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(offsets + E):
        place = tl.arange(0, G)[:, None] * 32 + tl.arange(0, 32)[None, :]
        routed = 1.0
        if WEIGHTED:
            routed = tl.load(weight + row)
        source = gate_up + row * 2 * K
        if FOLD:
            most = tl.zeros((G, 32), tl.float32)
            for start in range(0, K, G * 32):
                value = _hidden(source, routed, start + place, K, limit, CLAMPED)
                most = tl.maximum(most, tl.abs(value))
            factor = act8_scale(tl.max(tl.max(most, 1), 0))
            tl.store(scale + row, factor)
        for start in range(0, K, G * 32):
            k = start + place
            value = _hidden(source, routed, k, K, limit, CLAMPED)
            if FOLD:
                rounded = e4m3_round(value * pow2_inverse(factor))
                tl.store(out + row * K + k, e4m3_code(rounded).to(tl.uint8), k < K)
            else:
                if QUANTIZE:
                    group = act8_scale(tl.max(tl.abs(value), 1))[:, None]
                    value = e4m3_round(value * pow2_inverse(group)) * group
                tl.store(out + row * K + k, value.to(tl.bfloat16), k < K)


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
        CLAMPED=limit > 0, QUANTIZE=quantize, FOLD=fold, G=_GROUPS,
    )  # fmt: skip
    return out, scale if fold else None
