"""Products with e4m3 weights in CUDA C++ for Hopper, on weights packed at their first use.

What shares a sum is decided by the number of rows, too; `sm90_fixed` leaves that to the weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.kernels.linear import triton
from deepinfer.kernels.packed import dense
from deepinfer.kernels.packed.kept import kept_fp8
from deepinfer.kernels.quantize.sm90 import round_trip

if TYPE_CHECKING:
    from deepinfer.kernels.linear import Fp8Weight


def fp8_linear(
    x: Tensor, weight: Fp8Weight, quantize_input: bool, *, fixed: bool = False
) -> Tensor:
    """As the reference; other types than bf16 and small sizes take Triton.

    fixed  a row's bits are the same in any batch
    """
    packed = kept_fp8(weight.codes, weight.scale) if x.dtype == torch.bfloat16 else None
    if packed is None:
        return triton.fp8_linear(x, weight, quantize_input)
    x = round_trip(x, "act8") if quantize_input else x
    split = dense.fixed_split(packed.outputs, 1, packed.inputs) if fixed else 0
    return dense.multiply(x.contiguous().unsqueeze(1), packed, split=split)


def grouped_linear(
    x: Tensor,
    weight: Fp8Weight,
    quantize_input: bool,
    quantize_output: bool = False,
    *,
    fixed: bool = False,
) -> Tensor:
    """As the reference; other types than bf16 and small sizes take Triton.

    fixed  a row's bits are the same in any batch
    """
    groups, outputs = x.shape[1], weight.codes.shape[0] // x.shape[1]
    packed = None
    if x.dtype == torch.bfloat16 and outputs % 256 == 0:
        packed = kept_fp8(weight.codes, weight.scale)
    if packed is None:
        return triton.grouped_linear(x, weight, quantize_input, quantize_output)
    x = round_trip(x, "act8") if quantize_input else x
    split = dense.fixed_split(outputs, groups, packed.inputs) if fixed else 0
    return dense.multiply(x.contiguous(), packed, groups, split=split, rounds=quantize_output)
