"""Rotary positions in Triton: one program per vector."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.quantize import QuantFormat
from deepinfer.kernels.quantize.triton import rounded
from deepinfer.kernels.tiles import ceil_div, in_turn, launch, narrow, next_power


@triton.jit
def _cos_sin(positions, inv_freq, cos, sin, total, F, BLOCK: tl.constexpr):
    in_turn()
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    held = place < total
    position = tl.load(positions + place // F, held, 0).to(tl.float32)
    angle = position * tl.load(inv_freq + place % F, held, 0.0)
    tl.store(cos + place, tl.cos(angle), held)
    tl.store(sin + place, tl.sin(angle), held)


def cos_sin(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """As the reference."""
    shape = positions.shape[0], inv_freq.shape[0]
    cos = torch.empty(shape, dtype=torch.float32, device=positions.device)
    sin = torch.empty_like(cos)
    total, block = cos.numel(), 256
    if total:
        launch(
            _cos_sin, (ceil_div(total, block),), positions.contiguous(), inv_freq.contiguous(),
            cos, sin, total, shape[1], BLOCK=block,
        )  # fmt: skip
    return cos, sin


@triton.jit
def _rotate_tail(
    x, cos, sin, out, H, D, R, row_stride, head_stride,
    INVERSE: tl.constexpr, HEAD: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    in_turn()
    program = tl.program_id(0).to(tl.int64)
    row, head = program // H, program % H
    source = x + row * row_stride + head * head_stride
    target = out + program * D
    kept = tl.arange(0, HEAD)
    tl.store(target + kept, tl.load(source + kept, kept < D - R, 0.0), kept < D - R)
    pair = tl.arange(0, HALF)
    held = pair < R // 2
    place = D - R + 2 * pair
    even = tl.load(source + place, held, 0.0).to(tl.float32)
    odd = tl.load(source + place + 1, held, 0.0).to(tl.float32)
    c = tl.load(cos + row * (R // 2) + pair, held, 0.0)
    s = tl.load(sin + row * (R // 2) + pair, held, 0.0)
    if INVERSE:
        s = -s
    tl.store(target + place, narrow(even * c - odd * s, out.dtype.element_ty), held)
    tl.store(target + place + 1, narrow(even * s + odd * c, out.dtype.element_ty), held)


@triton.jit
def _turn_tail(
    x, cos, sin, H, D, R, row_stride, head_stride,
    INVERSE: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """HEADS vectors of a row where they lie; nothing but the tail is touched."""
    in_turn()
    row = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    held = (head < H)[:, None] & (pair < R // 2)[None, :]
    at = x + row * row_stride + head[:, None] * head_stride + (D - R + 2 * pair)[None, :]
    even = tl.load(at, held, 0.0).to(tl.float32)
    odd = tl.load(at + 1, held, 0.0).to(tl.float32)
    c = tl.load(cos + row * (R // 2) + pair, pair < R // 2, 0.0)[None, :]
    s = tl.load(sin + row * (R // 2) + pair, pair < R // 2, 0.0)[None, :]
    if INVERSE:
        s = -s
    tl.store(at, narrow(even * c - odd * s, x.dtype.element_ty), held)
    tl.store(at + 1, narrow(even * s + odd * c, x.dtype.element_ty), held)


@triton.jit
def _turn_and_round(
    x, cos, sin, out, H, D, R, row_stride, head_stride,
    INVERSE: tl.constexpr, FORMAT: tl.constexpr, SIZE: tl.constexpr,
    HEADS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """HEADS vectors of a row: the tail rotated, then everything rounded."""
    in_turn()
    row = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BD)
    held = (head < H)[:, None] & (column < D)[None, :]
    source = x + row * row_stride + head[:, None] * head_stride
    values = tl.load(source + column[None, :], held, 0.0).to(tl.float32)
    turned = (column >= D - R) & (column < D)
    odd = (column - (D - R)) % 2
    partner = tl.where(turned, column + 1 - 2 * odd, 0)
    others = tl.load(source + partner[None, :], held & turned[None, :], 0.0).to(tl.float32)
    pair = tl.where(turned, (column - (D - R)) // 2, 0)
    c = tl.load(cos + row * (R // 2) + pair, turned, 0.0)
    s = tl.load(sin + row * (R // 2) + pair, turned, 0.0)
    s = tl.where(odd == 1, s, -s)
    if INVERSE:
        s = -s
    rotated = values * c[None, :] + others * s[None, :]
    values = tl.where(turned[None, :], rotated, values)
    values = narrow(values, out.dtype.element_ty).to(tl.float32)
    groups = tl.reshape(values, (HEADS * (BD // SIZE), SIZE))
    values = tl.reshape(rounded(groups, FORMAT), (HEADS, BD))
    target = out + (row * H + head[:, None]) * D + column[None, :]
    tl.store(target, narrow(values, out.dtype.element_ty), held)


def rotate_tail(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    inverse: bool = False,
    reuse: bool = False,
    quantize: QuantFormat | None = None,
) -> Tensor:
    """As the reference; where x may be reused and is not rounded, in place."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    if quantize and x.numel():
        heads, dim = x.shape[1] if x.ndim == 3 else 1, x.shape[-1]
        out, block = torch.empty(x.shape, dtype=x.dtype, device=x.device), min(4, next_power(heads))
        launch(
            _turn_and_round, (ceil_div(heads, block), x.shape[0]), x, cos.contiguous(),
            sin.contiguous(), out, heads, dim, 2 * cos.shape[1], x.stride(0),
            x.stride(1) if x.ndim == 3 else 0, INVERSE=inverse, FORMAT=quantize,
            SIZE=16 if quantize == "act4_e4" else 32, HEADS=block, BD=next_power(dim, 32),
        )  # fmt: skip
        return out
    if reuse and x.numel():
        heads = x.shape[1] if x.ndim == 3 else 1
        block = min(16, next_power(heads))
        launch(
            _turn_tail, (ceil_div(heads, block), x.shape[0]), x, cos.contiguous(),
            sin.contiguous(), heads, x.shape[-1], 2 * cos.shape[1], x.stride(0),
            x.stride(1) if x.ndim == 3 else 0, INVERSE=inverse, HEADS=block,
            HALF=next_power(max(1, cos.shape[1])),
        )  # fmt: skip
        return x
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads = x.shape[1] if x.ndim == 3 else 1
    dim, rotated = x.shape[-1], 2 * cos.shape[1]
    if not x.numel():
        return out
    launch(
        _rotate_tail, (x.shape[0] * heads,), x, cos.contiguous(), sin.contiguous(), out,
        heads, dim, rotated, x.stride(0), x.stride(1) if x.ndim == 3 else 0,
        INVERSE=inverse, HEAD=next_power(max(1, dim - rotated)), HALF=next_power(rotated // 2),
    )  # fmt: skip
    return out
