"""Routed experts for a CPU: the three ops in their form for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from deepinfer.kernels.expert_linear.cpu import expert_linear, swiglu
from deepinfer.kernels.expert_linear.reference import borders

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
    bounds = borders(offsets)
    gate, up = expert_linear(x[rows], w1_w3, bounds, False).chunk(2, dim=-1)
    return expert_linear(swiglu(gate, up, limit, weights), w2, bounds, quantize)
