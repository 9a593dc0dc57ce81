"""Products of many rows through cuBLAS on bf16 copies of e4m3 weights; few rows go their own way.

Every e4m3 value times its power of two is a bf16 value, so copies are exact. Sums come in the
library's order, which depends on the number of rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from deepinfer.kernels.linear import sm90
from deepinfer.kernels.linear.reference import dequantize_blocks
from deepinfer.kernels.quantize.sm90 import round_trip

if TYPE_CHECKING:
    from deepinfer.kernels.linear import Fp8Weight

__all__ = ["LEAST_ROWS", "fp8_linear", "grouped_linear"]

LEAST_ROWS: Final = 96
"""From so many rows on the library is faster than the packed weights' products, ..."""

_LEAST_ROWS_LARGE: Final = 193
"""... from so many on for matrices of more elements, ..."""

_LEAST_ROWS_TALL: Final = 257
"""... and from so many on for those whose tiles fill a card: they share no sums."""

_LEAST_ROWS_ROUNDED: Final = 385
"""Those that round what they store spare a launch up to here."""

_LARGE: Final = 25_000_000
_TALL: Final = 128 * 132

_ROWS_AT_A_TIME: Final = 2048

_kept: dict[int, Tensor] = {}


def fp8_linear(x: Tensor, weight: Fp8Weight, quantize_input: bool) -> Tensor:
    """As the reference, summed in the library's order where there are many rows of bf16."""
    copy = _copy(weight) if x.dtype == torch.bfloat16 else None
    if copy is None or x.shape[0] < _least_rows(copy):
        return sm90.fp8_linear(x, weight, quantize_input)
    x = round_trip(x, "act8") if quantize_input else x
    with _fp32_sums():
        return torch.mm(x, copy.T)


def grouped_linear(
    x: Tensor, weight: Fp8Weight, quantize_input: bool, quantize_output: bool = False
) -> Tensor:
    """As the reference, summed in the library's order where there are many rows of bf16."""
    copy = _copy(weight) if x.dtype == torch.bfloat16 else None
    least = _LEAST_ROWS_ROUNDED if quantize_output else 0
    if copy is None or x.shape[0] < max(least, _least_rows(copy)):
        return sm90.grouped_linear(x, weight, quantize_input, quantize_output)
    x = round_trip(x, "act8") if quantize_input else x
    rows, groups, inputs = x.shape
    out = torch.empty(rows, groups, copy.shape[0] // groups, dtype=x.dtype, device=x.device)
    matrices = copy.view(groups, -1, inputs).transpose(1, 2)
    with _fp32_sums():
        torch.bmm(x.transpose(0, 1), matrices, out=out.transpose(0, 1))
    return round_trip(out.flatten(1), "act8") if quantize_output else out.flatten(1)


def _least_rows(copy: Tensor) -> int:
    if copy.shape[0] >= _TALL:
        return _LEAST_ROWS_TALL
    return _LEAST_ROWS_LARGE if copy.numel() >= _LARGE else LEAST_ROWS


def _copy(weight: Fp8Weight) -> Tensor:
    """Return a weight's copy [N, K] bf16, made at its first use and kept as long as it lives."""
    key = id(weight.codes)
    if key not in _kept:
        outputs, inputs = weight.codes.shape
        made = torch.empty(outputs, inputs, dtype=torch.bfloat16, device=weight.codes.device)
        for start in range(0, outputs, _ROWS_AT_A_TIME):
            part = slice(start, min(start + _ROWS_AT_A_TIME, outputs))
            scale = weight.scale[start // 32 : -(-part.stop // 32)]
            made[part] = dequantize_blocks(weight.codes[part], scale)
        _kept[key] = made
        weakref.finalize(weight.codes, _kept.pop, key, None)
    return _kept[key]


@contextmanager
def _fp32_sums() -> Iterator[None]:
    """Within it the library adds parts of a sum in fp32, too."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before
