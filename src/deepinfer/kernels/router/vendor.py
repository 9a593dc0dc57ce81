"""Routing through TileKernels: its choice and weights behind our product."""

from __future__ import annotations

from torch import Tensor

from deepinfer.kernels.libraries import library
from deepinfer.kernels.linear import DenseWeight
from deepinfer.kernels.router import reference

_ACTIVE = 32  # most that it chooses


def route(
    x: Tensor, gate: DenseWeight, bias: Tensor, num_active: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """As the reference for a multiple of 4 experts; the product is one fp32 product of torch."""
    if gate.stored.shape[0] % 4 or num_active > _ACTIVE:
        return reference.route(x, gate, bias, num_active, scaling)
    logits = x.float() @ gate.fp32().T
    chosen, weights = library("tile_kernels", "moe").moe_topk_gate_forward(
        logits, num_active, False, 0, scaling, 0, bias=bias
    )
    return chosen, weights
