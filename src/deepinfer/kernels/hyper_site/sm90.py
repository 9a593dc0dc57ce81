"""A hyper-connection site in CUDA C++ for SM90: one launch, streams read and written once.

`sm90.cu` says how. Other dimensions than four streams of 5120 run in Triton. Calls on one
device share a workspace, so they belong to one stream at a time.
"""

from __future__ import annotations

import weakref
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from deepinfer.kernels import nvcc
from deepinfer.kernels.grouping import Terms, whole
from deepinfer.kernels.hyper_site import triton

if TYPE_CHECKING:
    from deepinfer.kernels.hyper_site import RoundedSite, Site, SiteWeights
    from deepinfer.kernels.linear import DenseWeight

__all__ = [
    "accepts",
    "accepts_streams",
    "coefficients",
    "groups",
    "hyper_site",
    "hyper_site_rounded",
    "prepared",
]

SOURCE: Final = Path(__file__).with_name("sm90.cu")
STREAMS, WIDTH, OUTPUTS = 4, 5120, 24
SLICES, TILE, LEAST = 20, 16, 4
MOST_ROWS: Final = 8192  # of one launch
MOST_TERMS: Final = 6  # besides the one that comes last
SUMMED_ROWS: Final = 192  # up to here terms are added up on the way, else by a launch in front


def groups(num_rows: int, processors: int) -> int:
    """How many groups of blocks share the rows, at least four rows each; all blocks must run."""
    return max(1, min(processors // SLICES, -(-num_rows // LEAST)))


_prepared: dict[int, Tensor] = {}


def prepared(fn: DenseWeight) -> Tensor:
    """Return a projection as bf16 in the order that tensor instructions read it, in two parts that
    add up to it: [slice, step, 3, lane, part, half, 2].

    Made once per weight, kept as long as the weight lives, as large as its fp32 form.
    """
    key = id(fn.stored)
    if key not in _prepared:
        whole = fn.fp32()
        high = whole.bfloat16()
        low = (whole - high.float()).bfloat16()
        # part, 8-row block, row, stream, slice, step of 16 channels, half, pair, which
        parts = torch.stack([high, low]).view(2, 3, 8, STREAMS, SLICES, 16, 2, 4, 2)
        _prepared[key] = parts.permute(4, 3, 5, 1, 2, 7, 0, 6, 8).contiguous()
        if whole.is_cuda and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(whole.device).synchronize()  # launches read it early
        weakref.finalize(fn.stored, _prepared.pop, key, None)
    return _prepared[key]


def accepts_streams(h: Tensor, base: Tensor) -> bool:
    """Whether the kernel takes streams: bf16, the published dimensions.

    A slice of a card without multiprocessors for all blocks that wait for each other runs Triton.
    """
    published = tuple(h.shape[1:]) == (STREAMS, WIDTH) and base.shape[0] == OUTPUTS
    return h.dtype == torch.bfloat16 and published and nvcc.processors(h.device) >= SLICES


def accepts(h: Tensor, weights: SiteWeights) -> bool:
    """Whether the kernel takes a call: bf16, the published dimensions."""
    return accepts_streams(h, weights.base) and weights.norm.dtype == torch.bfloat16


@cache
def _workspace(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Sums, squares and counters of the largest launch; counters are zero between launches.

    A group has at most one tile that is not whole.
    """
    tiles = MOST_ROWS // TILE + nvcc.processors(device) // SLICES
    cells = tiles * TILE * SLICES
    sums, squares = (torch.empty(cells * n, device=device) for n in (OUTPUTS, 2))
    return sums, squares, torch.zeros(tiles, dtype=torch.int32, device=device)


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
    num_groups: int | None = None,
) -> Site:
    """As the reference."""
    if not accepts(h, weights):
        return triton.hyper_site(h, y, post, comb, pre, weights, norm_eps, hc_eps, iters)
    return _run(h, y, post, comb, pre, weights, norm_eps, hc_eps, iters, num_groups, None)


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
    if not accepts(h, weights):
        return triton.hyper_site_rounded(h, y, post, comb, pre, weights, norm_eps, hc_eps, iters)
    rounded = h.new_empty(h.shape[0], WIDTH)
    site = _run(h, y, post, comb, pre, weights, norm_eps, hc_eps, iters, None, rounded)
    return *site, rounded


def _run(
    h: Tensor,
    y: Tensor | Terms,
    post: Tensor,
    comb: Tensor,
    pre: Tensor,
    weights: SiteWeights,
    norm_eps: float,
    hc_eps: float,
    iters: int,
    num_groups: int | None,
    rounded: Tensor | None,
) -> Site:
    """Launch for as many rows at a time as the workspace holds."""
    routed = place = None
    few = h.shape[0] <= SUMMED_ROWS
    if (
        few
        and isinstance(y, Terms)
        and y.place.shape[1] <= MOST_TERMS
        and y.routed.dtype == h.dtype
    ):
        routed, place, y = y.routed.contiguous(), y.place.contiguous(), y.shared
    h, y, post, comb, pre = (x.contiguous() for x in (h, whole(y), post, comb, pre))
    streams, x, new_pre, new_post, new_comb = (torch.empty_like(t) for t in (h, y, pre, post, comb))
    norm, (fn, scale, base) = weights.norm, weights[:3]
    for begin, rows in _launches(h.shape[0]):
        part = slice(begin, begin + rows)
        nvcc.call(
            nvcc.load(SOURCE), "hyper_site", h.device, h[part], y[part], norm, post[part],
            comb[part], pre[part], prepared(fn), scale, base, streams[part], x[part],
            None if rounded is None else rounded[part], new_pre[part], new_post[part],
            new_comb[part], *_workspace(h.device), routed,
            None if place is None else place[part], 0 if place is None else place.shape[1], rows,
            num_groups or groups(rows, nvcc.processors(h.device)), iters, norm_eps, hc_eps,
        )  # fmt: skip
    return streams, x, new_pre, new_post, new_comb


def coefficients(
    h: Tensor,
    fn: DenseWeight,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `hyper_mix`, of streams that `accepts_streams` takes."""
    h, num_rows = h.contiguous(), h.shape[0]
    pre, post = (h.new_empty(num_rows, STREAMS, dtype=torch.float32) for _ in range(2))
    comb = h.new_empty(num_rows, STREAMS, STREAMS, dtype=torch.float32)
    for begin, rows in _launches(num_rows):
        part = slice(begin, begin + rows)
        nvcc.call(
            nvcc.load(SOURCE), "hyper_site", h.device, h[part], *[None] * 5, prepared(fn), scale,
            base, None, None, None, pre[part], post[part], comb[part], *_workspace(h.device), None,
            None, 0, rows, groups(rows, nvcc.processors(h.device)), iters, norm_eps, hc_eps,
        )  # fmt: skip
    return pre, post, comb


def _launches(num_rows: int) -> list[tuple[int, int]]:
    """First row and number of rows of every launch."""
    return [(at, min(MOST_ROWS, num_rows - at)) for at in range(0, num_rows, MOST_ROWS)]
