"""A hyper-connection site in Triton: the kernels of the four ops one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from deepinfer.kernels.grouping import whole
from deepinfer.kernels.hyper import triton as hyper
from deepinfer.kernels.quantize.triton import round_trip
from deepinfer.kernels.rms_norm.triton import rms_norm

if TYPE_CHECKING:
    from deepinfer.kernels.grouping import Terms
    from deepinfer.kernels.hyper_site import RoundedSite, Site, SiteWeights


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
) -> Site:
    """As the reference."""
    streams = hyper.hyper_expand(h, whole(y), post, comb)
    x = rms_norm(hyper.hyper_collapse(streams, pre), weights.norm, norm_eps)
    mix = hyper.hyper_mix(streams, weights.fn, weights.scale, weights.base, norm_eps, hc_eps, iters)
    return streams, x, *mix


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
) -> RoundedSite:
    """As the reference."""
    site = hyper_site(h, y, post, comb, pre, weights, norm_eps, hc_eps, iters)
    return *site, round_trip(site[1], "act8")
