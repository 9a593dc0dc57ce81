"""Latent and entry in Triton: one program per row, the entry returned or stored in its cache.

Norms, which no kernel of a step writes, are read before the kernel in front has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.cache_io.triton import group_size, parts_of, put_entry
from deepinfer.kernels.tiles import act8_round_trip, in_turn, launch, narrow, next_power

if TYPE_CHECKING:
    from deepinfer.kernels.cache_io import PagedCache


@triton.jit
def _norm_scale(values, D, eps):
    mean = tl.div_rn(tl.sum(values * values, 0), tl.cast(D, tl.float32))
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))


@triton.jit
def _put_latent(
    source, gain, latent, row, Q, eps, QUANTIZE: tl.constexpr, BQ: tl.constexpr
):  # fmt: skip
    column = tl.arange(0, BQ)
    held = column < Q
    values = tl.load(source + column, held, 0.0).to(tl.float32)
    scale = _norm_scale(values, Q, eps)
    normed = gain * (values * scale)
    if QUANTIZE:
        normed = narrow(normed, latent.dtype.element_ty).to(tl.float32)
        normed = tl.reshape(act8_round_trip(tl.reshape(normed, (1, BQ)), 1, BQ), (BQ,))
    tl.store(latent + row * Q + column, narrow(normed, latent.dtype.element_ty), held)


@triton.jit
def _latent_entry(
    both, q_norm, kv_norm, cos, sin, latent, entry, Q, D, R, stride, eps,
    QUANTIZE: tl.constexpr, BQ: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    gain = tl.load(q_norm + tl.arange(0, BQ), tl.arange(0, BQ) < Q, 0.0)
    in_turn()
    row = tl.program_id(0).to(tl.int64)
    source = both + row * stride
    _put_latent(source, gain, latent, row, Q, eps, QUANTIZE, BQ)
    source += Q
    column = tl.arange(0, BD)
    held = column < D
    values = tl.load(source + column, held, 0.0).to(tl.float32)
    scale = _norm_scale(values, D, eps)
    normed = tl.load(kv_norm + column, held, 0.0) * (values * scale)
    kept = column < D - R
    tl.store(entry + row * D + column, narrow(normed, entry.dtype.element_ty), kept)
    pair = tl.arange(0, BR)
    held = pair < R // 2
    place = D - R + 2 * pair
    even = tl.load(source + place, held, 0.0).to(tl.float32) * scale
    odd = tl.load(source + place + 1, held, 0.0).to(tl.float32) * scale
    even = narrow(tl.load(kv_norm + place, held, 0.0) * even, entry.dtype.element_ty)
    odd = narrow(tl.load(kv_norm + place + 1, held, 0.0) * odd, entry.dtype.element_ty)
    even, odd = even.to(tl.float32), odd.to(tl.float32)
    c = tl.load(cos + row * (R // 2) + pair, held, 0.0)
    s = tl.load(sin + row * (R // 2) + pair, held, 0.0)
    target = entry + row * D + place
    tl.store(target, narrow(even * c - odd * s, entry.dtype.element_ty), held)
    tl.store(target + 1, narrow(even * s + odd * c, entry.dtype.element_ty), held)


@triton.jit
def _put_row(
    source, gains, gains_beside, cos, sin, idx, codes, scales, dense, row, D, R, eps, entries,
    code_block, code_entry, scale_block, scale_entry, dense_block, dense_entry,
    NORM: tl.constexpr, FORMAT: tl.constexpr, DENSE: tl.constexpr,
    BD: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and quantize one row's entry into its place.

    gains are the norm's, gains_beside those of every value's partner.
    """
    place = tl.load(idx + row)
    column = tl.arange(0, BD)
    held = column < D
    turned = held & (column >= D - R)
    odd = (column - (D - R)) % 2
    partner = tl.where(turned, column + 1 - 2 * odd, 0)
    pair = tl.where(turned, (column - (D - R)) // 2, 0)
    c = tl.load(cos + row * (R // 2) + pair, turned, 0.0)
    s = tl.load(sin + row * (R // 2) + pair, turned, 0.0)
    values = tl.load(source + column, held, 0.0).to(tl.float32)
    others = tl.load(source + partner, turned, 0.0).to(tl.float32)
    if NORM:
        scale = _norm_scale(values, D, eps)
        values = narrow(gains * (values * scale), source.dtype.element_ty).to(tl.float32)
        others = narrow(gains_beside * (others * scale), source.dtype.element_ty).to(tl.float32)
    rotated = values * c + others * tl.where(odd == 1, s, -s)
    rotated = narrow(rotated, source.dtype.element_ty).to(tl.float32)
    made = tl.reshape(tl.where(turned, rotated, values), (BD // SIZE, SIZE))
    if place >= 0:
        put_entry(
            made, place, codes, scales, dense, D, entries,
            code_block, code_entry, scale_block, scale_entry, dense_block, dense_entry,
            FORMAT, DENSE, BD // SIZE, SIZE,
        )  # fmt: skip


@triton.jit
def _latent_store(
    both, q_norm, kv_norm, cos, sin, idx, latent, codes, scales, dense, Q, D, R, stride, eps,
    entries, code_block, code_entry, scale_block, scale_entry, dense_block, dense_entry,
    LATENT: tl.constexpr, QUANTIZE: tl.constexpr, NORM: tl.constexpr,
    FORMAT: tl.constexpr, DENSE: tl.constexpr,
    BQ: tl.constexpr, BD: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """As `_latent_entry`, the entry quantized into its cache by a program of its own."""
    row = tl.program_id(0).to(tl.int64)
    source = both + row * stride
    if LATENT and tl.program_id(1) == 1:
        gain = tl.load(q_norm + tl.arange(0, BQ), tl.arange(0, BQ) < Q, 0.0)
        in_turn()
        _put_latent(source, gain, latent, row, Q, eps, QUANTIZE, BQ)
    else:
        column = tl.arange(0, BD)
        gains = tl.zeros((BD,), tl.float32)
        gains_beside = gains
        if NORM:
            partner = tl.where(column >= D - R, column + 1 - 2 * ((column - (D - R)) % 2), 0)
            gains = tl.load(kv_norm + column, column < D, 0.0)
            gains_beside = tl.load(kv_norm + partner, column < D, 0.0)
        in_turn()
        _put_row(
            source + Q, gains, gains_beside, cos, sin, idx, codes, scales, dense, row, D, R, eps,
            entries, code_block, code_entry, scale_block, scale_entry, dense_block, dense_entry,
            NORM, FORMAT, DENSE, BD, SIZE,
        )  # fmt: skip


def latent_entry(
    both: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    quantize: bool = False,
) -> tuple[Tensor, Tensor]:
    """As the reference."""
    both = both if both.stride(1) == 1 else both.contiguous()
    num_rows, rank, dim = both.shape[0], q_norm.shape[0], kv_norm.shape[0]
    latent = torch.empty(num_rows, rank, dtype=both.dtype, device=both.device)
    entry = torch.empty(num_rows, dim, dtype=both.dtype, device=both.device)
    rotated = 2 * cos.shape[1]
    launch(
        _latent_entry, (num_rows,), both, q_norm.contiguous(), kv_norm.contiguous(),
        cos.contiguous(), sin.contiguous(), latent, entry, rank, dim, rotated, both.stride(0), eps,
        QUANTIZE=quantize, BQ=next_power(rank, 32), BD=next_power(dim),
        BR=next_power(max(1, rotated // 2)),
    )  # fmt: skip
    return latent, entry


def latent_store(
    both: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    quantize: bool,
    cache: PagedCache,
    idx: Tensor,
) -> Tensor:
    """As the reference."""
    latent = torch.empty(both.shape[0], q_norm.shape[0], dtype=both.dtype, device=both.device)
    _launch_store(both, q_norm, kv_norm, cos, sin, eps, cache, idx, latent, quantize)
    return latent


def entry_store(
    x: Tensor,
    norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    cache: PagedCache,
    idx: Tensor,
) -> None:
    """As the reference."""
    _launch_store(x, None, norm, cos, sin, eps, cache, idx, None, False)


def _launch_store(
    both: Tensor,
    q_norm: Tensor | None,
    kv_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    cache: PagedCache,
    idx: Tensor,
    latent: Tensor | None,
    quantize: bool,
) -> None:
    both = both if both.stride(1) == 1 else both.contiguous()
    size, rank = group_size(cache), 0 if q_norm is None else q_norm.shape[0]
    parts, strides = parts_of(cache)
    unused = cos.contiguous()
    grid = both.shape[0], 1 if latent is None else 2
    launch(
        _latent_store, grid, both, unused if q_norm is None else q_norm.contiguous(),
        unused if kv_norm is None else kv_norm.contiguous(), unused, sin.contiguous(),
        idx.contiguous(), both if latent is None else latent, *parts, rank, cache.dim,
        2 * cos.shape[1], both.stride(0), eps, cache.codes.shape[1], *strides,
        LATENT=latent is not None, QUANTIZE=quantize, NORM=kv_norm is not None,
        FORMAT=cache.format, DENSE=cache.dense is not None, BQ=next_power(max(rank, 1), 32),
        BD=next_power(cache.dim, size), SIZE=size,
    )  # fmt: skip
