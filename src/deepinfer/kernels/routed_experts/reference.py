"""Routed experts in plain torch: gather, multiply, gate, multiply."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from deepinfer.kernels.expert_linear.reference import expert_linear, swiglu

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
    """Three ops one after the other; waits for the device that holds the offsets."""
    gate, up = expert_linear(x[rows], w1_w3, offsets, False).chunk(2, dim=-1)
    return expert_linear(swiglu(gate, up, limit, weights), w2, offsets, quantize)
