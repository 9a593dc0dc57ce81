"""Engram in Triton: hashes, rows and gates, one program per token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.tiles import (
    ceil_div,
    e4m3_value,
    in_turn,
    launch,
    narrow,
    next_power,
    sigmoid,
    ue8m0_value,
)


@triton.jit
def _hash(ngrams, multipliers, primes, offsets, out, G: tl.constexpr, H, BH: tl.constexpr):
    in_turn()
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BH)
    acc = tl.load(ngrams + row * G) * tl.load(multipliers)
    for order in tl.static_range(G - 1):
        acc = acc ^ (tl.load(ngrams + row * G + order + 1) * tl.load(multipliers + order + 1))
        prime = tl.load(primes + order * H + head, head < H, 1)
        rest = (tl.zeros_like(prime) + acc) % prime
        rest = tl.where(rest < 0, rest + prime, rest)  # of the sign of the prime, as in torch
        column = order * H + head
        rest += tl.load(offsets + column, head < H, 0)
        tl.store(out + row * (G - 1) * H + column, rest, head < H)


def engram_hash(ngrams: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """As the reference."""
    num_rows, grams = ngrams.shape
    heads = primes.shape[1]
    out = torch.empty(num_rows, (grams - 1) * heads, dtype=torch.int64, device=ngrams.device)
    if num_rows:
        launch(
            _hash, (num_rows,), ngrams.contiguous(), multipliers.contiguous(), primes.contiguous(),
            offsets.contiguous(), out, G=grams, H=heads, BH=next_power(heads),
        )  # fmt: skip
    return out


@triton.jit
def _ngrams(
    ids, token_map, ring, load, rows, out, H, pad, length, slot_row, total, BLOCK: tl.constexpr
):  # fmt: skip
    in_turn()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    place = tl.load(rows + at, inside, 0)
    old = place < H
    entry = tl.load(load + place, inside & old, -1)
    there = ring + (entry // length) * slot_row + entry % length
    before = tl.load(there, inside & old & (entry >= 0), pad).to(tl.int64)
    token = tl.load(ids + (place - H), inside & (old == 0), 0)
    new = tl.load(token_map + token, inside & (old == 0), 0)
    tl.store(out + at, tl.where(old, before, new), inside)


@triton.jit
def _keep_ids(
    ids, token_map, ring, store, rows, length, slot_row, total, BLOCK: tl.constexpr
):  # fmt: skip
    in_turn()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    place = tl.load(store + at, inside, 0)
    token = tl.load(ids + tl.load(rows + at, inside, 0), inside, 0)
    value = tl.load(token_map + token, inside, 0).to(tl.int32)
    tl.store(ring + (place // length) * slot_row + place % length, value, inside)


def gather_ngrams(
    ids: Tensor, token_map: Tensor, ring: Tensor, load: Tensor, rows: Tensor, pad: int
) -> Tensor:
    """As `places.gather_ngrams`."""
    rows = rows.contiguous()
    out = torch.empty_like(rows)
    if out.numel():
        launch(
            _ngrams, (ceil_div(out.numel(), 256),), ids.contiguous(), token_map, ring,
            load.contiguous(), rows, out, load.shape[0], pad, ring.shape[1], ring.stride(0),
            out.numel(), BLOCK=256,
        )  # fmt: skip
    return out


def keep_ids(ids: Tensor, token_map: Tensor, ring: Tensor, store: Tensor, rows: Tensor) -> None:
    """As `places.keep_ids`."""
    if store.shape[0]:
        launch(
            _keep_ids, (ceil_div(store.shape[0], 256),), ids.contiguous(), token_map, ring,
            store.contiguous(), rows.contiguous(), ring.shape[1], ring.stride(0), store.shape[0],
            BLOCK=256,
        )  # fmt: skip


@triton.jit
def _lookup(
    codes, scale, rows, out, columns, D, code_row, scale_row,
    G: tl.constexpr,
):  # fmt: skip
    in_turn()
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    group = tl.arange(0, G)
    held = (group < D // 32)[:, None]
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    values = e4m3_value(tl.load(codes + row * code_row + at, held, 0))
    values *= ue8m0_value(tl.load(scale + row * scale_row + group[:, None], held, 127))
    tl.store(out + place * D + at, narrow(values, out.dtype.element_ty), held)


def engram_lookup(codes: Tensor, scale: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """As the reference."""
    num_rows, columns = rows.shape
    dim = codes.shape[1]
    out = torch.empty(num_rows, columns * dim, dtype=dtype, device=rows.device)
    codes = codes.view(torch.uint8)
    if rows.numel():
        launch(
            _lookup, (rows.numel(),), codes, scale, rows.contiguous(), out, columns, dim,
            codes.stride(0), scale.stride(0), G=next_power(dim // 32),
        )  # fmt: skip
    return out


@triton.jit
def _gate(x, kv, qk_weight, out, M, C, kv_row, eps, root, BLOCK: tl.constexpr):
    """Stream program_id(0) of row program_id(1)."""
    in_turn()
    stream = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    source = x + (row * M + stream) * C
    key_at = kv + row * kv_row + stream * C
    squares = tl.zeros((BLOCK,), tl.float32)
    key_squares = tl.zeros((BLOCK,), tl.float32)
    products = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, C, BLOCK):
        column = start + tl.arange(0, BLOCK)
        held = column < C
        a = tl.load(source + column, held, 0.0).to(tl.float32)
        b = tl.load(key_at + column, held, 0.0).to(tl.float32)
        squares += a * a
        key_squares += b * b
        products += a * tl.load(qk_weight + stream * C + column, held, 0.0) * b
    count = tl.cast(C, tl.float32)
    norm = tl.sqrt_rn(tl.div_rn(tl.sum(squares, 0), count) + eps)
    key_norm = tl.sqrt_rn(tl.div_rn(tl.sum(key_squares, 0), count) + eps)
    product = tl.div_rn(tl.div_rn(tl.sum(products, 0), norm), key_norm)
    product = tl.div_rn(product, root)
    size = tl.sqrt_rn(tl.maximum(tl.abs(product), 1e-6))
    gate = sigmoid(tl.where(product < 0.0, -size, size))
    for start in range(0, C, BLOCK):
        column = start + tl.arange(0, BLOCK)
        held = column < C
        a = tl.load(source + column, held, 0.0).to(tl.float32)
        value = tl.load(kv + row * kv_row + M * C + column, held, 0.0).to(tl.float32)
        target = out + (row * M + stream) * C + column
        tl.store(target, narrow(a + gate * value, out.dtype.element_ty), held)


def engram_gate(x: Tensor, kv: Tensor, qk_weight: Tensor, eps: float) -> Tensor:
    """As the reference."""
    x, kv = x.contiguous(), kv if kv.stride(1) == 1 else kv.contiguous()
    out = torch.empty_like(x)
    num_rows, streams, dim = x.shape
    if num_rows:
        launch(
            _gate, (streams, num_rows), x, kv, qk_weight.contiguous(), out, streams, dim,
            kv.stride(0), eps, float(dim) ** 0.5, BLOCK=min(1024, next_power(dim)),
        )  # fmt: skip
    return out
