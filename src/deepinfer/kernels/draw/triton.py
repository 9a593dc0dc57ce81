"""Gumbel-max draws in Triton: noise is made where it is used, one program per row and stretch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.tiles import ceil_div, in_turn, launch, next_power

_GROUPS = 1024  # of four ids, whose noise is one counter's
_STRETCH = 4096  # ids that a program compares


@triton.jit
def _lane(logits, width, peak, words, group, lane, best, chosen, LARGEST: tl.constexpr):
    """Take the best of ids 4 * group + lane into best [groups] and chosen [groups]."""
    token = 4 * group + lane
    logit = tl.load(logits + token, token < width, float("-inf"))
    word = words.to(tl.int64) & 0xFFFFFFFF
    uniform = tl.minimum((word.to(tl.float64) + 0.5) * 2.3283064365386963e-10, LARGEST)
    score = (logit - peak).to(tl.float64) - tl.log(-tl.log(1.0 - uniform))
    score = tl.where(token < width, score, float("-inf"))
    better = score > best
    return tl.where(better, score, best), tl.where(better, token, chosen)


@triton.jit
def _draw(
    logits, peaks, seeds, positions, scores, tokens, width, row_stride, stream, parts,
    LARGEST: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    in_turn()
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    group = part * GROUPS + tl.arange(0, GROUPS)
    position = tl.load(positions + row)
    zero = tl.zeros((GROUPS,), tl.uint32)
    low = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    third = zero + tl.cast(stream, tl.uint32)
    a, b, c, d = tl.philox(tl.load(seeds + row), low, group.to(tl.uint32), third, zero)
    peak = tl.load(peaks + row)
    source = logits + row * row_stride
    best = tl.full((GROUPS,), float("-inf"), tl.float64)
    chosen = tl.zeros((GROUPS,), tl.int32) + 4 * group
    best, chosen = _lane(source, width, peak, a, group, 0, best, chosen, LARGEST)
    best, chosen = _lane(source, width, peak, b, group, 1, best, chosen, LARGEST)
    best, chosen = _lane(source, width, peak, c, group, 2, best, chosen, LARGEST)
    best, chosen = _lane(source, width, peak, d, group, 3, best, chosen, LARGEST)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, chosen, 2147483647), 0)
    tl.store(scores + row * parts + part, top)
    tl.store(tokens + row * parts + part, tl.minimum(token, width - 1))


@triton.jit
def _best(scores, tokens, out, parts, BP: tl.constexpr):
    in_turn()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BP)
    score = tl.load(scores + row * parts + part, part < parts, float("-inf"))
    token = tl.load(tokens + row * parts + part, part < parts, 2147483647)
    top = tl.max(score, 0)
    tl.store(out + row, tl.min(tl.where(score == top, token, 2147483647), 0).to(tl.int64))


@triton.jit
def _stretch(
    values, plus, tops, tokens, V, value_row, plus_row, parts,
    PLUS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest of a stretch of a row, and its id; -1 - id where a value is not finite."""
    in_turn()
    row = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0)
    column = part * BLOCK + tl.arange(0, BLOCK)
    held = column < V
    value = tl.load(values + row * value_row + column, held, float("-inf"))
    if PLUS:
        value += tl.load(plus + row * plus_row + column, held, 0.0)
    bad = tl.max((held & ((value - value) != 0.0)).to(tl.int32), 0)
    top = tl.max(value, 0)
    token = tl.min(tl.where((value == top) & held, column, 2147483647), 0)
    token = tl.minimum(token, V - 1)
    tl.store(tops + row * parts + part, top)
    tl.store(tokens + row * parts + part, tl.where(bad != 0, -1 - token, token))


@triton.jit
def _largest(tops, tokens, out, bad, parts, BP: tl.constexpr):
    in_turn()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BP)
    held = part < parts
    top = tl.load(tops + row * parts + part, held, float("-inf"))
    token = tl.load(tokens + row * parts + part, held, 2147483647)
    spoilt = tl.max((token < 0).to(tl.int32), 0)
    token = tl.where(token < 0, -1 - token, token)
    best = tl.min(tl.where((top == tl.max(top, 0)) & held, token, 2147483647), 0)
    first = tl.min(token, 0)  # where nothing equals the largest, which is no number
    tl.store(out + row, tl.where(best == 2147483647, first, best).to(tl.int64))
    tl.store(bad + row, spoilt.to(tl.uint8))


def largest(values: Tensor, plus: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `draw.largest`."""
    values = values if values.stride(1) == 1 else values.contiguous()
    added = values if plus is None else plus if plus.stride(1) == 1 else plus.contiguous()
    num, width = values.shape
    tokens = torch.empty(num, dtype=torch.int64, device=values.device)
    bad = torch.empty(num, dtype=torch.uint8, device=values.device)
    block = min(_STRETCH, next_power(width))
    parts = ceil_div(width, block)
    tops = torch.empty(num, parts, dtype=torch.float32, device=values.device)
    found = torch.empty(num, parts, dtype=torch.int32, device=values.device)
    if num:
        launch(
            _stretch, (parts, num), values, added, tops, found, width, values.stride(0),
            added.stride(0), parts, PLUS=plus is not None, BLOCK=block,
        )  # fmt: skip
        launch(_largest, (num,), tops, found, tokens, bad, parts, BP=next_power(parts))
    return tokens, bad.view(torch.bool)


@triton.jit
def _log_sum(values, out, width, row_stride, BLOCK: tl.constexpr):
    """log(sum(exp(row))), the sum in fp64, in stretches of BLOCK."""
    in_turn()
    row = tl.program_id(0).to(tl.int64)
    source = values + row * row_stride
    peaks = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        peaks = tl.maximum(peaks, tl.load(source + column, column < width, float("-inf")))
    peak = tl.max(peaks, 0)
    sums = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(source + column, column < width, float("-inf"))
        sums += tl.exp(value - peak).to(tl.float64)
    total = tl.log(tl.sum(sums, 0)) + peak.to(tl.float64)
    tl.store(out + row, total.to(tl.float32))


def log_sum_exp(values: Tensor) -> Tensor:
    """Return log(sum(exp(row))) of values [N, V] fp32, [N, 1]: a row's bits are its own."""
    values = values if values.stride(1) == 1 else values.contiguous()
    num, width = values.shape
    out = torch.empty(num, 1, dtype=torch.float32, device=values.device)
    if num:
        launch(
            _log_sum, (num,), values, out, width, values.stride(0),
            BLOCK=min(2048, next_power(width)),
        )  # fmt: skip
    return out


def draw(
    logits: Tensor, seeds: Tensor, positions: Tensor, stream: int, largest_uniform: float
) -> Tensor:
    """As `sampling.sampler.draw`."""
    num, width = logits.shape
    out = torch.empty(num, dtype=torch.int64, device=logits.device)
    if not num:
        return out
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    groups = min(_GROUPS, next_power(ceil_div(width, 4), 16))
    parts = ceil_div(ceil_div(width, 4), groups)
    scores = torch.empty(num, parts, dtype=torch.float64, device=logits.device)
    tokens = torch.empty(num, parts, dtype=torch.int32, device=logits.device)
    launch(
        _draw, (parts, num), logits, logits.amax(dim=-1), seeds.contiguous(),
        positions.contiguous(), scores, tokens, width, logits.stride(0), stream, parts,
        LARGEST=largest_uniform, GROUPS=groups,
    )  # fmt: skip
    launch(_best, (num,), scores, tokens, out, parts, BP=next_power(parts))
    return out
