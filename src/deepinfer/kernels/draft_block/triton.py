"""Draft blocks in Triton: one program per row, and per sequence from one draft to the next."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.draft_block import BlockRows
from deepinfer.kernels.tiles import in_turn, launch, next_power

_COLUMNS = 1024


@triton.jit
def _modulo(a, b):
    """As in mathematics: never negative."""
    return (a % b + b) % b


@triton.jit
def _lay_out(
    slots, last, first, token_ids, positions, own, seen, live, size, window, ring, noise,
    BW: tl.constexpr,
):  # fmt: skip
    in_turn()
    sequence = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1)
    row = sequence * size + place
    slot = tl.load(slots + sequence)
    end = tl.load(last + sequence)
    token = tl.load(first + sequence)
    tl.store(token_ids + row, tl.where(place == 0, token, noise))
    tl.store(positions + row, end + 1 + place)
    entry = slot * ring + _modulo(end + 1 + place, ring)
    tl.store(own + row, tl.where(slot > 0, entry, -1))
    tl.store(live + row, (slot > 0).to(tl.uint8))
    column = tl.arange(0, BW)
    held = tl.minimum(end + 1, window)
    found = end - _modulo(end - column, window)
    before = tl.where(found >= 0, slot * ring + _modulo(found, ring), -1)
    behind = slot * ring + _modulo(end + 1 + column - held, ring)
    entry = tl.where(column < held, before, tl.where(column < held + size, behind, -1))
    tl.store(seen + row * (window + size) + column, entry, column < window + size)


@triton.jit
def _markov(
    embed, tokens, hidden, weight, rows, confidence, C, R, token_row, hidden_row, out_row,
    BR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    in_turn()
    sequence = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + sequence * token_row)
    column = tl.arange(0, BR)
    held = column < R
    values = tl.load(embed + token * R + column, held, 0.0)
    tl.store(rows + sequence * R + column, values, held)
    total = tl.sum(
        values.to(tl.float32) * tl.load(weight + C + column, held, 0.0).to(tl.float32), 0
    )
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, C, BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.load(hidden + sequence * hidden_row + place, place < C, 0.0).to(tl.float32)
        acc += value * tl.load(weight + place, place < C, 0.0).to(tl.float32)
    tl.store(confidence + sequence * out_row, total + tl.sum(acc, 0))


def lay_out_block(
    slots: Tensor, last: Tensor, first: Tensor, size: int, window: int, ring: int, noise: int
) -> BlockRows:
    """As `draft_block.lay_out_block`."""
    num, device = slots.shape[0], slots.device
    ids, positions, own = torch.empty(3, num * size, dtype=torch.int64, device=device)
    seen = torch.empty(num * size, window + size, dtype=torch.int64, device=device)
    live = torch.empty(num * size, dtype=torch.uint8, device=device)
    if num:
        launch(
            _lay_out, (num, size), slots.contiguous(), last.contiguous(), first.contiguous(), ids,
            positions, own, seen, live, size, window, ring, noise, BW=next_power(window + size),
        )  # fmt: skip
    return BlockRows(ids, positions, own, seen, live.view(torch.bool))


def markov_step(
    embed: Tensor, tokens: Tensor, hidden: Tensor, weight: Tensor, confidence: Tensor
) -> Tensor:
    """As `draft_block.markov_step`."""
    embed, weight = embed.contiguous(), weight.contiguous()
    hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    rank, width, num = embed.shape[1], hidden.shape[1], tokens.shape[0]
    rows = torch.empty(num, rank, dtype=embed.dtype, device=embed.device)
    if num:
        launch(
            _markov, (num,), embed, tokens, hidden, weight, rows, confidence, width, rank,
            tokens.stride(0), hidden.stride(0), confidence.stride(0), BR=next_power(rank),
            BLOCK=min(_COLUMNS, next_power(width)),
        )  # fmt: skip
    return rows
