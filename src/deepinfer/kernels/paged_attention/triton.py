"""Attention to packed entries in Triton, decoded where they lie; long ones are loaded first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.attention.triton import attend_block, sparse_attention
from deepinfer.kernels.cache_io.triton import cache_load, group_size
from deepinfer.kernels.paged_attention.reference import through_steps
from deepinfer.kernels.quantize.triton import rounded
from deepinfer.kernels.rope.triton import rotate_tail
from deepinfer.kernels.tiles import (
    ceil_div,
    e2m1_value,
    e4m3_value,
    in_turn,
    launch,
    narrow,
    next_power,
    runs_on_bf16,
    ue8m0_value,
)

if TYPE_CHECKING:
    from deepinfer.kernels.cache_io import PagedCache
    from deepinfer.kernels.quantize import QuantFormat

_SLOTS, _HEADS = 64, 16
_LONG = 128  # of more values a block of entries decoded takes registers that there are not


@triton.jit
def _decoded(
    codes, scales, place, entries, code_block, code_entry, scale_block, scale_entry, D,
    FORMAT: tl.constexpr, SIZE: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Entries [BS, BD] in fp32; zeros where `place` is -1."""
    there = (place >= 0)[:, None]
    place = tl.maximum(place, 0)
    block, entry = place // entries, place % entries
    codes += (block * code_block + entry * code_entry)[:, None]
    dim = tl.arange(0, BD)[None, :]
    if FORMAT == "fp32":
        values = tl.load(codes + dim, there & (dim < D), 0.0)
    else:
        if FORMAT == "window_fp8":
            values = e4m3_value(tl.load(codes + dim, there & (dim < D), 0))
        else:
            pair = tl.arange(0, BD // 2)[None, :]
            both = tl.load(codes + pair, there & (pair < D // 2), 0).to(tl.int32)
            values = tl.reshape(tl.join(e2m1_value(both & 15), e2m1_value(both >> 4)), (BS, BD))
        group = tl.arange(0, BD // SIZE)[None, :]
        at = scales + (block * scale_block + entry * scale_entry)[:, None] + group
        byte = tl.load(at, there & (group < D // SIZE), 0)
        scale = e4m3_value(byte) if FORMAT == "main_fp4" else ue8m0_value(byte)
        values = tl.reshape(values, (BS, BD // SIZE, SIZE)) * scale[:, :, None]
        values = tl.where(there, tl.reshape(values, (BS, BD)), 0.0)
    return values


@triton.jit
def _walk(
    queries, peak, total, acc, idx, codes, scales, row, slots, entries, code_block, code_entry,
    scale_block, scale_entry, D, scale,
    FORMAT: tl.constexpr, SIZE: tl.constexpr, ROUND: tl.constexpr, BF16: tl.constexpr,
    BH: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Add the slots of one list, in blocks of BS."""
    for start in range(0, slots, BS):
        slot = start + tl.arange(0, BS)
        place = tl.load(idx + row * slots + slot, slot < slots, -1)
        keys = _decoded(
            codes, scales, place, entries, code_block, code_entry, scale_block, scale_entry, D,
            FORMAT, SIZE, BS, BD,
        )  # fmt: skip
        peak, total, acc = attend_block(
            queries, keys, place >= 0, peak, total, acc, scale, ROUND, BF16, BH, BS
        )
    return peak, total, acc


@triton.jit
def _attend(
    q, cos, sin, sink, out, window_idx, window_codes, window_scales,
    main_idx, main_codes, main_scales,
    H, D, R, W, K, window_entries, window_cb, window_ce, window_sb, window_se,
    main_entries, main_cb, main_ce, main_sb, main_se, scale,
    WINDOW: tl.constexpr, WINDOW_SIZE: tl.constexpr, MAIN: tl.constexpr, MAIN_SIZE: tl.constexpr,
    TURN: tl.constexpr, QUANTIZE: tl.constexpr, QUANTIZE_SIZE: tl.constexpr,
    ROUND: tl.constexpr, BF16: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """A row's group of heads; MAIN and QUANTIZE are "" where there is none."""
    in_turn()
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) * BH + tl.arange(0, BH)
    dim = tl.arange(0, BD)
    held = (head < H)[:, None] & (dim < D)[None, :]
    at = (row * H + head[:, None]) * D + dim[None, :]
    queries = tl.load(q + at, held, 0.0).to(tl.float32)
    if TURN:
        turned = (dim >= D - R) & (dim < D)
        odd = (dim - (D - R)) % 2
        partner = (at - dim[None, :]) + tl.where(turned, dim + 1 - 2 * odd, 0)[None, :]
        others = tl.load(q + partner, held & turned[None, :], 0.0).to(tl.float32)
        angle = row * (R // 2) + tl.where(turned, (dim - (D - R)) // 2, 0)
        c = tl.load(cos + angle, turned, 0.0)
        s = tl.load(sin + angle, turned, 0.0)
        others = queries * c[None, :] + others * tl.where(odd == 1, s, -s)[None, :]
        queries = tl.where(turned[None, :], narrow(others, dtype).to(tl.float32), queries)
    peak = tl.full((BH,), -1e30, tl.float32)
    total = tl.zeros((BH,), tl.float32)
    acc = tl.zeros((BH, BD), tl.float32)
    peak, total, acc = _walk(
        queries, peak, total, acc, window_idx, window_codes, window_scales, row, W,
        window_entries, window_cb, window_ce, window_sb, window_se, D, scale,
        WINDOW, WINDOW_SIZE, ROUND, BF16, BH, BD, BS,
    )  # fmt: skip
    if MAIN != "":
        peak, total, acc = _walk(
            queries, peak, total, acc, main_idx, main_codes, main_scales, row, K,
            main_entries, main_cb, main_ce, main_sb, main_se, D, scale,
            MAIN, MAIN_SIZE, ROUND, BF16, BH, BD, BS,
        )  # fmt: skip
    total += tl.exp(tl.load(sink + head, head < H, 0.0) - peak)
    acc = tl.div_rn(acc, tl.broadcast_to(total[:, None], acc.shape))
    if TURN:
        even, odd = tl.split(tl.reshape(narrow(acc, dtype).to(tl.float32), (BH, BD // 2, 2)))
        pair = tl.arange(0, BD // 2) - (D - R) // 2
        turned = (pair >= 0) & (pair < R // 2)
        c = tl.load(cos + row * (R // 2) + pair, turned, 1.0)[None, :]
        s = tl.load(sin + row * (R // 2) + pair, turned, 0.0)[None, :]
        turned = turned[None, :]
        back = tl.where(turned, even * c + odd * s, even)
        odd = tl.where(turned, odd * c - even * s, odd)
        acc = tl.reshape(tl.join(back, odd), (BH, BD))
    if QUANTIZE != "":
        acc = narrow(acc, dtype).to(tl.float32)
        groups = tl.reshape(acc, (BH * (BD // QUANTIZE_SIZE), QUANTIZE_SIZE))
        acc = tl.reshape(rounded(groups, QUANTIZE), (BH, BD))
    tl.store(out + at, narrow(acc, dtype), held)


def paged_attention(
    q: Tensor,
    window: PagedCache,
    window_idx: Tensor,
    main: PagedCache | None,
    main_idx: Tensor | None,
    sink: Tensor,
    scale: float,
    round_weights: bool,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    quantize: QuantFormat | None = None,
) -> Tensor:
    """As the reference, but for where a block of slots ends: each list starts its own."""
    q = q.contiguous()
    num_rows, heads, dim = q.shape
    if dim > _LONG:
        steps = cache_load, sparse_attention, rotate_tail
        rest = sink, scale, round_weights, cos, sin, quantize
        return through_steps(steps, q, window, window_idx, main, main_idx, *rest)
    out = torch.empty_like(q)
    both = main is not None and main_idx is not None
    second = main if main is not None and both else window
    second_idx = main_idx if main_idx is not None and both else window_idx
    turns = (sink[None], sink[None])
    if cos is not None and sin is not None:
        turns = cos.contiguous(), sin.contiguous()
    parts, sizes = _parts(window)
    second_parts, second_sizes = _parts(second)
    launch(
        _attend, (ceil_div(heads, _HEADS), num_rows),
        q, *turns, sink, out, window_idx.contiguous(), *parts,
        second_idx.contiguous(), *second_parts,
        heads, dim, 2 * turns[0].shape[1], window_idx.shape[1], second_idx.shape[1],
        *sizes, *second_sizes, float(scale),
        WINDOW=window.format, WINDOW_SIZE=group_size(window),
        MAIN=second.format if both else "", MAIN_SIZE=group_size(second),
        TURN=cos is not None, QUANTIZE=quantize or "", QUANTIZE_SIZE=_size(quantize),
        ROUND=round_weights, BF16=runs_on_bf16(q.dtype), BH=_HEADS, BD=next_power(dim, 32),
        BS=_SLOTS,
    )  # fmt: skip
    return out


def _size(quantize: QuantFormat | None) -> int:
    return 16 if quantize == "act4_e4" else 32


def _parts(cache: PagedCache) -> tuple[tuple[Tensor, Tensor], tuple[int, ...]]:
    """Return codes and scales, entries of a block, and strides."""
    codes = cache.codes
    scales = codes if cache.scales is None else cache.scales
    return (codes, scales), (
        codes.shape[1], codes.stride(0), codes.stride(1), scales.stride(0), scales.stride(1),
    )  # fmt: skip
