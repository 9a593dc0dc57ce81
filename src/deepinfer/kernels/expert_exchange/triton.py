"""Rows to the ranks that need them and back, through addresses of their memory.

Each rank has one buffer that all others can write: a row for every (source, row) with a header of
slots and weights, a row for every choice that comes back, and a flag for every source and way. A
flag is its call's number and a count; whoever waits for it reads it with acquire, whoever sets it
releases what was written before. Only single programs wait: a grid that need not be resident as a
whole would wait for ever.

One buffer serves every call: a rank writes rows of call n+1 only after it has the returns of call n
from everybody, who had read theirs before they returned; and a return of call n+1 answers rows that
were sent after the returns of call n were read.

Source: parallelism specification, 3.5.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.grouping import Groups
from deepinfer.kernels.tiles import (
    act8_scale,
    ceil_div,
    e4m3_code,
    e4m3_round,
    e4m3_value,
    launch,
    narrow,
    next_power,
    pow2_inverse,
    ue8m0_value,
)

__all__ = [
    "HEAD_ALIGN",
    "await_flags",
    "choose_slots",
    "decode",
    "give_back",
    "push",
    "raise_flags",
]

HEAD_ALIGN = 16  # bytes: rows, headers and values begin at multiples, so that 16 go at once
_TILE = 1024
_PUSH_WARPS = 2  # a thread then has two words of eight codes
_BACK_TILE = 2048  # words of eight bytes
_BACK_WARPS = 8


@triton.jit
def _choose(
    chosen, weight, live, log2phy, copies, counts, slots, weights, places, K, X, place,
    SPREAD: tl.constexpr, LIVE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Program row: its choices in ascending order of experts, as slots; counts them."""
    row = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, BK)
    own = choice < K
    expert = tl.load(chosen + row * K + choice, own, 0)
    counted = own & (expert >= 0)
    if LIVE:
        counted = counted & (tl.load(live + row) != 0)
    safe = tl.maximum(expert, 0)
    copy = (place + row * SPREAD) % tl.load(copies + safe, own, 1)
    slot = tl.load(log2phy + safe * X + copy, counted, -1)
    before = (expert[None, :] < expert[:, None]) | (
        (expert[None, :] == expert[:, None]) & (choice[None, :] < choice[:, None])
    )
    at = row * K + tl.sum((before & own[None, :]).to(tl.int32), 1)
    tl.store(slots + at, slot, own)
    tl.store(weights + at, tl.load(weight + row * K + choice, own, 0.0), own)
    tl.store(places + at, tl.where(slot < 0, -1, at), own)
    tl.atomic_add(counts + safe, (expert * 0 + 1), counted)


@triton.jit
def _push(
    x, slots, weight, bases, C, K, row_bytes, first_row, num_local,
    SIZE: tl.constexpr, BK: tl.constexpr, TILE: tl.constexpr,
    QUANTIZE: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """Program (row, tile of columns) writes to every rank that holds one of the row's experts."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    choice = tl.arange(0, BK)
    own = choice < K
    slot = tl.load(slots + row * K + choice, own, -1)
    owner = tl.where(slot < 0, -1, slot // num_local)
    target = (first_row + row) * row_bytes
    if QUANTIZE:
        column = part * TILE + tl.arange(0, TILE)
        values = tl.load(x + row * C + column, column < C, 0.0).to(tl.float32)
        groups = tl.reshape(values, (TILE // 32, 32))
        scale = act8_scale(tl.max(tl.abs(groups), 1))
        code = e4m3_code(e4m3_round(groups * pow2_inverse(scale)[:, None])).to(tl.int64) & 255
        shift = (tl.arange(0, 8) * 8).to(tl.int64)
        words = tl.sum(tl.reshape(code, (TILE // 8, 8)) << shift[None, :], 1)
        exponent = (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
        group = part * (TILE // 32) + tl.arange(0, TILE // 32)
        word = part * (TILE // 8) + tl.arange(0, TILE // 8)
        held = word * 8 < C
    else:  # x is its bytes, eight a word
        word = part * TILE + tl.arange(0, TILE)
        held = word < C
        words = tl.load(x + row * C + word, held, 0)
    for rank in range(SIZE):
        base = tl.load(bases + rank) + target
        wanted = tl.sum((owner == rank).to(tl.int32), 0) > 0
        if part == 0:  # who needs nothing has to know it
            head = base.to(tl.pointer_type(tl.int32))
            tl.store(head + choice, tl.where(owner == rank, slot, -1).to(tl.int32), own)
            weights = base.to(tl.pointer_type(tl.float32)) + K
            tl.store(weights + choice, tl.load(weight + row * K + choice, own, 0.0), own)
        if wanted:
            body = tl.multiple_of((base + HEAD).to(tl.pointer_type(tl.int64)), 16)
            tl.store(body + word, words, held)
            if QUANTIZE:
                scales = (base + HEAD + C).to(tl.pointer_type(tl.uint8))
                tl.store(scales + group, exponent, group * 32 < C)


@triton.jit
def _raise(bases, flag_offset, place, epoch, count, SIZE: tl.constexpr):
    number = tl.load(epoch)
    value = (number << 32) | count
    for rank in range(SIZE):
        flag = (tl.load(bases + rank) + flag_offset).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(flag + place, value, sem="release", scope="sys")


@triton.jit
def _await(flags, epoch, counts, error, LIMIT: tl.constexpr, SIZE: tl.constexpr):
    number = tl.load(epoch)
    nothing = number * 0
    for rank in range(SIZE):
        value = tl.atomic_add(flags + rank, nothing, sem="acquire", scope="sys")
        turns = 0
        while ((value >> 32) != number) & (turns < LIMIT):
            value = tl.atomic_add(flags + rank, nothing, sem="acquire", scope="sys")
            turns += 1
        if (value >> 32) != number:
            tl.store(error, rank + 1)
            value = nothing
        tl.store(counts + rank, value & 0x7FFFFFFF)
    tl.store(epoch, number + 1)


@triton.jit
def _header(
    rows, counts, chosen, weights, turns, tally, most, capacity, row_bytes, K, first_slot,
    num_local, BK: tl.constexpr,
):  # fmt: skip
    """Slots of this rank, counted from its first, and weights; -1 for what is not this rank's. Each
    choice takes a number among those of its slot.
    """
    row = tl.program_id(0).to(tl.int64)
    source, place = row // most, row % most
    choice = tl.arange(0, BK)
    own = choice < K
    head = rows + (source * capacity + place) * row_bytes
    here = place < tl.load(counts + source)
    slot = tl.load(head.to(tl.pointer_type(tl.int32)) + choice, own & here, -1)
    weight = tl.load(head.to(tl.pointer_type(tl.float32)) + K + choice, own & here, 0.0)
    local = slot - first_slot
    mine = (slot >= 0) & (local >= 0) & (local < num_local)
    turn = tl.atomic_add(tally + tl.where(mine, local, 0), choice * 0 + 1, mine)
    tl.store(chosen + row * K + choice, tl.where(mine, local, -1), own)
    tl.store(weights + row * K + choice, weight, own)
    tl.store(turns + row * K + choice, turn, own)


@triton.jit
def _add_up(tally, offsets, N, BN: tl.constexpr):
    """Where each slot's run begins; the tally is zero again for the next call."""
    slot = tl.arange(0, BN)
    count = tl.load(tally + slot, slot < N, 0)
    tl.store(offsets + 1 + slot, tl.cumsum(count, 0).to(tl.int64), slot < N)
    tl.store(offsets + slot, (count * 0).to(tl.int64), slot < 1)
    tl.store(tally + slot, count * 0, slot < N)


@triton.jit
def _scatter(
    chosen, weights, turns, offsets, rows, sorted_weights, place, K, BK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, BK)
    own = choice < K
    slot = tl.load(chosen + row * K + choice, own, -1)
    mine = slot >= 0
    at = tl.load(offsets + tl.where(mine, slot, 0), mine, 0)
    at += tl.load(turns + row * K + choice, mine, 0)
    tl.store(rows + at, (choice * 0).to(tl.int64) + row, mine)
    tl.store(sorted_weights + at, tl.load(weights + row * K + choice, mine, 0.0), mine)
    tl.store(place + row * K + choice, tl.where(mine, at, -1), own)


@triton.jit
def _decode(
    rows, chosen, out, most, capacity, row_bytes, C, K,
    QUANTIZE: tl.constexpr, HEAD: tl.constexpr, BK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (received row, tile) reads the row's values if it is for this rank."""
    row = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, BK)
    slot = tl.load(chosen + row * K + choice, choice < K, -1)
    if tl.sum((slot >= 0).to(tl.int32), 0) > 0:
        base = rows + ((row // most) * capacity + row % most) * row_bytes + HEAD
        column = tl.program_id(1) * TILE + tl.arange(0, TILE)
        held = column < C
        if QUANTIZE:
            value = e4m3_value(tl.load(base + column, held, 0))
            value = value * ue8m0_value(tl.load(base + C + column // 32, held, 0))
            tl.store(out + row * C + column, narrow(value, out.dtype.element_ty), held)
        else:  # out is its bytes, eight a word
            word = tl.load(base.to(tl.pointer_type(tl.int64)) + column, held, 0)
            tl.store(out + row * C + column, word, held)


@triton.jit
def _give_back(
    outputs, place, bases, offset, first, most, K, words,
    SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (received row, choice, tile) writes a part of a choice's output to the row's source.

    Sources take turns, from `first` on, so that all links and the own memory work at once.
    """
    number = tl.program_id(0)
    source = (number + first) % SIZE
    row = (number // SIZE).to(tl.int64)
    choice = tl.program_id(1)
    found = tl.load(place + (source * most + row) * K + choice)
    if found >= 0:
        base = tl.load(bases + source) + offset
        target = base.to(tl.pointer_type(tl.int64)) + (row * K + choice) * words
        target = tl.multiple_of(target, 16)
        word = tl.program_id(2) * TILE + tl.arange(0, TILE)
        held = word < words
        tl.store(target + word, tl.load(outputs + found * words + word, held, 0), held)


def choose_slots(
    chosen: Tensor, weight: Tensor, live: Tensor | None, log2phy: Tensor, copies: Tensor,
    counts: Tensor, place: int, spread: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return slots, weights and places [T, k] of choices in ascending order of experts.

    chosen [T, k] int64, weight [T, k] fp32, live [T] bool; maps and `spread` as in ExpertMaps
    counts  [E] int64, gains a one for each choice of a live row
    places  number of the choice, -1 where it has no slot
    """
    chosen, weight = chosen.contiguous(), weight.contiguous()
    slots, places = torch.empty_like(chosen), torch.empty_like(chosen)
    weights = torch.empty_like(weight)
    rows, active = chosen.shape
    if rows:
        launch(
            _choose, (rows,), chosen, weight, chosen if live is None else live.view(torch.int8),
            log2phy, copies, counts, slots, weights, places, active, log2phy.shape[1], place,
            SPREAD=spread, LIVE=live is not None, BK=next_power(active, 2), num_warps=1,
        )  # fmt: skip
    return slots, weights, places


def push(
    x: Tensor, slots: Tensor, weight: Tensor, bases: Tensor, row_bytes: int, first_row: int,
    num_local: int, quantize: bool,
) -> None:  # fmt: skip
    """Write rows x [T, C] with slots [T, k] int64 and weights [T, k] to the ranks that need them.

    bases      [N] int64 addresses of the rows of every rank
    first_row  of this rank's rows there
    """
    num_rows, active = slots.shape
    values = x.contiguous() if quantize else x.contiguous().view(torch.int64)
    columns = values.shape[1]
    launch(
        _push, (num_rows, ceil_div(columns, _TILE)), values, slots.contiguous(),
        weight.contiguous(), bases, columns, active, row_bytes, first_row, num_local,
        SIZE=bases.shape[0], BK=next_power(active, 2), TILE=_TILE, QUANTIZE=quantize,
        HEAD=head_bytes(active), num_warps=_PUSH_WARPS,
    )  # fmt: skip


def head_bytes(active: int) -> int:
    """Return the bytes before a row's values."""
    return ceil_div(8 * active, HEAD_ALIGN) * HEAD_ALIGN


def raise_flags(bases: Tensor, offset: int, place: int, epoch: Tensor, count: int) -> None:
    """Tell every rank that this one's writes are done, and a count.

    epoch  [1] int64, the number of the call
    """
    launch(_raise, (1,), bases, offset, place, epoch, count, SIZE=bases.shape[0], num_warps=1)


def await_flags(flags: Tensor, epoch: Tensor, counts: Tensor, error: Tensor, limit: int) -> None:
    """Wait for every rank's flag [N] of this call and go on to the next.

    counts  [N] int64, what they told
    error   [1] int32, becomes 1 + the rank that did not come within `limit` looks
    """
    launch(_await, (1,), flags, epoch, counts, error, LIMIT=limit, SIZE=flags.shape[0],
           num_warps=1)  # fmt: skip


def sort_choices(
    rows: Tensor, counts: Tensor, tally: Tensor, most: int, capacity: int, row_bytes: int,
    active: int, first_slot: int, num_local: int,
) -> tuple[Tensor, Groups]:  # fmt: skip
    """Sort the choices of received rows (uint8, [N, capacity, row_bytes]) by this rank's slots.

    counts  [N] int64, rows of each source; tally [>= num_local] int32, zeros, and zeros again
    Returns slots [N * most, k] int32, counted from this rank's first and -1 elsewhere, and groups
    of all choices. Those of one slot have no fixed order: a row's result does not depend on it.
    """
    total, device = counts.shape[0] * most, rows.device
    chosen = torch.empty(total, active, dtype=torch.int32, device=device)
    weights = torch.empty(total, active, dtype=torch.float32, device=device)
    turns = torch.empty_like(chosen)
    width = next_power(active, 2)
    launch(
        _header, (total,), rows, counts, chosen, weights, turns, tally, most, capacity, row_bytes,
        active, first_slot, num_local, BK=width, num_warps=1,
    )  # fmt: skip
    offsets = torch.empty(num_local + 1, dtype=torch.int64, device=device)
    launch(_add_up, (1,), tally, offsets, num_local, BN=next_power(num_local, 2))
    found = torch.zeros(total * active, dtype=torch.int64, device=device)  # each is read as a row
    sorted_weights = torch.empty(total * active, dtype=torch.float32, device=device)
    place = torch.empty(total, active, dtype=torch.int64, device=device)
    launch(
        _scatter, (total,), chosen, weights, turns, offsets, found, sorted_weights, place, active,
        BK=width, num_warps=1,
    )  # fmt: skip
    return chosen, Groups(found, sorted_weights, place, offsets)


def decode(
    rows: Tensor, chosen: Tensor, most: int, capacity: int, row_bytes: int, columns: int,
    dtype: torch.dtype, quantize: bool,
) -> Tensor:  # fmt: skip
    """Return the values [N * most, C] of received rows, as `round_trip` would have them.

    chosen  [N * most, k] int32 slots: rows without any are left as they are
    """
    total, active = chosen.shape
    out = torch.empty(total, columns, dtype=dtype, device=rows.device)
    into = out if quantize else out.view(torch.int64)
    launch(
        _decode, (total, ceil_div(into.shape[1], _TILE)), rows, chosen, into, most,
        capacity, row_bytes, into.shape[1], active, QUANTIZE=quantize, HEAD=head_bytes(active),
        BK=next_power(active, 2), TILE=_TILE,
    )  # fmt: skip
    return out


def give_back(
    outputs: Tensor, place: Tensor, bases: Tensor, offset: int, most: int, first: int
) -> None:
    """Write the outputs [P, C] of received rows' choices (place [N * most, k]) to their sources.

    first  the source whose rows go first; another for every rank
    """
    words = outputs.contiguous().view(torch.int64)
    assert words.shape[1] % 2 == 0, "a row is not a multiple of 16 bytes"
    size, active = bases.shape[0], place.shape[1]
    launch(
        _give_back, (size * most, active, ceil_div(words.shape[1], _BACK_TILE)), words, place,
        bases, offset, first, most, active, words.shape[1], SIZE=size, TILE=_BACK_TILE,
        num_warps=_BACK_WARPS,
    )  # fmt: skip
