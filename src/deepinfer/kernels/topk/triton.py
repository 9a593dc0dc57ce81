"""Selection in Triton: the last kept score is found bit by bit, then one pass writes what is above.

Scores become integers of the same order. Entries equal to the last kept score are taken from the
left until the count is full, so ties go to the smaller index and the output is ascending.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.tiles import ceil_div, in_turn, launch, next_power

_BLOCK = 1024


@triton.jit
def _ordered(scores):
    """Integers 0..2^32-1 (int64) in the order of fp32 values; -0 equals 0, NaN is above all."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True).to(tl.int64)
    bits = tl.where(scores != scores, 2147483647, bits)
    return tl.where(bits < 0, -2147483649 - bits, bits) + 2147483648


@triton.jit
def _select(scores, limit, out, S, row_stride, K, BLOCK: tl.constexpr):
    """Entries below limit[row] with a score above -inf; out [rows, K] was filled with -1."""
    in_turn()
    row = tl.program_id(0).to(tl.int64)
    end = tl.minimum(tl.load(limit + row), S)
    source = scores + row * row_stride
    least = tl.full((), 0, tl.int64)  # the K-th largest, once all bits are decided
    for bit in range(32):
        guess = least + (tl.full((), 1, tl.int64) << (31 - bit))
        count = tl.full((), 0, tl.int64)
        for start in range(0, S, BLOCK):
            place = start + tl.arange(0, BLOCK)
            values = tl.load(source + place, place < end, float("-inf")).to(tl.float32)
            kept = (_ordered(values) >= guess) & (values != float("-inf")) & (place < end)
            count += tl.sum(kept.to(tl.int64), 0)
        least = tl.where(count >= K, guess, least)
    above = tl.full((), 0, tl.int64)
    for start in range(0, S, BLOCK):
        place = start + tl.arange(0, BLOCK)
        values = tl.load(source + place, place < end, float("-inf")).to(tl.float32)
        kept = (_ordered(values) > least) & (values != float("-inf")) & (place < end)
        above += tl.sum(kept.to(tl.int64), 0)
    room = K - above
    written = tl.full((), 0, tl.int64)
    equal = tl.full((), 0, tl.int64)
    for start in range(0, S, BLOCK):
        place = start + tl.arange(0, BLOCK)
        values = tl.load(source + place, place < end, float("-inf")).to(tl.float32)
        rank = _ordered(values)
        seen = (values != float("-inf")) & (place < end)
        tie = seen & (rank == least)
        order = equal + tl.cumsum(tie.to(tl.int64), 0)
        kept = (seen & (rank > least)) | (tie & (order <= room))
        target = written + tl.cumsum(kept.to(tl.int64), 0) - 1
        tl.store(out + row * K + target, place.to(tl.int64), kept)
        written += tl.sum(kept.to(tl.int64), 0)
        equal += tl.sum(tie.to(tl.int64), 0)


def _best(scores: Tensor, limit: Tensor, count: int) -> Tensor:
    num_rows, entries = scores.shape
    out = torch.full((num_rows, count), -1, dtype=torch.int64, device=scores.device)
    if num_rows and entries and count:
        scores = scores if scores.stride(1) == 1 else scores.contiguous()
        launch(
            _select, (num_rows,), scores, limit.contiguous(), out, entries, scores.stride(0),
            count, BLOCK=min(_BLOCK, next_power(entries, 16)),
        )  # fmt: skip
    return out


def select_topk(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """As the reference."""
    return _best(scores, visible, count)


@triton.jit
def _block_best(scores, visible, out, S, blocks, row_stride, SIZE, BLOCK: tl.constexpr):
    """Largest visible score of block program_id(0), +inf for the newest visible one."""
    in_turn()
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    seen = tl.load(visible + row)
    offset = tl.arange(0, BLOCK)
    place = block * SIZE + offset
    held = (offset < SIZE) & (place < seen) & (place < S)
    best = tl.max(tl.load(scores + row * row_stride + place, held, float("-inf")).to(tl.float32), 0)
    newest = (seen > 0) & (block * SIZE < seen) & (seen <= (block + 1) * SIZE)
    tl.store(out + row * blocks + block, tl.where(newest, float("inf"), best))


def select_blocks(scores: Tensor, visible: Tensor, num_blocks: int, block_size: int) -> Tensor:
    """As the reference."""
    num_rows, entries = scores.shape
    blocks = ceil_div(entries, block_size)
    best = torch.empty(num_rows, blocks, dtype=torch.float32, device=scores.device)
    if num_rows and blocks:
        scores = scores if scores.stride(1) == 1 else scores.contiguous()
        launch(
            _block_best, (blocks, num_rows), scores, visible.contiguous(), best, entries, blocks,
            scores.stride(0), block_size, BLOCK=next_power(block_size),
        )  # fmt: skip
    return _best(best, torch.full_like(visible, blocks), num_blocks)


@triton.jit
def _mark(blocks, out, K, entries, SIZE, BK: tl.constexpr, BLOCK: tl.constexpr):
    in_turn()
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    choice = tl.arange(0, BK)
    chosen = tl.load(blocks + row * K + choice, choice < K, -1)
    match = (place // SIZE)[:, None] == chosen[None, :]
    found = tl.max(match.to(tl.int32), 1)
    tl.store(out + row * entries + place, found.to(tl.int8), place < entries)


def block_mask(blocks: Tensor, num_entries: int, block_size: int) -> Tensor:
    """As the reference."""
    num_rows, count = blocks.shape
    out = torch.zeros(num_rows, num_entries, dtype=torch.int8, device=blocks.device)
    if num_rows and num_entries and count:
        launch(
            _mark, (ceil_div(num_entries, 64), num_rows), blocks.contiguous(), out, count,
            num_entries, block_size, BK=next_power(count), BLOCK=64,
        )  # fmt: skip
    return out.view(torch.bool)
