"""Hyper-connections: coefficients from the streams, streams to input, output to streams."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from deepinfer.kernels.contract import check
from deepinfer.kernels.hyper import reference
from deepinfer.kernels.linear import DenseWeight

__all__ = ["hyper_collapse", "hyper_expand", "hyper_mix"]

Mix = tuple[Tensor, Tensor, Tensor]


def hyper_mix(
    h: Tensor,
    fn: DenseWeight,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    hc_eps: float,
    iters: int,
    *,
    impl: Callable[[Tensor, DenseWeight, Tensor, Tensor, float, float, int], Mix] = (
        reference.hyper_mix
    ),
) -> Mix:
    """Project the flattened streams to mixing coefficients.

    h        [T, M, C]        bf16 or fp32
    fn       [(2+M)M, M*C]    fp32
    scale    [3], base [(2+M)M]  fp32
    returns  pre [T, M], post [T, M], comb [T, M, M] (row = input, column = output), all fp32
    Source: backbone specification, 2.1 and 2.2.
    """
    check("hyper_mix", ("h", h, "T M C"), ("fn", fn.stored, "W _"), ("base", base, "W"))
    return impl(h, fn, scale, base, norm_eps, hc_eps, iters)


def hyper_collapse(
    h: Tensor, pre: Tensor, *, impl: Callable[[Tensor, Tensor], Tensor] = reference.hyper_collapse
) -> Tensor:
    """Mix streams h [T, M, C] into one input by pre [T, M]; returns [T, C], rounded once."""
    check("hyper_collapse", ("h", h, "T M C"), ("pre", pre, "T M"))
    return impl(h, pre)


def hyper_expand(
    h: Tensor,
    y: Tensor,
    post: Tensor,
    comb: Tensor,
    *,
    impl: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = reference.hyper_expand,
) -> Tensor:
    """Write an output into the streams: h_j = post_j y + sum_i comb_ij h_i, rounded once.

    h [T, M, C], y [T, C], post [T, M] fp32, comb [T, M, M] fp32; returns [T, M, C] dtype of h.
    """
    check(
        "hyper_expand",
        ("h", h, "T M C"),
        ("y", y, "T C"),
        ("post", post, "T M"),
        ("comb", comb, "T M M"),
    )
    return impl(h, y, post, comb)
