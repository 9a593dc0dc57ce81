"""Matrix products in Triton: stored weights are decoded tile by tile, on the way to the product.

Neighbouring programs share a tile of the weight. Outputs stand in the rows of a tile and tokens in
its columns, so that few and many tokens run the same tensor instructions over the same inputs in
the same order: a row's bits do not depend on its batch, whatever tile its batch takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.quantize.triton import round_trip
from deepinfer.kernels.tiles import (
    act8_round_trip,
    ceil_div,
    dot,
    e4m3_value,
    in_turn,
    launch,
    narrow,
    next_power,
    runs_on_bf16,
    ue8m0_value,
)

if TYPE_CHECKING:
    from deepinfer.kernels.linear import DenseWeight, Fp8Weight

_ROWS, _MOST_ROWS, _OUTPUTS, _INPUTS = 16, 128, 64, 64
_PROGRAMS, _MOST_PARTS, _LEAST_PART = 264, 8, 512


def tile_rows(num_rows: int, bf16: bool) -> int:
    """Tokens of a tile: as many as there are, as far as tensor instructions take them."""
    if not bf16 or num_rows <= _ROWS:
        return _ROWS
    if num_rows <= _MOST_ROWS:
        return next_power(num_rows)
    # A larger tile decodes weights less often and holds more rows of nothing.
    return min((64, _MOST_ROWS), key=lambda rows: ceil_div(num_rows, rows) * (rows + 32))


def _parts(outputs: int, inputs: int, groups: int) -> int:
    """Parts that the inputs are added up in: by the weight's size alone, in any batch."""
    tiles = ceil_div(outputs, _OUTPUTS) * groups
    return max(1, min(_MOST_PARTS, _PROGRAMS // tiles, inputs // _LEAST_PART))


@triton.jit
def _fp8(
    x, codes, scale, out, T, N, K, x_row, x_group, out_row, part, parts,
    QUANTIZE: tl.constexpr, BF16: tl.constexpr, SPLIT: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile [BN, BT] of a group; N outputs and K inputs per group.

    Parts of the inputs are added up one by one, then in order: here, or, SPLIT, by `_join` from
    out [parts, T, out_row] fp32.
    """
    splits = parts if SPLIT else 1
    group = (tl.program_id(2) // splits).to(tl.int64)
    own = tl.program_id(2) % splits
    row = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    weight_row = group * N + column
    total = tl.zeros((BN, BT), tl.float32)
    for piece in range(own, own + 1 if SPLIT else parts):
        acc = tl.zeros((BN, BT), tl.float32)
        for start in range(piece * part, tl.minimum(K, (piece + 1) * part), BK):
            k = start + tl.arange(0, BK)
            at = x + row[:, None] * x_row + group * x_group + k[None, :]
            values = tl.load(at, (row < T)[:, None] & (k < K)[None, :], 0.0)
            if QUANTIZE:
                values = act8_round_trip(values.to(tl.float32), BT, BK)
            elif not BF16:
                values = values.to(tl.float32)
            held = (column < N)[:, None] & (k < K)[None, :]
            code = tl.load(codes + weight_row[:, None] * K + k[None, :], held, 0)
            block = start // 32 + tl.arange(0, BK // 32)
            held_block = (column < N)[:, None] & (block < K // 32)[None, :]
            at_scale = scale + (weight_row // 32)[:, None] * (K // 32) + block[None, :]
            factor = ue8m0_value(tl.load(at_scale, held_block, 127))
            weights = tl.reshape(e4m3_value(code), (BN, BK // 32, 32)) * factor[:, :, None]
            acc = dot(tl.reshape(weights, (BN, BK)), tl.trans(values), acc, BF16)
        total += acc
    held = (row < T)[:, None] & (column < N)[None, :]
    at = out + row[:, None] * out_row + group * N + column[None, :]
    if SPLIT:
        tl.store(at + own.to(tl.int64) * T * out_row, tl.trans(total), held)
    else:
        tl.store(at, narrow(tl.trans(total), out.dtype.element_ty), held)


@triton.jit
def _join(sums, out, size, parts, BLOCK: tl.constexpr):
    """out [size]: sums [parts, size] added up in order."""
    in_turn()
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    held = place < size
    total = tl.zeros((BLOCK,), tl.float32)
    at = sums + place
    for _ in range(parts):
        total += tl.load(at, held, 0.0)
        at += size
    tl.store(out + place, narrow(total, out.dtype.element_ty), held)


def _launch_fp8(x: Tensor, weight: Fp8Weight, quantize: bool, groups: int) -> Tensor:
    """x [T, G, K]."""
    num_rows, outputs, inputs = x.shape[0], weight.codes.shape[0] // groups, x.shape[2]
    x = x if x.stride(2) == 1 else x.contiguous()
    bf16 = runs_on_bf16(x.dtype)
    if quantize and num_rows > _ROWS:  # once, not in every program
        x, quantize = round_trip(x, "act8"), False
    rows, parts = tile_rows(num_rows, bf16), _parts(outputs, inputs, groups)
    tiles = ceil_div(num_rows, rows) * ceil_div(outputs, _OUTPUTS) * groups
    split = parts > 1 and tiles < _PROGRAMS
    shape = (num_rows, groups * outputs)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    sums = torch.empty(parts, *shape, device=x.device) if split else out
    part = ceil_div(ceil_div(inputs, parts), _INPUTS) * _INPUTS
    launch(
        _fp8,
        (ceil_div(num_rows, rows), ceil_div(outputs, _OUTPUTS), groups * (parts if split else 1)),
        x, weight.codes.view(torch.uint8), weight.scale, sums, num_rows, outputs, inputs,
        x.stride(0), x.stride(1), groups * outputs, part, parts,
        QUANTIZE=quantize, BF16=bf16, SPLIT=split, BT=rows, BN=_OUTPUTS, BK=_INPUTS,
    )  # fmt: skip
    if split:
        launch(_join, (ceil_div(out.numel(), 1024),), sums, out, out.numel(), parts, BLOCK=1024)
    return out


def fp8_linear(x: Tensor, weight: Fp8Weight, quantize_input: bool) -> Tensor:
    """As the reference."""
    return _launch_fp8(x.unsqueeze(1), weight, quantize_input, 1)


def grouped_linear(
    x: Tensor, weight: Fp8Weight, quantize_input: bool, quantize_output: bool = False
) -> Tensor:
    """As the reference."""
    out = _launch_fp8(x, weight, quantize_input, x.shape[1])
    return round_trip(out, "act8") if quantize_output else out


@triton.jit
def _dense(
    x, weight, out, T, N, K, x_row, part, parts,
    BF16: tl.constexpr, SPLIT: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile [BN, BT]; parts of the inputs are added up as in `_fp8`."""
    in_turn()
    own = tl.program_id(2)
    row = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    column = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    total = tl.zeros((BN, BT), tl.float32)
    for piece in range(own, own + 1 if SPLIT else parts):
        acc = tl.zeros((BN, BT), tl.float32)
        for start in range(piece * part, tl.minimum(K, (piece + 1) * part), BK):
            k = start + tl.arange(0, BK)
            held = (row < T)[:, None] & (k < K)[None, :]
            values = tl.load(x + row[:, None] * x_row + k[None, :], held, 0.0)
            held = (column < N)[:, None] & (k < K)[None, :]
            weights = tl.load(weight + column[:, None] * K + k[None, :], held, 0.0)
            if not BF16:
                values, weights = values.to(tl.float32), weights.to(tl.float32)
            acc = dot(weights, tl.trans(values), acc, BF16)
        total += acc
    held = (row < T)[:, None] & (column < N)[None, :]
    at = out + row[:, None] * N + column[None, :]
    if SPLIT:
        tl.store(at + own.to(tl.int64) * T * N, tl.trans(total), held)
    else:
        tl.store(at, narrow(tl.trans(total), out.dtype.element_ty), held)


def dense_linear(x: Tensor, weight: DenseWeight, out: torch.dtype) -> Tensor:
    """As the reference."""
    stored = weight.stored.contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    (num_rows, inputs), outputs = x.shape, stored.shape[0]
    result = torch.empty(num_rows, outputs, dtype=out, device=x.device)
    if not result.numel():
        return result
    bf16 = runs_on_bf16(x.dtype) and runs_on_bf16(stored.dtype)
    rows, parts = tile_rows(num_rows, bf16), _parts(outputs, inputs, 1)
    tiles = ceil_div(num_rows, rows), ceil_div(outputs, _OUTPUTS)
    split = parts > 1 and tiles[0] * tiles[1] < _PROGRAMS
    sums = torch.empty(parts, num_rows, outputs, device=x.device) if split else result
    part = ceil_div(ceil_div(inputs, parts), _INPUTS) * _INPUTS
    launch(
        _dense, (*tiles, parts if split else 1), x, stored, sums, num_rows, outputs, inputs,
        x.stride(0), part, parts, BF16=bf16, SPLIT=split, BT=rows, BN=_OUTPUTS, BK=_INPUTS,
    )  # fmt: skip
    if split:
        size = result.numel()
        launch(_join, (ceil_div(size, 1024),), sums, result, size, parts, BLOCK=1024)
    return result
