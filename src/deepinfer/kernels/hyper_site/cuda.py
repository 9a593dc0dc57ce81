"""A hyper-connection site in CUDA C++ for SM90: one launch, streams read and written once.

`site.cu` says how. Other dimensions than four streams of 5120 run in Triton. Calls on one device
share a workspace, so they belong to one stream at a time.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from deepinfer.kernels import nvcc
from deepinfer.kernels.hyper_site import triton

if TYPE_CHECKING:
    from deepinfer.kernels.hyper_site import Site, SiteWeights

__all__ = ["accepts", "hyper_site", "plan"]

SOURCE: Final = Path(__file__).with_name("site.cu")
STREAMS, WIDTH, OUTPUTS, SUMS = 4, 5120, 24, 28
MOST_ROWS: Final = 1 << 15  # of one launch


class Plan(NamedTuple):
    """How a launch is cut: warps over tokens, slices of the channels, groups of blocks."""

    side: int
    slices: int
    groups: int

    @property
    def tile(self) -> int:
        """Tokens of a tile."""
        return 16 * self.side


def plan(num_rows: int, processors: int) -> Plan:
    """Cut a launch so that all its blocks run at once, and as many of them as there is work for."""
    for side, slices in ((2, 40), (2, 20), (2, 10), (4, 10)):
        tiles = -(-num_rows // (16 * side))
        if tiles * slices <= processors:
            return Plan(side, slices, tiles)
    return Plan(4, 10, max(1, processors // 10))


def accepts(h: Tensor, weights: SiteWeights) -> bool:
    """Whether the kernel takes a call: bf16, the published dimensions, a card of ten processors."""
    return (
        h.dtype == torch.bfloat16
        and tuple(h.shape[1:]) == (STREAMS, WIDTH)
        and weights.norm.dtype == torch.bfloat16
        and weights.base.shape[0] == OUTPUTS
    )


@cache
def _workspace(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Sums, squares and counters of the largest launch; counters are zero between launches."""
    cells = MOST_ROWS * 10 + 4096 * 40
    sums, squares = (torch.empty(n, device=device) for n in (cells * SUMS, cells))
    return sums, squares, torch.zeros(MOST_ROWS // 32, dtype=torch.int32, device=device)


def hyper_site(
    h: Tensor,
    y: Tensor,
    post: Tensor,
    comb: Tensor,
    pre: Tensor,
    weights: SiteWeights,
    norm_eps: float,
    hc_eps: float,
    iters: int,
    *,
    cut: Plan | None = None,
    cooperative: bool = False,
) -> Site:
    """As the reference."""
    if not accepts(h, weights) or h.shape[0] > MOST_ROWS:
        return triton.hyper_site(h, y, post, comb, pre, weights, norm_eps, hc_eps, iters)
    h, y, post, comb, pre = (x.contiguous() for x in (h, y, post, comb, pre))
    device, num_rows = h.device, h.shape[0]
    streams, x = torch.empty_like(h), torch.empty_like(y)
    new_pre, new_post, new_comb = (torch.empty_like(t) for t in (pre, post, comb))
    if num_rows:
        cut = cut or plan(num_rows, nvcc.processors(device))
        nvcc.call(
            nvcc.load(SOURCE), "hyper_site", device, h, y, weights.norm, post, comb, pre,
            weights.fn.fp32().contiguous(), weights.scale, weights.base, streams, x, new_pre,
            new_post, new_comb, *_workspace(device), num_rows, *cut, iters, norm_eps, hc_eps,
            int(cooperative),
        )  # fmt: skip
    return streams, x, new_pre, new_post, new_comb
