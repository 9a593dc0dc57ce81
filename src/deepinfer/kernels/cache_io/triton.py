"""Cache entries in Triton: one program per entry, any layout inside the block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.tiles import (
    act4_e4_scale,
    act4_e8_scale,
    act8_scale,
    e2m1_code,
    e2m1_round,
    e2m1_value,
    e4m3_code,
    e4m3_round,
    e4m3_value,
    in_turn,
    launch,
    next_power,
    pow2_inverse,
    ue8m0_value,
)

if TYPE_CHECKING:
    from deepinfer.kernels.cache_io import PagedCache


@triton.jit
def put_entry(
    x, place, codes, scales, dense, D, entries,
    code_block, code_entry, scale_block, scale_entry, dense_block, dense_entry,
    FORMAT: tl.constexpr, DENSE: tl.constexpr, G: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Quantize x [G, SIZE] fp32, of which the first D / SIZE groups exist, into entry `place`."""
    block, entry = place // entries, place % entries
    group = tl.arange(0, G)
    held = (group < D // SIZE)[:, None]
    at = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    target = codes + block * code_block + entry * code_entry
    if FORMAT == "fp32":
        tl.store(target + at, x, held)
    else:
        amax = tl.max(tl.abs(x), 1)[:, None]
        if FORMAT == "window_fp8":
            scale = act8_scale(amax)
            rounded = e4m3_round(x * pow2_inverse(scale))
            tl.store(target + at, e4m3_code(rounded).to(tl.uint8), held)
        else:
            if FORMAT == "main_fp4":
                scale = act4_e4_scale(amax)
                rounded = e2m1_round(tl.div_rn(x, tl.broadcast_to(scale, x.shape)))
            else:
                scale = act4_e8_scale(amax)
                rounded = e2m1_round(x * pow2_inverse(scale))
            low, high = tl.split(tl.reshape(e2m1_code(rounded), (G, SIZE // 2, 2)))
            pair = group[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
            tl.store(target + pair, (low | (high << 4)).to(tl.uint8), held)
        if FORMAT == "main_fp4":
            byte = e4m3_code(scale)
        else:
            byte = scale.to(tl.int32, bitcast=True) >> 23
        at_scale = scales + block * scale_block + entry * scale_entry + group[:, None]
        tl.store(at_scale, byte.to(tl.uint8), held)
        if DENSE:
            copy = dense + block * dense_block + entry * dense_entry
            tl.store(copy + at, rounded * scale, held)


@triton.jit
def _store(
    values, idx, codes, scales, dense, D, value_row, entries,
    code_block, code_entry, scale_block, scale_entry, dense_block, dense_entry,
    FORMAT: tl.constexpr, DENSE: tl.constexpr, G: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """G groups of SIZE values, of which the first D / SIZE exist."""
    in_turn()
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(idx + row)
    if place >= 0:
        group = tl.arange(0, G)
        held = (group < D // SIZE)[:, None]
        at = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        x = tl.load(values + row * value_row + at, held, 0.0).to(tl.float32)
        put_entry(
            x, place, codes, scales, dense, D, entries,
            code_block, code_entry, scale_block, scale_entry, dense_block, dense_entry,
            FORMAT, DENSE, G, SIZE,
        )  # fmt: skip


@triton.jit
def _load(
    idx, codes, scales, out, D, entries, code_block, code_entry, scale_block, scale_entry,
    FORMAT: tl.constexpr, G: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    in_turn()
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(idx + row)
    present = place >= 0
    place = tl.maximum(place, 0)
    block, entry = place // entries, place % entries
    group = tl.arange(0, G)
    held = (group < D // SIZE)[:, None]
    at = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    source = codes + block * code_block + entry * code_entry
    if FORMAT == "fp32":
        values = tl.load(source + at, held & present, 0.0)
    else:
        if FORMAT == "window_fp8":
            values = e4m3_value(tl.load(source + at, held & present, 0))
        else:
            pair = group[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
            both = tl.load(source + pair, held & present, 0).to(tl.int32)
            values = tl.join(e2m1_value(both & 15), e2m1_value(both >> 4))
            values = tl.reshape(values, (G, SIZE))
        at_scale = scales + block * scale_block + entry * scale_entry + group[:, None]
        byte = tl.load(at_scale, held & present, 0)
        values *= e4m3_value(byte) if FORMAT == "main_fp4" else ue8m0_value(byte)
    tl.store(out + row * D + at, values, held)


def group_size(cache: PagedCache) -> int:
    """Values that a program takes as a group: of one scale, or of a divisor of the entry."""
    return 16 if cache.format == "main_fp4" or cache.dim % 32 else 32


def parts_of(cache: PagedCache) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Return codes, scales and decoded copies, something else where there are none, and strides."""
    codes = cache.codes
    scales = codes if cache.scales is None else cache.scales
    dense = codes if cache.dense is None else cache.dense
    return (codes, scales, dense), (
        codes.stride(0), codes.stride(1), scales.stride(0), scales.stride(1),
        dense.stride(0), dense.stride(1),
    )  # fmt: skip


def cache_store(cache: PagedCache, values: Tensor, idx: Tensor) -> None:
    """As the reference."""
    values = values if values.stride(1) == 1 else values.contiguous()
    size = group_size(cache)
    parts, strides = parts_of(cache)
    launch(
        _store, (idx.shape[0],), values, idx.contiguous(), *parts, cache.dim, values.stride(0),
        cache.codes.shape[1], *strides, FORMAT=cache.format, DENSE=cache.dense is not None,
        G=next_power(cache.dim // size), SIZE=size,
    )  # fmt: skip


def cache_load(cache: PagedCache, idx: Tensor) -> Tensor:
    """As the reference; decodes even where decoded copies exist."""
    out = torch.empty(idx.shape[0], cache.dim, dtype=torch.float32, device=idx.device)
    codes, size = cache.codes, group_size(cache)
    scales = codes if cache.scales is None else cache.scales
    launch(
        _load, (idx.shape[0],), idx.contiguous(), codes, scales, out, cache.dim, codes.shape[1],
        codes.stride(0), codes.stride(1), scales.stride(0), scales.stride(1),
        FORMAT=cache.format, G=next_power(cache.dim // size), SIZE=size,
    )  # fmt: skip
    return out


@triton.jit
def _copy(
    idx, places, codes, scales, to_codes, to_scales, code_bytes, scale_bytes, entries, to_entries,
    code_block, code_entry, scale_block, scale_entry,
    to_code_block, to_code_entry, to_scale_block, to_scale_entry,
    PLACED: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    in_turn()
    row = tl.program_id(0).to(tl.int64)
    old = tl.load(idx + row)
    new = tl.load(places + row) if PLACED else row
    if (old >= 0) & (new >= 0):
        block, entry = old // entries, old % entries
        to_block, to_entry = new // to_entries, new % to_entries
        at = tl.arange(0, BC)
        byte = tl.load(codes + block * code_block + entry * code_entry + at, at < code_bytes, 0)
        into = to_codes + to_block * to_code_block + to_entry * to_code_entry + at
        tl.store(into, byte, at < code_bytes)
        at = tl.arange(0, BS)
        byte = tl.load(scales + block * scale_block + entry * scale_entry + at, at < scale_bytes, 0)
        into = to_scales + to_block * to_scale_block + to_entry * to_scale_entry + at
        tl.store(into, byte, at < scale_bytes)


def copy_entries(
    source: PagedCache, idx: Tensor, target: PagedCache, places: Tensor | None
) -> None:
    """As `cache_io.copy_entries`."""
    assert source.scales is not None and target.scales is not None
    codes, scales = source.codes, source.scales
    launch(
        _copy, (idx.shape[0],), idx.contiguous(), idx if places is None else places.contiguous(),
        codes, scales, target.codes, target.scales, codes.shape[2], scales.shape[2],
        codes.shape[1], target.codes.shape[1], codes.stride(0), codes.stride(1), scales.stride(0),
        scales.stride(1), target.codes.stride(0), target.codes.stride(1), target.scales.stride(0),
        target.scales.stride(1), PLACED=places is not None, BC=next_power(codes.shape[2]),
        BS=next_power(scales.shape[2]),
    )  # fmt: skip
