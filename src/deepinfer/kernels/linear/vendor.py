"""Block-FP8 linears through Humming: e4m3 weights, one scale for each row and 32 inputs.

The blocks' scales are repeated over rows, so products are exact. Inputs are bf16, rounded to ACT8
before where that is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.kernels.expert_linear.vendor import _rounded
from deepinfer.kernels.humming import Packed, pack
from deepinfer.kernels.linear import reference

if TYPE_CHECKING:
    from deepinfer.kernels.linear import Fp8Weight

_packed: dict[int, Packed] = {}


def fp8_linear(x: Tensor, weight: Fp8Weight, quantize_input: bool) -> Tensor:
    """As the reference for bf16 rows; others take the reference."""
    if x.dtype != torch.bfloat16:
        return reference.fp8_linear(x, weight, quantize_input)
    x = _rounded(x) if quantize_input else x
    return pack(_packed, weight.codes, weight.scale, fp4=False).multiply(x.contiguous(), None)
