"""Unquantized products through cuBLAS, where there are many outputs: the head."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from deepinfer.kernels.linear import triton

if TYPE_CHECKING:
    from deepinfer.kernels.linear import DenseWeight

LEAST_OUTPUTS: Final = 8192
"""Below this the library's choice of a routine gains nothing over Triton's tiles."""


def dense_linear(x: Tensor, weight: DenseWeight, out: torch.dtype) -> Tensor:
    """As the reference, summed in the library's order; other types and sizes take Triton."""
    stored = weight.stored
    fits = x.dtype == stored.dtype == torch.bfloat16 and out == torch.float32
    if not fits or stored.shape[0] < LEAST_OUTPUTS or not _widens():
        return triton.dense_linear(x, weight, out)
    return torch.mm(x, stored.T, out_dtype=torch.float32)


@cache
def _widens() -> bool:
    """Whether this torch multiplies bf16 into fp32."""
    return "dtype" in torch.ops.aten.mm.overloads()  # type: ignore[no-untyped-call]
