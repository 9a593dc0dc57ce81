"""Begin and end of a decode step in Triton: one program lays out rows, one per sequence ends it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.tiles import in_turn, launch, next_power
from deepinfer.kernels.turn import FIXED, Slots, StepRows


@triton.jit
def _spread(
    slots, alive, limit, length, num_drafts, asked, given,
    live, held, valid, first, row_slots, places, N, T, K,
    DRAFTED: tl.constexpr, GIVEN: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    in_turn()
    n = tl.arange(0, BN)
    inside = n < N
    slot = tl.load(slots + n, inside, 0)
    runs = inside & (slot > 0) & (tl.load(alive + slot, inside, 0) != 0)
    slot = tl.where(runs, slot, 0)
    tl.store(live + n, runs.to(tl.uint8), inside)
    tl.store(held + n, slot, inside)
    if DRAFTED:
        if GIVEN:
            count = tl.load(given + n, inside, 0)
        else:
            room = tl.load(limit + slot, inside, 0) - tl.load(length + slot, inside, 0) - 1
            most = tl.minimum(tl.load(asked + n, inside, 0), tl.load(num_drafts + slot, inside, 0))
            count = tl.where(runs, tl.maximum(tl.minimum(most, room), 0), 0)
        tl.store(valid + n, count, inside)
        count = tl.where(runs, count + 1, 0)
        begin = tl.cumsum(count, 0) - count
        tl.store(first + n, tl.minimum(begin, T - 1), inside)
        for place in range(K + 1):
            mine = place < count
            tl.store(row_slots + begin + place, slot, mine)
            tl.store(places + begin + place, (slot * 0) + place, mine)
        total = tl.sum(count, 0)
        for start in range(0, T, BN):
            row = start + n
            rest = (row < T) & (row >= total)
            tl.store(row_slots + row, slot * 0, rest)
            tl.store(places + row, slot * 0, rest)
    else:
        tl.store(valid + n, slot * 0, inside)
        tl.store(first + n, n.to(tl.int64), inside)
        tl.store(row_slots + n, slot, inside)
        tl.store(places + n, slot * 0, inside)


def spread(
    slots: Tensor, state: Slots, rows: int, asked: Tensor | None, valid: Tensor | None = None
) -> StepRows:
    """As `turn.spread`."""
    num, device = slots.shape[0], slots.device
    held, counts, first = torch.empty(3, num, dtype=torch.int64, device=device)
    row_slots, places = torch.empty(2, rows, dtype=torch.int64, device=device)
    live = torch.empty(num, dtype=torch.uint8, device=device)
    launch(
        _spread, (1,), slots, state.alive.view(torch.uint8), state.limit, state.length,
        state.num_drafts, slots if asked is None else asked, slots if valid is None else valid,
        live, held, counts, first, row_slots, places, num, rows, state.drafts.shape[1],
        DRAFTED=asked is not None, GIVEN=valid is not None, BN=next_power(num),
    )  # fmt: skip
    return StepRows(live.view(torch.bool), held, counts, first, row_slots, places)


@triton.jit
def _finish(
    length, last_token, alive, limit, drafts, num_drafts, endings,
    live, held, valid, first, tokens, bad, packed, K, E, columns,
    FIXED: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """BK holds 1 + K places."""
    in_turn()
    n = tl.program_id(0).to(tl.int64)
    slot = tl.load(held + n)
    runs = tl.load(live + n) != 0
    count = tl.load(valid + n)
    begin = tl.load(first + n)
    place = tl.arange(0, BK)
    inside = place <= K
    at = begin + tl.minimum(place, count)
    emitted = tl.load(tokens + at, inside, 0)
    spoilt = tl.load(bad + at, inside, 0) != 0
    draft = tl.load(drafts + slot * K + place, place < K, 0)
    missed = (emitted != draft) | (place >= count)
    accepted = tl.min(tl.where(missed & (place < K), place, K), 0)
    good = tl.min(tl.where(spoilt & inside, place, K + 1), 0)
    failed = good == 0
    accepted = tl.minimum(accepted, tl.maximum(good - 1, 0)).to(tl.int64)
    before = tl.load(length + slot)
    out = packed + n * columns
    tl.store(out, accepted)
    tl.store(out + 1, failed.to(tl.int64))
    tl.store(out + 2, runs.to(tl.int64))
    tl.store(out + 3, count)
    tl.store(out + 4, tl.load(num_drafts + slot))
    tl.store(out + 5, before - 1)
    tl.store(out + 6, tl.load(last_token + slot))
    tl.store(out + 7, begin)
    tl.store(out + FIXED - 1, begin * 0)
    tl.store(out + FIXED + place, emitted, inside)
    tl.store(out + FIXED + 1 + K + place, draft, place < K)
    after = before + accepted + 1
    token = tl.sum(tl.where(place == accepted, emitted, 0), 0)
    ending = tl.arange(0, BE)
    ids = tl.load(endings + slot * E + ending, ending < E, -1)
    same = (emitted[:, None] == ids[None, :]) & (ending < E)[None, :]
    same = same & (place <= accepted)[:, None]
    ended = tl.max(tl.max(same.to(tl.int32), 1), 0) != 0
    goes = (ended == 0) & (after < tl.load(limit + slot)) & (failed == 0)
    if runs:
        tl.store(length + slot, after)
        tl.store(last_token + slot, token)
        tl.store(num_drafts + slot, after * 0)
        tl.store(alive + slot, goes.to(tl.uint8))


def finish(state: Slots, rows: StepRows, tokens: Tensor, bad: Tensor, packed: Tensor) -> None:
    """As `turn.finish`."""
    num, width, ids = rows.held.shape[0], state.drafts.shape[1], state.endings.shape[1]
    launch(
        _finish, (num,), state.length, state.last_token, state.alive.view(torch.uint8),
        state.limit, state.drafts if width else state.length, state.num_drafts, state.endings,
        rows.live.view(torch.uint8), rows.held, rows.valid, rows.first, tokens.contiguous(),
        bad.contiguous().view(torch.uint8), packed, width, ids, packed.stride(0),
        FIXED=FIXED, BK=next_power(1 + width), BE=next_power(ids), num_warps=1,
    )  # fmt: skip


@triton.jit
def _keep(
    slots, tokens, raw, temperatures, length, alive, limit, drafts, num_drafts, confidences, told,
    packed, K, token_row, raw_row, columns,
    DRAFTED: tl.constexpr, FIXED: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    in_turn()
    n = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + n)
    place = tl.arange(0, BK)
    inside = place < K
    draft = tl.load(drafts + slot * K + place, inside, 0)
    sure = tl.load(confidences + slot * K + place, inside, 0.0)
    count = tl.load(num_drafts + slot)
    if DRAFTED:
        if slot > 0:
            draft = tl.load(tokens + n * token_row + place, inside, 0)
            value = tl.load(raw + n * raw_row + place, inside, 0.0)
            value = tl.div_rn(value, tl.load(temperatures + place, inside, 1.0))
            sure = tl.div_rn(1.0, 1.0 + tl.exp(-value))
            sure = tl.where(sure == sure, sure, 0.0)
            room = tl.load(limit + slot) - tl.load(length + slot) - 1
            room = tl.minimum(tl.maximum(room, 0), K)
            count = tl.where(tl.load(alive + slot) != 0, room, 0)
            tl.store(drafts + slot * K + place, draft, inside)
            tl.store(confidences + slot * K + place, sure, inside)
            tl.store(num_drafts + slot, count)
    tl.store(packed + n * columns + FIXED - 1, count)
    tl.store(packed + n * columns + FIXED + 1 + 2 * K + place, draft, inside)
    tl.store(told + n * K + place, sure, inside)


def keep_drafts(
    state: Slots,
    slots: Tensor,
    tokens: Tensor | None,
    raw: Tensor | None,
    temperatures: Tensor | None,
    packed: Tensor,
) -> Tensor:
    """As `turn.keep_drafts`."""
    num, width = slots.shape[0], state.drafts.shape[1]
    told = torch.empty(num, width, dtype=torch.float32, device=slots.device)
    drafted = tokens is not None and raw is not None and temperatures is not None
    given = tokens if tokens is not None else slots
    values = raw if raw is not None else told
    launch(
        _keep, (num,), slots, given, values, told if temperatures is None else temperatures,
        state.length, state.alive.view(torch.uint8), state.limit, state.drafts, state.num_drafts,
        state.confidences, told, packed, width, given.stride(0), values.stride(0),
        packed.stride(0), DRAFTED=drafted, FIXED=FIXED, BK=next_power(max(1, width)), num_warps=1,
    )  # fmt: skip
    return told
