"""Matrix products in plain torch: exactly dequantized operands, fp32 products in 16-row blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.kernels.quantize import act8_values, decode_e4m3, decode_ue8m0, round_trip
from deepinfer.kernels.rows import matmul_rows

if TYPE_CHECKING:
    from deepinfer.kernels.linear import DenseWeight, Fp8Weight


def dequantize_blocks(codes: Tensor, scale: Tensor) -> Tensor:
    """[N, K] e4m3 times one power of two per 32x32 tile."""
    factor = decode_ue8m0(scale).repeat_interleave(32, 0)[: codes.shape[0]]
    values = torch.unflatten(decode_e4m3(codes), 1, (-1, 32))
    return (values * factor.unsqueeze(-1)).flatten(1)


def fp8_linear(x: Tensor, weight: Fp8Weight, quantize_input: bool) -> Tensor:
    """Dequantize, multiply, round."""
    x32 = act8_values(x) if quantize_input else x.float()
    return matmul_rows(x32, weight.dequantize()).to(x.dtype)


def dense_linear(x: Tensor, weight: DenseWeight, out: torch.dtype) -> Tensor:
    """Multiply in fp32, round to `out`."""
    return matmul_rows(x.float(), weight.fp32()).to(out)


def grouped_linear(
    x: Tensor, weight: Fp8Weight, quantize_input: bool, quantize_output: bool = False
) -> Tensor:
    """One product per group."""
    x32 = act8_values(x) if quantize_input else x.float()
    blocks = weight.dequantize().chunk(x.shape[1])
    parts = [matmul_rows(x32[:, g].contiguous(), block) for g, block in enumerate(blocks)]
    out = torch.cat(parts, dim=1).to(x.dtype)
    return round_trip(out, "act8") if quantize_output else out
