"""Tokens for products of e4m3: codes with one power of two per row."""

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
    next_power,
    pow2_inverse,
)

__all__ = ["fold_tokens"]


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
