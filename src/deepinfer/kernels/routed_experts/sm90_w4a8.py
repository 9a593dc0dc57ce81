"""Routed experts in e4m3 for Hopper: weights exact, rows with one power of two each.

What differs from ACT8 rows is said in `expert_linear/sm90_w4a8.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from deepinfer.kernels.packed import Decoded
from deepinfer.kernels.routed_experts.sm90 import run

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
    """As the reference of ACT8 rows; where scales lie too far apart, exact products."""
    return run(x, rows, weights, offsets, w1_w3, w2, limit, quantize, Decoded.FP4_E4M3)
