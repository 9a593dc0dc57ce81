"""A hyper-connection site: the end of one sublayer and the beginning of the next, as one op."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from deepinfer.kernels.contract import check
from deepinfer.kernels.grouping import Terms
from deepinfer.kernels.hyper_site import reference
from deepinfer.kernels.linear import DenseWeight

__all__ = ["SiteWeights", "hyper_site", "hyper_site_rounded"]


class SiteWeights(NamedTuple):
    """Parameters of the sublayer that begins at a site.

    fn    [(2+M)M, M*C], scale [3], base [(2+M)M]   fp32, as of `hyper_mix`
    norm  [C], of the sublayer's input
    """

    fn: DenseWeight
    scale: Tensor
    base: Tensor
    norm: Tensor


Site = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
RoundedSite = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
_Output = Tensor | Terms
_Impl = Callable[[Tensor, _Output, Tensor, Tensor, Tensor, SiteWeights, float, float, int], Site]
_Rounded = Callable[
    [Tensor, _Output, Tensor, Tensor, Tensor, SiteWeights, float, float, int], RoundedSite
]


def hyper_site(
    h: Tensor,
    y: Tensor | Terms,
    post: Tensor,
    comb: Tensor,
    pre: Tensor,
    weights: SiteWeights,
    norm_eps: float,
    hc_eps: float,
    iters: int,
    *,
    impl: _Impl = reference.hyper_site,
) -> Site:
    """Write an output into the streams, and take the next sublayer's input and coefficients.

    h        [T, M, C]  streams, y [T, C] the sublayer's output; bf16 or fp32. The output may be
             terms that are still to be added up
    post     [T, M], comb [T, M, M]  fp32, of the sublayer that ends
    pre      [T, M]     fp32, the mix for the sublayer that begins
    weights  of the sublayer that begins
    returns  streams [T, M, C], normed input [T, C], then pre [T, M], post [T, M], comb [T, M, M]
    Equals `hyper_expand`, then `hyper_collapse` and `rms_norm`, and `hyper_mix`.
    Source: backbone specification, 2.3.
    """
    _check("hyper_site", h, y, post, comb, pre, weights)
    return impl(h, y, post, comb, pre, weights, norm_eps, hc_eps, iters)


def hyper_site_rounded(
    h: Tensor,
    y: Tensor | Terms,
    post: Tensor,
    comb: Tensor,
    pre: Tensor,
    weights: SiteWeights,
    norm_eps: float,
    hc_eps: float,
    iters: int,
    *,
    impl: _Rounded = reference.hyper_site_rounded,
) -> RoundedSite:
    """Equal `hyper_site`, and `round_trip` of the normed input with ACT8: that comes sixth."""
    _check("hyper_site_rounded", h, y, post, comb, pre, weights)
    return impl(h, y, post, comb, pre, weights, norm_eps, hc_eps, iters)


def _check(
    op: str,
    h: Tensor,
    y: Tensor | Terms,
    post: Tensor,
    comb: Tensor,
    pre: Tensor,
    weights: SiteWeights,
) -> None:
    if not isinstance(y, Tensor):
        check(op, ("y.routed", y.routed, "_ C"), ("h", h, "T _ C"), ("y.place", y.place, "T _"))
        y = y.shared
    check(
        op,
        ("h", h, "T M C"),
        ("y", y, "T C"),
        ("post", post, "T M"),
        ("comb", comb, "T M M"),
        ("pre", pre, "T M"),
        ("norm", weights.norm, "C"),
        ("fn", weights.fn.stored, "W _"),
        ("base", weights.base, "W"),
    )
