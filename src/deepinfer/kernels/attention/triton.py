"""Sparse attention in Triton: one program per row and group of heads walks the row's slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.tiles import ceil_div, dot, launch, narrow, next_power, runs_on_bf16

_SLOTS = 64
_FEW_SLOTS = 16
_LONG = 128
_HEADS = 16


@triton.jit
def attend_block(
    queries, keys, present, peak, total, acc, scale,
    ROUND: tl.constexpr, BF16: tl.constexpr, BH: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Add BS keys to running maximum, sum and weighted sum; those not `present` count nothing."""
    scores = dot(queries, tl.trans(keys), tl.zeros((BH, BS), tl.float32), BF16) * scale
    scores = tl.where(present[None, :], scores, float("-inf"))
    new = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp(scores - new[:, None])
    fade = tl.exp(peak - new)
    total = total * fade + tl.sum(weights, 1)
    if ROUND:
        weights = narrow(weights, tl.bfloat16).to(tl.float32)
    acc = dot(weights, keys, acc * fade[:, None], BF16 and ROUND)
    return new, total, acc


@triton.jit
def _walk(
    queries, peak, total, acc, entries, idx, row, slots, batch, entry_row, D, scale,
    OWN: tl.constexpr, ROUND: tl.constexpr, BF16: tl.constexpr,
    BH: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Add the slots of one list, in blocks of BS; OWN entries are the row's."""
    dim = tl.arange(0, BD)
    for start in range(0, slots, BS):
        slot = start + tl.arange(0, BS)
        place = tl.load(idx + row * slots + slot, slot < slots, -1)
        present = place >= 0
        if OWN:
            at = entries + row * batch + slot.to(tl.int64) * entry_row
        else:
            at = entries + place * entry_row
        held = present[:, None] & (dim < D)[None, :]
        keys = tl.load(at[:, None] + dim[None, :], held, 0.0)
        peak, total, acc = attend_block(
            queries, keys, present, peak, total, acc, scale, ROUND, BF16, BH, BS
        )
    return peak, total, acc


@triton.jit
def _attend(
    q, window_kv, window_idx, main_kv, main_idx, sink, out, H, D, W, K,
    window_batch, window_row, main_batch, main_row, scale,
    WINDOW_OWN: tl.constexpr, MAIN_OWN: tl.constexpr, MAIN: tl.constexpr, ROUND: tl.constexpr,
    BF16: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) * BH + tl.arange(0, BH)
    dim = tl.arange(0, BD)
    held = (head < H)[:, None] & (dim < D)[None, :]
    at = (row * H + head[:, None]) * D + dim[None, :]
    queries = tl.load(q + at, held, 0.0).to(tl.float32)
    peak = tl.full((BH,), -1e30, tl.float32)
    total = tl.zeros((BH,), tl.float32)
    acc = tl.zeros((BH, BD), tl.float32)
    peak, total, acc = _walk(
        queries, peak, total, acc, window_kv, window_idx, row, W, window_batch, window_row,
        D, scale, WINDOW_OWN, ROUND, BF16, BH, BD, BS,
    )  # fmt: skip
    if MAIN:
        peak, total, acc = _walk(
            queries, peak, total, acc, main_kv, main_idx, row, K, main_batch, main_row,
            D, scale, MAIN_OWN, ROUND, BF16, BH, BD, BS,
        )  # fmt: skip
    total += tl.exp(tl.load(sink + head, head < H, 0.0) - peak)
    acc = tl.div_rn(acc, tl.broadcast_to(total[:, None], acc.shape))
    tl.store(out + at, narrow(acc, out.dtype.element_ty), held)


def sparse_attention(
    q: Tensor,
    window_kv: Tensor,
    window_idx: Tensor,
    main_kv: Tensor | None,
    main_idx: Tensor | None,
    sink: Tensor,
    scale: float,
    round_weights: bool,
) -> Tensor:
    """As the reference, but for where a block of 64 slots ends: each list starts its own."""
    q = q.contiguous()
    out = torch.empty_like(q)
    num_rows, heads, dim = q.shape
    main = main_kv is not None and main_idx is not None
    extra_kv = main_kv if main_kv is not None else window_kv
    extra_idx = main_idx if main_idx is not None else window_idx
    window_kv, extra_kv = (
        t if t.stride(-1) == 1 else t.contiguous() for t in (window_kv, extra_kv)
    )
    # Products in fp32 are unrolled: of long vectors and many slots they compile for minutes.
    few = dim > _LONG and not round_weights
    launch(
        _attend, (ceil_div(heads, _HEADS), num_rows),
        q, window_kv, window_idx.contiguous(), extra_kv, extra_idx.contiguous(), sink, out,
        heads, dim, window_idx.shape[1], extra_idx.shape[1] if main else 0,
        window_kv.stride(0), window_kv.stride(-2), extra_kv.stride(0), extra_kv.stride(-2),
        float(scale), WINDOW_OWN=window_kv.ndim == 3, MAIN_OWN=extra_kv.ndim == 3, MAIN=main,
        ROUND=round_weights, BF16=runs_on_bf16(q.dtype),
        BH=_HEADS, BD=next_power(dim, 16), BS=_FEW_SLOTS if few else _SLOTS,
    )  # fmt: skip
    return out
