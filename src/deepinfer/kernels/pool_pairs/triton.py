"""Pairs pooled in Triton: one program per entry; the tail is kept by a launch of its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.tiles import in_turn, launch, narrow, next_power


@triton.jit
def _token(
    gate, value, ring, load, place, H, D, gate_row, value_row, length, slot_row, entry_row,
    column, held,
):  # fmt: skip
    """Gate and value of a place in [loads | rows]."""
    old = place < H
    at = tl.maximum(tl.load(load + place, old, 0), 0)
    row = tl.where(old, 0, place - H)
    kept = ring + (at // length) * slot_row + (at % length) * entry_row
    g = tl.load(kept + column, held & old, 0.0)
    v = tl.load(kept + D + column, held & old, 0.0)
    g = tl.where(old, g, tl.load(gate + row * gate_row + column, held & (old == 0), 0.0))
    v = tl.where(old, v, tl.load(value + row * value_row + column, held & (old == 0), 0.0))
    return g, v


@triton.jit
def _pool(
    gate, value, ring, load, rows, emit, norm, out, H, D, gate_row, value_row, length, slot_row,
    entry_row, eps, BD: tl.constexpr,
):  # fmt: skip
    in_turn()
    n = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BD)
    held = column < D
    end = tl.load(emit + n)
    later, earlier = tl.load(rows + 2 * end), tl.load(rows + 2 * end + 1)
    g0, v0 = _token(
        gate, value, ring, load, earlier, H, D, gate_row, value_row, length, slot_row, entry_row,
        column, held,
    )  # fmt: skip
    g1, v1 = _token(
        gate, value, ring, load, later, H, D, gate_row, value_row, length, slot_row, entry_row,
        column, held,
    )  # fmt: skip
    peak = tl.maximum(g0, g1)
    e0, e1 = tl.exp(g0 - peak), tl.exp(g1 - peak)
    total = e0 + e1
    pooled = tl.div_rn(e0, total) * v0 + tl.div_rn(e1, total) * v1
    pooled = narrow(tl.where(held, pooled, 0.0), out.dtype.element_ty).to(tl.float32)
    mean = tl.div_rn(tl.sum(pooled * pooled, 0), tl.cast(D, tl.float32))
    scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    normed = tl.load(norm + column, held, 0.0) * (pooled * scale)
    tl.store(out + n * D + column, narrow(normed, out.dtype.element_ty), held)


@triton.jit
def _keep(
    gate, value, ring, store, rows, D, gate_row, value_row, length, slot_row, entry_row,
    BD: tl.constexpr,
):  # fmt: skip
    in_turn()
    n = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BD)
    held = column < D
    place, row = tl.load(store + n), tl.load(rows + n)
    target = ring + (place // length) * slot_row + (place % length) * entry_row
    tl.store(target + column, tl.load(gate + row * gate_row + column, held, 0.0), held)
    tl.store(target + D + column, tl.load(value + row * value_row + column, held, 0.0), held)


def pool_pairs(
    gate: Tensor,
    value: Tensor,
    ring: Tensor,
    load: Tensor,
    rows: Tensor,
    emit: Tensor,
    norm: Tensor,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """As `pool_pairs.pool_pairs`."""
    count, dim = emit.shape[0], gate.shape[1]
    out = torch.empty(count, dim, dtype=dtype, device=gate.device)
    if count:
        launch(
            _pool, (count,), gate, value, ring, load.contiguous(), rows.contiguous(),
            emit.contiguous(), norm.contiguous(), out, load.shape[0], dim, gate.stride(0),
            value.stride(0), ring.shape[1], ring.stride(0), ring.stride(1), eps, BD=next_power(dim),
        )  # fmt: skip
    return out


def keep_tail(gate: Tensor, value: Tensor, ring: Tensor, store: Tensor, rows: Tensor) -> None:
    """As `pool_pairs.keep_tail`."""
    if store.shape[0]:
        launch(
            _keep, (store.shape[0],), gate, value, ring, store.contiguous(), rows.contiguous(),
            gate.shape[1], gate.stride(0), value.stride(0), ring.shape[1], ring.stride(0),
            ring.stride(1), BD=next_power(gate.shape[1]),
        )  # fmt: skip
