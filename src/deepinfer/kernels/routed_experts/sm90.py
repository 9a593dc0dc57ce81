"""Routed experts in CUDA C++ for Hopper: both products on packed weights, the gate between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.kernels.expert_linear.packed import experts
from deepinfer.kernels.packed import Decoded
from deepinfer.kernels.packed import experts as together
from deepinfer.kernels.packed.kept import kept_fp4
from deepinfer.kernels.routed_experts import triton

if TYPE_CHECKING:
    from deepinfer.kernels.expert_linear import Fp4Weight


def routed_experts(
    x: Tensor,
    rows: Tensor,
    weights: Tensor,
    offsets: Tensor,
    w1_w3: Fp4Weight,
    w2: Fp4Weight,
    limit: float,
    quantize: bool,
) -> Tensor:
    """As the reference, products in bf16; other types and small sizes take Triton."""
    return run(x, rows, weights, offsets, w1_w3, w2, limit, quantize, Decoded.FP4_BF16)


def run(
    x: Tensor,
    rows: Tensor,
    weights: Tensor,
    offsets: Tensor,
    w1_w3: Fp4Weight,
    w2: Fp4Weight,
    limit: float,
    quantize: bool,
    decoded: Decoded,
) -> Tensor:
    """Run on weights packed as `decoded`; where these have no such form, as bf16, or in Triton."""
    first = second = None
    if x.dtype == torch.bfloat16:
        for form in dict.fromkeys((decoded, Decoded.FP4_BF16)):
            first = kept_fp4(w1_w3.codes, w1_w3.scale, form)
            second = kept_fp4(w2.codes, w2.scale, form)
            if first is not None and second is not None:
                break
    if first is None or second is None:
        return triton.routed_experts(x, rows, weights, offsets, w1_w3, w2, limit, quantize)
    run_packed = together.experts if together.takes(first, second) else experts
    return run_packed(x.contiguous(), rows, offsets, weights, first, second, limit, quantize)
