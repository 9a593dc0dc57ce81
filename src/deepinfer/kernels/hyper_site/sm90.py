"""A hyper-connection site in CUDA C++ for SM90: one launch, streams read and written once.

`sm90.cu` says how. Other dimensions than four streams of 5120 run in Triton. Calls on one device
share a workspace, so they belong to one stream at a time.
"""

from __future__ import annotations

import weakref
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from deepinfer.kernels import nvcc
from deepinfer.kernels.hyper_site import triton

if TYPE_CHECKING:
    from deepinfer.kernels.hyper_site import Site, SiteWeights
    from deepinfer.kernels.linear import DenseWeight

__all__ = ["accepts", "hyper_site", "plan", "prepared"]

SOURCE: Final = Path(__file__).with_name("sm90.cu")
STREAMS, WIDTH, OUTPUTS, SUMS = 4, 5120, 24, 28
MOST_ROWS: Final = 1 << 15  # of one launch


class Plan(NamedTuple):
    """How a launch is cut: form of the kernel, slices of the channels, groups of blocks.

    Forms: tiles of 32 tokens with 4 or 8 warps, tiles of 64 with 16.
    """

    form: int
    slices: int
    groups: int

    @property
    def tile(self) -> int:
        """Tokens of a tile."""
        return 64 if self.form == 2 else 32


def plan(num_rows: int, processors: int) -> Plan:
    """Cut a launch so that all its blocks run at once, and as many of them as there is work for."""
    for form, slices in ((0, 40), (1, 20), (1, 10)):
        tiles = -(-num_rows // 32)
        if tiles * slices <= processors:
            return Plan(form, slices, tiles)
    return Plan(2, 10, max(1, min(processors // 10, -(-num_rows // 64))))


_prepared: dict[int, Tensor] = {}


def prepared(fn: DenseWeight) -> Tensor:
    """Return a projection as [chunk, stream, part, output, 32] bf16, two parts that add up to it.

    Made once per weight, kept as long as the weight lives, as large as its fp32 form.
    """
    key = id(fn.stored)
    if key not in _prepared:
        whole = fn.fp32().view(OUTPUTS, STREAMS, -1, 32)
        high = whole.bfloat16()
        low = (whole - high.float()).bfloat16()
        _prepared[key] = torch.stack([high, low]).permute(3, 2, 0, 1, 4).contiguous()
        weakref.finalize(fn.stored, _prepared.pop, key, None)
    return _prepared[key]


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
            prepared(weights.fn), weights.scale, weights.base, streams, x, new_pre,
            new_post, new_comb, *_workspace(device), num_rows, *cut, iters, norm_eps, hc_eps,
        )  # fmt: skip
    return streams, x, new_pre, new_post, new_comb
