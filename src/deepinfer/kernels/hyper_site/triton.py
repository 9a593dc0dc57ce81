"""A hyper-connection site in Triton: one program per token up to its input, then the mix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.grouping.triton import added
from deepinfer.kernels.hyper import triton as hyper
from deepinfer.kernels.tiles import act8_round_trip, in_turn, launch, narrow, next_power

if TYPE_CHECKING:
    from deepinfer.kernels.grouping import Terms
    from deepinfer.kernels.hyper_site import RoundedSite, Site, SiteWeights


@triton.jit
def _site(
    h, y, routed, place, post, comb, pre, norm, streams, out, rounded, C, y_row, eps,
    M: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Streams, and what they come to through `pre`, normed; values are rounded where ops end."""
    in_turn()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    held = column < C
    dtype: tl.constexpr = out.dtype.element_ty
    if K:
        new = added(routed, place, y, row, column, held, C, y_row, K, BK, BLOCK)
        new = narrow(new, dtype).to(tl.float32)
    else:
        new = tl.load(y + row * y_row + column, held, 0.0).to(tl.float32)
    mixed = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(M):
        acc = tl.zeros((BLOCK,), tl.float32)
        for i in tl.static_range(M):
            stream = tl.load(h + (row * M + i) * C + column, held, 0.0).to(tl.float32)
            acc += tl.load(comb + (row * M + i) * M + j) * stream
        value = narrow(tl.load(post + row * M + j) * new + acc, dtype)
        tl.store(streams + (row * M + j) * C + column, value, held)
        mixed += tl.load(pre + row * M + j) * value.to(tl.float32)
    mixed = narrow(mixed, dtype).to(tl.float32)
    mean = tl.div_rn(tl.sum(mixed * mixed, 0), tl.cast(C, tl.float32))
    scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    gain = tl.load(norm + column, held, 0.0).to(tl.float32)
    x = narrow(gain * (mixed * scale), dtype)
    tl.store(out + row * C + column, x, held)
    if ROUND:
        x = act8_round_trip(tl.reshape(x.to(tl.float32), (1, BLOCK)), 1, BLOCK)
        tl.store(rounded + row * C + column, narrow(tl.reshape(x, (BLOCK,)), dtype), held)


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
    streams, x, _ = _run(h, y, post, comb, pre, weights.norm, norm_eps, False)
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
    streams, x, rounded = _run(h, y, post, comb, pre, weights.norm, norm_eps, True)
    mix = hyper.hyper_mix(streams, weights.fn, weights.scale, weights.base, norm_eps, hc_eps, iters)
    return streams, x, *mix, rounded


def _run(
    h: Tensor,
    y: Tensor | Terms,
    post: Tensor,
    comb: Tensor,
    pre: Tensor,
    norm: Tensor,
    eps: float,
    rounds: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return streams, the normed input, and that rounded, where asked for."""
    h = h.contiguous()
    num_rows, count, dim = h.shape
    streams = torch.empty_like(h)
    out = torch.empty(num_rows, dim, dtype=h.dtype, device=h.device)
    rounded = torch.empty_like(out) if rounds else out
    own = y if isinstance(y, Tensor) else y.shared
    own = own if own.stride(1) == 1 else own.contiguous()
    routed, place, places = own, own, 0
    if not isinstance(y, Tensor):
        routed, place, places = y.routed.contiguous(), y.place.contiguous(), y.place.shape[1]
    block = next_power(dim, 32)
    if num_rows:
        launch(
            _site, (num_rows,), h, own, routed, place, post.contiguous(), comb.contiguous(),
            pre.contiguous(), norm.contiguous(), streams, out, rounded, dim, own.stride(0), eps,
            M=count, K=places, BK=next_power(places), BLOCK=block, ROUND=rounds,
            num_warps=4 if block <= 2048 else 8,
        )  # fmt: skip
    return streams, out, rounded
