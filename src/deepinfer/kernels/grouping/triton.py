"""Grouping in Triton: one program per expert finds its choices, one per row adds its terms."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.grouping import Groups
from deepinfer.kernels.tiles import ceil_div, in_turn, launch, narrow, next_power

_BLOCK = 1024


@triton.jit
def _choice(chosen, live, at, P, K, E, LIVE: tl.constexpr):
    """Experts of choices, E for those left out, E + 1 behind the end."""
    choice = tl.load(chosen + at, at < P, -1).to(tl.int32)
    choice = tl.where((choice < 0) | (choice >= E), E, choice)
    if LIVE:
        choice = tl.where(tl.load(live + at // K, at < P, 0) != 0, choice, E)
    return tl.where(at < P, choice, E + 1)


@triton.jit
def _group(
    chosen, weight, live, rows, weights, place, offsets, P, K, E,
    LIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program e < E collects the choices of expert e, program E those that are left out."""
    in_turn()
    expert = tl.program_id(0)
    before = tl.full((), 0, tl.int32)
    count = tl.full((), 0, tl.int32)
    for start in range(0, P, BLOCK):
        at = start + tl.arange(0, BLOCK)
        choice = _choice(chosen, live, at, P, K, E, LIVE)
        before += tl.sum((choice < expert).to(tl.int32), 0)
        count += tl.sum((choice == expert).to(tl.int32), 0)
    tl.store(offsets + expert, before.to(tl.int64))
    if count > 0:
        for start in range(0, P, BLOCK):
            at = start + tl.arange(0, BLOCK)
            mine = _choice(chosen, live, at, P, K, E, LIVE) == expert
            target = before + tl.cumsum(mine.to(tl.int32), 0) - 1
            tl.store(rows + target, (at // K).to(tl.int64), mine)
            tl.store(weights + target, tl.load(weight + at, mine, 0.0), mine)
            told = tl.where(expert < E, target, -1)
            tl.store(place + at, told.to(tl.int64), mine)
            before += tl.sum(mine.to(tl.int32), 0)


def group(chosen: Tensor, weight: Tensor, num_experts: int, live: Tensor | None = None) -> Groups:
    """As `grouping.group`."""
    chosen, weight = chosen.contiguous(), weight.contiguous()
    total, device = chosen.numel(), chosen.device
    rows = torch.empty(total, dtype=torch.int64, device=device)
    weights = torch.empty(total, dtype=torch.float32, device=device)
    place = torch.empty_like(chosen)
    offsets = torch.empty(num_experts + 1, dtype=torch.int64, device=device)
    launch(
        _group, (num_experts + 1,), chosen, weight,
        chosen if live is None else live.contiguous().view(torch.uint8),
        rows, weights, place, offsets, total, chosen.shape[1], num_experts,
        LIVE=live is not None, BLOCK=min(_BLOCK, next_power(total, 16)),
    )  # fmt: skip
    return Groups(rows, weights, place, offsets)


@triton.jit
def added(
    routed, place, shared, row, column, held, C, shared_row,
    K: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Columns [BLOCK] of a row's terms, added up in fp32."""
    choice = tl.arange(0, BK)
    places = tl.load(place + row * K + choice, choice < K, -1)
    last = tl.full((), -1, tl.int64)
    far = tl.full((), 1 << 40, tl.int64)
    acc = tl.zeros((BLOCK,), tl.float32)
    for _ in tl.static_range(K):
        following = tl.min(tl.where(places > last, places, far), 0)
        known = following < far
        at = routed + tl.where(known, following, 0) * C + column
        acc += tl.load(at, held & known, 0.0).to(tl.float32)
        last = following
    return acc + tl.load(shared + row * shared_row + column, held, 0.0).to(tl.float32)


@triton.jit
def _combine(
    routed, place, shared, out, C, shared_row,
    K: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    in_turn()
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = column < C
    acc = added(routed, place, shared, row, column, held, C, shared_row, K, BK, BLOCK)
    tl.store(out + row * C + column, narrow(acc, out.dtype.element_ty), held)


def combine(routed: Tensor, place: Tensor, shared: Tensor) -> Tensor:
    """As `grouping.combine`."""
    routed = routed.contiguous()
    shared = shared if shared.stride(1) == 1 else shared.contiguous()
    num_rows, dim = shared.shape
    out = torch.empty(num_rows, dim, dtype=shared.dtype, device=shared.device)
    block = min(1024, next_power(dim))
    if num_rows:
        launch(
            _combine, (ceil_div(dim, block), num_rows), routed, place.contiguous(), shared, out,
            dim, shared.stride(0), K=place.shape[1], BK=next_power(place.shape[1]), BLOCK=block,
        )  # fmt: skip
    return out
