"""Products with e4m3 weights in CUDA C++ for Hopper, a row's bits the same in any batch.

Weights are packed at their first use; what shares a sum is decided by the weight alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.kernels.linear import triton
from deepinfer.kernels.packed import dense
from deepinfer.kernels.packed.kept import kept_fp8
from deepinfer.kernels.quantize.triton import round_trip

if TYPE_CHECKING:
    from deepinfer.kernels.linear import Fp8Weight


def fp8_linear(x: Tensor, weight: Fp8Weight, quantize_input: bool) -> Tensor:
    """As the reference; other types than bf16 and small sizes take Triton."""
    packed = kept_fp8(weight.codes, weight.scale) if x.dtype == torch.bfloat16 else None
    if packed is None:
        return triton.fp8_linear(x, weight, quantize_input)
    x = round_trip(x, "act8") if quantize_input else x
    return dense.multiply(x.contiguous().unsqueeze(1), packed)


def grouped_linear(x: Tensor, weight: Fp8Weight, quantize_input: bool) -> Tensor:
    """As the reference; other types than bf16 and small sizes take Triton."""
    groups = x.shape[1]
    packed = None
    if x.dtype == torch.bfloat16 and weight.codes.shape[0] // groups % 256 == 0:
        packed = kept_fp8(weight.codes, weight.scale)
    if packed is None:
        return triton.grouped_linear(x, weight, quantize_input)
    x = round_trip(x, "act8") if quantize_input else x
    return dense.multiply(x.contiguous(), packed, groups)
