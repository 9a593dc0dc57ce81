"""Hyper-connections in Triton: a thin product with the norm beside it, Sinkhorn in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.linear import DenseWeight
from deepinfer.kernels.tiles import ceil_div, dot, in_turn, launch, narrow, next_power, sigmoid

_ROWS, _INPUTS, _TOKENS = 16, 64, 4
_PART = 512  # inputs that one program adds up: a row's sums are cut in the same places in any batch


@triton.jit
def _project(
    h, fn, sums, squares, T, W, K, part,
    BT: tl.constexpr, BW: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """sums [parts, T, W], squares [parts, T]: projections over `part` of the flattened streams."""
    in_turn()
    row = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    column = tl.arange(0, BW)
    begin = tl.program_id(1) * part
    acc = tl.zeros((BT, BW), tl.float32)
    total = tl.zeros((BT,), tl.float32)
    for start in range(begin, begin + part, BK):
        k = start + tl.arange(0, BK)
        held = (row < T)[:, None] & (k < K)[None, :]
        values = tl.load(h + row[:, None] * K + k[None, :], held, 0.0).to(tl.float32)
        held = (column < W)[:, None] & (k < K)[None, :]
        weights = tl.load(fn + column[:, None] * K + k[None, :], held, 0.0)
        acc = dot(values, tl.trans(weights), acc, False)
        total += tl.sum(values * values, 1)
    at = tl.program_id(1).to(tl.int64) * T + row
    held = (row < T)[:, None] & (column < W)[None, :]
    tl.store(sums + at[:, None] * W + column[None, :], acc, held)
    tl.store(squares + at, total, row < T)


@triton.jit
def _coefficients(
    sums, squares, scale, base, pre, post, comb, T, W, K, parts, norm_eps, eps,
    ITERS: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Parts of the projections added up in order and normed; coefficients from them."""
    in_turn()
    row = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    stream = tl.arange(0, BM)
    held = (row < T)[:, None] & (stream < M)[None, :]
    inside = (stream < M)[None, :, None] & (stream < M)[None, None, :]
    inside = inside & (row < T)[:, None, None]
    cell = stream[None, :, None] * M + stream[None, None, :]
    first, second = tl.zeros((BT, BM), tl.float32), tl.zeros((BT, BM), tl.float32)
    values = tl.zeros((BT, BM, BM), tl.float32)
    total = tl.zeros((BT,), tl.float32)
    for part in range(parts):
        at = row + part * T
        mine = sums + at[:, None] * W + stream[None, :]
        first += tl.load(mine, held, 0.0)
        second += tl.load(mine + M, held, 0.0)
        values += tl.load(sums + at[:, None, None] * W + 2 * M + cell, inside, 0.0)
        total += tl.load(squares + at, row < T, 0.0)
    mean = tl.div_rn(total, tl.cast(K, tl.float32))
    norm = tl.div_rn(1.0, tl.sqrt_rn(mean + norm_eps))
    start, each = base + stream, (stream < M)
    first = first * norm[:, None] * tl.load(scale) + tl.load(start, each, 0.0)[None, :]
    second = second * norm[:, None] * tl.load(scale + 1) + tl.load(start + M, each, 0.0)[None, :]
    shift = tl.load(base + 2 * M + cell, inside, 0.0)
    values = values * norm[:, None, None] * tl.load(scale + 2) + shift
    place = row[:, None] * M + stream[None, :]
    tl.store(pre + place, sigmoid(first) + eps, held)
    tl.store(post + place, 2.0 * sigmoid(second), held)
    values = tl.where(inside, values, float("-inf"))
    peak = tl.max(values, 2)[:, :, None]
    exps = tl.where(inside, tl.exp(values - tl.where(peak > float("-inf"), peak, 0.0)), 0.0)
    sums_of = tl.sum(exps, 2)[:, :, None]
    c = tl.where(inside, tl.div_rn(exps, tl.broadcast_to(sums_of, exps.shape)) + eps, 0.0)
    sums_of = tl.sum(c, 1)[:, None, :] + eps
    c = tl.div_rn(c, tl.broadcast_to(sums_of, c.shape))
    for _ in range(ITERS - 1):
        sums_of = tl.sum(c, 2)[:, :, None] + eps
        c = tl.div_rn(c, tl.broadcast_to(sums_of, c.shape))
        sums_of = tl.sum(c, 1)[:, None, :] + eps
        c = tl.div_rn(c, tl.broadcast_to(sums_of, c.shape))
    tl.store(comb + row[:, None, None] * (M * M) + cell, c, inside)


def hyper_mix(
    h: Tensor,
    fn: DenseWeight,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference."""
    h, weight = h.contiguous(), fn.fp32().contiguous()
    num_rows, streams, dim = h.shape
    width = weight.shape[0]
    pre, post = (scale.new_empty(num_rows, streams, dtype=torch.float32) for _ in range(2))
    comb = pre.new_empty(num_rows, streams, streams)
    if not num_rows:
        return pre, post, comb
    parts = ceil_div(streams * dim, _PART)
    sums = pre.new_empty(parts, num_rows, width)
    squares = pre.new_empty(parts, num_rows)
    launch(
        _project, (ceil_div(num_rows, _ROWS), parts), h, weight, sums, squares,
        num_rows, width, streams * dim, _PART, BT=_ROWS, BW=next_power(width, 16), BK=_INPUTS,
    )  # fmt: skip
    launch(
        _coefficients, (ceil_div(num_rows, _TOKENS),), sums, squares, scale.float(), base.float(),
        pre, post, comb, num_rows, width, streams * dim, parts, norm_eps, hc_eps,
        ITERS=iters, M=streams, BM=next_power(streams), BT=_TOKENS,
    )  # fmt: skip
    return pre, post, comb


@triton.jit
def _collapse(h, pre, out, C, M: tl.constexpr, BLOCK: tl.constexpr):
    in_turn()
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = column < C
    acc = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(M):
        stream = tl.load(h + (row * M + i) * C + column, held, 0.0).to(tl.float32)
        acc += tl.load(pre + row * M + i) * stream
    tl.store(out + row * C + column, narrow(acc, out.dtype.element_ty), held)


def hyper_collapse(h: Tensor, pre: Tensor) -> Tensor:
    """As the reference."""
    h = h.contiguous()
    num_rows, streams, dim = h.shape
    out = torch.empty(num_rows, dim, dtype=h.dtype, device=h.device)
    block = min(1024, next_power(dim))
    if num_rows:
        launch(
            _collapse, (ceil_div(dim, block), num_rows), h, pre.contiguous(), out, dim,
            M=streams, BLOCK=block,
        )  # fmt: skip
    return out


@triton.jit
def _expand(h, y, post, comb, out, C, M: tl.constexpr, BLOCK: tl.constexpr):
    in_turn()
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = column < C
    new = tl.load(y + row * C + column, held, 0.0).to(tl.float32)
    for j in tl.static_range(M):
        acc = tl.zeros((BLOCK,), tl.float32)
        for i in tl.static_range(M):
            stream = tl.load(h + (row * M + i) * C + column, held, 0.0).to(tl.float32)
            acc += tl.load(comb + (row * M + i) * M + j) * stream
        acc = tl.load(post + row * M + j) * new + acc
        tl.store(out + (row * M + j) * C + column, narrow(acc, out.dtype.element_ty), held)


def hyper_expand(h: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """As the reference."""
    h = h.contiguous()
    num_rows, streams, dim = h.shape
    out = torch.empty_like(h)
    block = min(1024, next_power(dim))
    if num_rows:
        launch(
            _expand, (ceil_div(dim, block), num_rows), h, y.contiguous(), post.contiguous(),
            comb.contiguous(), out, dim, M=streams, BLOCK=block,
        )  # fmt: skip
    return out
