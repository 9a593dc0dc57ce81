"""Tokens before and between packed products, in CUDA C++; sizes it does not take go to Triton."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from deepinfer.kernels import nvcc

__all__ = ["SOURCE", "fold_tokens", "gate_tokens", "gather_tokens"]

SOURCE: Final = Path(__file__).with_name("tokens.cu")

_MOST: Final = 8 * 1024
"""Inputs of a row."""


def _takes(x: Tensor, inputs: int) -> bool:
    return x.dtype == torch.bfloat16 and inputs % 256 == 0 and inputs <= _MOST


def _takes_rows(x: Tensor) -> bool:
    return _takes(x, x.shape[1]) and x.stride(1) == 1 and x.stride(0) % 8 == 0


def gather_tokens(
    x: Tensor, source: Tensor, offsets: Tensor, counts: Tensor | None = None
) -> Tensor:
    """Return rows `source` [P] int64 of x [T, K], any values from offsets[E] on.

    counts  int32, set to zero on the way
    """
    if not _takes_rows(x):
        if counts is not None:
            counts.zero_()
        return x[source]
    rows, inputs = source.shape[0], x.shape[1]
    out = torch.empty(rows, inputs, dtype=x.dtype, device=x.device)
    nvcc.call(
        nvcc.load(SOURCE), "gather", x.device, x, out, source, offsets,
        rows, offsets.shape[0] - 1, inputs, x.stride(0), counts,
        0 if counts is None else counts.shape[0],
    )  # fmt: skip
    return out


def fold_tokens(
    x: Tensor,
    source: Tensor | None = None,
    offsets: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `triton.fold_tokens`, with the same bits; of the rows `source` as `gather_tokens`."""
    if not _takes_rows(x):
        from deepinfer.kernels.packed import triton

        if counts is not None:
            counts.zero_()
        return triton.fold_tokens(x if source is None else x[source])
    rows, inputs = x.shape[0] if source is None else source.shape[0], x.shape[1]
    codes = torch.empty(rows, inputs, dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    nvcc.call(
        nvcc.load(SOURCE), "fold", x.device, x, codes, scale, source, offsets,
        rows, 0 if offsets is None else offsets.shape[0] - 1, inputs, x.stride(0), counts,
        0 if counts is None else counts.shape[0],
    )  # fmt: skip
    return codes, scale


def gate_tokens(
    gate_up: Tensor,
    weight: Tensor | None,
    offsets: Tensor,
    limit: float,
    quantize: bool,
    fold: bool,
) -> tuple[Tensor, Tensor | None]:
    """As `triton.gate_tokens`; values before rounding may differ in the last bits of fp32."""
    rows, inputs = gate_up.shape[0], gate_up.shape[1] // 2
    if not _takes(gate_up, inputs):
        from deepinfer.kernels.packed import triton

        return triton.gate_tokens(gate_up, weight, offsets, limit, quantize, fold)
    dtype = torch.uint8 if fold else torch.bfloat16
    out = torch.empty(rows, inputs, dtype=dtype, device=gate_up.device)
    scale = torch.empty(rows, dtype=torch.float32, device=gate_up.device) if fold else None
    nvcc.call(
        nvcc.load(SOURCE), "gate", gate_up.device, gate_up, weight, out, scale, offsets,
        rows, offsets.shape[0] - 1, inputs, float(limit), int(quantize), int(fold),
    )  # fmt: skip
    return out, scale
