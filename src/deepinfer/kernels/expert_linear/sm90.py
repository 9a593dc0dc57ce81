"""Expert products in CUDA C++ for Hopper, on weights packed at their first use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.kernels.expert_linear import triton
from deepinfer.kernels.packed import Decoded
from deepinfer.kernels.packed.kept import kept_fp4
from deepinfer.kernels.packed.run import multiply
from deepinfer.kernels.quantize.sm90 import round_trip

if TYPE_CHECKING:
    from deepinfer.kernels.expert_linear import Fp4Weight

swiglu = triton.swiglu


def expert_linear(
    x: Tensor, weight: Fp4Weight, offsets: Sequence[int] | Tensor, quantize_input: bool
) -> Tensor:
    """As the reference, products in bf16; other types and small sizes take Triton."""
    packed = None
    if x.dtype == torch.bfloat16:
        packed = kept_fp4(weight.codes, weight.scale, Decoded.FP4_BF16)
    if packed is None:
        return triton.expert_linear(x, weight, offsets, quantize_input)
    x = round_trip(x, "act8") if quantize_input else x
    return multiply(x.contiguous(), packed, bounds(offsets, x.device))


def bounds(offsets: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    if isinstance(offsets, Tensor):
        return offsets
    return torch.tensor(offsets, dtype=torch.int64).to(device, non_blocking=True)
