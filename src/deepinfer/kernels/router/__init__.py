"""Which experts a token takes, and with what weight."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from deepinfer.kernels.contract import check
from deepinfer.kernels.linear import DenseWeight
from deepinfer.kernels.router import reference

__all__ = ["route", "route_rounded"]


def route(
    x: Tensor,
    gate: DenseWeight,
    bias: Tensor,
    num_active: int,
    scaling: float,
    *,
    impl: Callable[
        [Tensor, DenseWeight, Tensor, int, float], tuple[Tensor, Tensor]
    ] = reference.route,
) -> tuple[Tensor, Tensor]:
    """Choose the experts with the best biased scores; weigh them by their unbiased ones.

    x        [T, C]  bf16 or fp32, not quantized
    gate     [E, C]
    bias     [E] fp32, steers the choice only
    returns  experts [T, k] int64, best first, ties to the smaller id; weights [T, k] fp32 that add
             up to `scaling`
    Source: weights specification, 4.1.
    """
    check("route", ("x", x, "T C"), ("gate.stored", gate.stored, "E C"), ("bias", bias, "E"))
    return impl(x, gate, bias, num_active, scaling)


def route_rounded(
    x: Tensor,
    gate: DenseWeight,
    bias: Tensor,
    num_active: int,
    scaling: float,
    *,
    impl: Callable[
        [Tensor, DenseWeight, Tensor, int, float], tuple[Tensor, Tensor, Tensor]
    ] = reference.route_rounded,
) -> tuple[Tensor, Tensor, Tensor]:
    """Equal `route`, and `round_trip` of x with ACT8, which all experts take: that comes third."""
    check(
        "route_rounded", ("x", x, "T C"), ("gate.stored", gate.stored, "E C"), ("bias", bias, "E")
    )
    return impl(x, gate, bias, num_active, scaling)
