"""Rows of a decode step laid out in Triton: one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.decode_rows import LayoutForm, RowLayout
from deepinfer.kernels.tiles import in_turn, launch, next_power


@triton.jit
def _history(
    load, rows, store, row, num, slot, place, position, live, ring,
    DEPTH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    back = tl.arange(0, BD) + 1
    held = back <= DEPTH
    inside = place >= back
    where = position - back
    known = (inside == 0) & (where >= 0) & live
    entry = tl.where(known, slot * ring + tl.maximum(where, 0) % ring, -1)
    tl.store(load + row * DEPTH + back - 1, entry, held)
    at = tl.where(inside, num * DEPTH + row - back, row * DEPTH + back - 1)
    tl.store(rows + row * (1 + DEPTH) + back, at, held)
    tl.store(rows + row * (1 + DEPTH), num * DEPTH + row)
    tl.store(store + row, slot * ring + position % ring)


@triton.jit
def _lay_out(
    slots, places, length, last_token, drafts, table,
    token_ids, positions, window_store, window_slots, visible, emit_entries, emit_starts,
    tail_load, tail_rows, tail_store, engram_load, engram_rows, engram_store,
    num, drafts_row, table_row, window, ring, tokens_per_block, tail, engram,
    R0: tl.constexpr, R1: tl.constexpr, TAIL: tl.constexpr, DEPTH: tl.constexpr,
    DRAFTS: tl.constexpr, BW: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """R0 and R1 are the compression ratios, 0 = none."""
    in_turn()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    place = tl.load(places + row)
    live = slot > 0
    position = tl.where(live, tl.load(length + slot) - 1 + place, 0)
    token = tl.load(last_token + slot)
    if DRAFTS:
        draft = tl.load(drafts + slot * drafts_row + tl.maximum(place - 1, 0))
        token = tl.where(place > 0, draft, token)
    tl.store(token_ids + row, tl.where(live, token, 0))
    tl.store(positions + row, position)
    tl.store(window_store + row, tl.where(live, slot * ring + position % ring, -1))
    offset = tl.arange(0, BW)
    held = tl.maximum(position - (window - 1), 0) + offset
    seen = (held <= position) & live
    places_seen = tl.where(seen, slot * ring + held % ring, -1)
    tl.store(window_slots + row * window + offset, places_seen, offset < window)
    for which in tl.static_range(2):
        ratio = R0 if which == 0 else R1
        if ratio > 0:
            per_block = tokens_per_block // ratio
            count = tl.where(live, (position + 1) // ratio, 0)
            emits = live & ((position + 1) % ratio == 0)
            number = tl.maximum(count - 1, 0)
            page = tl.load(table + slot * table_row + number // per_block)
            at = which * num + row
            tl.store(visible + at, count)
            entry = tl.where(emits, page * per_block + number % per_block, -1)
            tl.store(emit_entries + at, entry)
            tl.store(emit_starts + at, tl.where(emits, number * ratio, 0))
    if TAIL:
        _history(
            tail_load, tail_rows, tail_store, row, num, slot, place, position, live, tail, 1, 1
        )  # fmt: skip
    if DEPTH > 0:
        _history(
            engram_load, engram_rows, engram_store, row, num, slot, place, position, live, engram,
            DEPTH, BD,
        )  # fmt: skip


def lay_out(
    slots: Tensor,
    places: Tensor,
    length: Tensor,
    last_token: Tensor,
    drafts: Tensor,
    table: Tensor,
    form: LayoutForm,
) -> RowLayout:
    """As `decode_rows.lay_out`."""
    num, ratios = slots.shape[0], len(form.ratios)
    last_token = last_token.contiguous()
    assert ratios <= 2, form.ratios
    depth = form.depth if form.engram else 0
    tails = num if form.tail else 0
    widths = [
        (num,), (num,), (num,), (num, form.window), (ratios, num), (ratios, num), (ratios, num),
        (tails,), (tails, 2), (tails,), (num * depth,), (num if depth else 0, 1 + depth),
        (num if depth else 0,),
    ]  # fmt: skip
    sizes = [-(-torch.Size(shape).numel() // 4) * 4 for shape in widths]  # 32-byte steps
    pool = torch.empty(sum(sizes), dtype=torch.int64, device=slots.device)
    parts: list[Tensor] = []
    begin = 0
    for shape, size in zip(widths, sizes, strict=True):
        parts.append(pool[begin : begin + torch.Size(shape).numel()].view(shape))
        begin += size
    found = RowLayout(*parts)
    if num:
        several = (*form.ratios, 0, 0)
        launch(
            _lay_out, (num,), slots, places, length, last_token,
            drafts if drafts.shape[1] else last_token, table, *found, num, drafts.stride(0),
            table.stride(0), form.window, form.ring, form.tokens_per_block, form.tail, form.engram,
            R0=several[0], R1=several[1], TAIL=form.tail > 0, DEPTH=depth,
            DRAFTS=drafts.shape[1] > 0, BW=next_power(form.window), BD=next_power(max(1, depth)),
        )  # fmt: skip
    return found
