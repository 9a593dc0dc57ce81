"""RMS norm over the last dimension."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from deepinfer.kernels.contract import check
from deepinfer.kernels.rms_norm import reference

__all__ = ["rms_norm"]


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    impl: Callable[[Tensor, Tensor, float], Tensor] = reference.rms_norm,
) -> Tensor:
    """Divide each row by its root mean square and multiply by `weight`, rounding once.

    x       [T, D]  bf16 or fp32
    weight  [D]     bf16 or fp32
    returns [T, D]  dtype of x
    Source: backbone specification, 9.
    """
    check("rms_norm", ("x", x, "T D"), ("weight", weight, "D"))
    return impl(x, weight, eps) if x.shape[0] else x
