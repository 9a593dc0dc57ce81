"""Products for a CPU: up to 16 rows go through kept buffers, in the one 16-row block that the
reference would pad them to; more rows differ in the quantizer only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.linear import DenseWeight, Fp8Weight, reference
from deepinfer.kernels.quantize.cpu import act8_values, round_into, round_trip
from deepinfer.kernels.rows import ROW_BLOCK, matmul_rows
from deepinfer.kernels.workspace import Rows, kept_rows, multiply


def fp8_linear(x: Tensor, weight: Fp8Weight, quantize_input: bool) -> Tensor:
    """As the reference."""
    num_rows, width = x.shape
    if num_rows > ROW_BLOCK:
        x32 = act8_values(x) if quantize_input else x.float()
        return matmul_rows(x32, weight.dequantize()).to(x.dtype)
    rows = kept_rows(num_rows, width)
    fill(rows, x, quantize_input)
    return _rounded(multiply(rows, weight.dequantize()), x.dtype)


def dense_linear(x: Tensor, weight: DenseWeight, out: torch.dtype) -> Tensor:
    """As the reference."""
    num_rows, width = x.shape
    if num_rows > ROW_BLOCK:
        return reference.dense_linear(x, weight, out)
    rows = kept_rows(num_rows, width)
    rows.tensor.copy_(x)
    return _rounded(multiply(rows, weight.fp32()), out)


def grouped_linear(
    x: Tensor, weight: Fp8Weight, quantize_input: bool, quantize_output: bool = False
) -> Tensor:
    """As the reference; the groups' products write into one result."""
    num_rows, groups, width = x.shape
    dense = weight.dequantize()
    x32 = act8_values(x) if quantize_input else x
    out = torch.empty(-(-num_rows // ROW_BLOCK) * ROW_BLOCK, dense.shape[0])
    results = out.chunk(groups, dim=1)
    for start in range(0, num_rows, ROW_BLOCK):
        block = slice(start, start + ROW_BLOCK)
        rows = kept_rows(min(ROW_BLOCK, num_rows - start), width)
        parts = zip(x32[block].unbind(1), dense.T.chunk(groups, dim=1), results, strict=True)
        for part, matrix, result in parts:
            rows.tensor.copy_(part)
            torch.mm(rows.block, matrix, out=result[block])
    out = out[:num_rows].to(x.dtype)
    return round_trip(out, "act8") if quantize_output else out


def fill(rows: Rows, x: Tensor, quantize: bool) -> None:
    """Write x [T, K] into the rows of a product, quantized or as it is."""
    if quantize:
        round_into(x, "act8", rows.array)
    else:
        rows.tensor.copy_(x)


def _rounded(result: Rows, dtype: torch.dtype) -> Tensor:
    return result.tensor.to(dtype, copy=True)
