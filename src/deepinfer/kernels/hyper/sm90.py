"""Coefficients from the streams in CUDA C++ for SM90: a site's kernel with nothing to write in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.kernels.hyper import triton
from deepinfer.kernels.hyper_site import sm90

if TYPE_CHECKING:
    from torch import Tensor

    from deepinfer.kernels.linear import DenseWeight

__all__ = ["hyper_mix"]


def hyper_mix(
    h: Tensor,
    fn: DenseWeight,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference, of four bf16 streams of 5120; others take Triton."""
    if not sm90.accepts_streams(h, base):
        return triton.hyper_mix(h, fn, scale, base, norm_eps, hc_eps, iters)
    return sm90.coefficients(h, fn, scale, base, norm_eps, hc_eps, iters)
