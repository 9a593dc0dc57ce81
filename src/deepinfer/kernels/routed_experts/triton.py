"""Routed experts in Triton: the kernels of the three ops one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from deepinfer.kernels.expert_linear.triton import expert_linear, swiglu

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
    """As the reference."""
    gate, up = expert_linear(x[rows], w1_w3, offsets, False).chunk(2, dim=-1)
    return expert_linear(swiglu(gate, up, limit, weights), w2, offsets, quantize)
