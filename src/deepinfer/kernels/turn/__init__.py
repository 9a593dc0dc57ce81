"""A decode step's begin and end on the slots' state: which rows run, and what becomes of them.

No op of the dispatch table: integers alone, equal everywhere, and the state is written in place.
The plain forms define the others. Slots of a step are each named once, but for 0, which is padding.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["FIXED", "Slots", "StepRows", "finish", "keep_drafts", "spread", "usable"]

FIXED = 9
"""Columns of an outcome in front of tokens and drafts."""


class Slots(NamedTuple):
    """State by slot, as in `engine/state.py`: [S]; drafts, confidences [S, K], endings [S, E]."""

    length: Tensor
    last_token: Tensor
    alive: Tensor
    limit: Tensor
    drafts: Tensor
    num_drafts: Tensor
    confidences: Tensor
    endings: Tensor


class StepRows(NamedTuple):
    """N sequences and their T rows; rows of none belong to slot 0.

    live       [N] bool, sequences that run
    held       [N] their slots, 0 for the others
    valid      [N] drafts that they verify
    first      [N] their first row
    row_slots  [T], places [T]: 0 = a slot's last token, i = its i-th draft
    """

    live: Tensor
    held: Tensor
    valid: Tensor
    first: Tensor
    row_slots: Tensor
    places: Tensor


def spread(
    slots: Tensor, state: Slots, rows: int, asked: Tensor | None, valid: Tensor | None = None
) -> StepRows:
    """Give each live sequence of slots [N] a row for its last token and for each draft it verifies.

    rows   T, at least as many as that takes
    asked  [N] most drafts of each; None = none, and T = N
    valid  [N] drafts to verify, where that is decided already
    """
    if slots.device.type == "cuda" and find_spec("triton"):
        from deepinfer.kernels.turn import triton

        return triton.spread(slots, state, rows, asked, valid)
    live = state.alive[slots] & (slots > 0)
    held = torch.where(live, slots, 0)
    if asked is None:
        none = torch.zeros_like(slots)
        return StepRows(live, held, none, torch.arange(rows, device=slots.device), held, none)
    if valid is None:
        valid = usable(state, live, held, asked)
    counts = torch.where(live, valid + 1, 0)
    ends = counts.cumsum(0)
    row = torch.arange(rows, device=slots.device)
    owner = torch.searchsorted(ends, row, right=True).clamp(max=slots.shape[0] - 1)
    real = row < ends[-1]
    return StepRows(
        live,
        held,
        valid,
        (ends - counts).clamp(max=rows - 1),
        torch.where(real, held[owner], 0),
        torch.where(real, row - (ends - counts)[owner], 0),
    )


def usable(state: Slots, live: Tensor, held: Tensor, asked: Tensor) -> Tensor:
    """Return how many drafts sequences may verify [N]: the last token of the limit is never fed,
    and the row before it draws it.
    """
    room = state.limit[held] - state.length[held] - 1
    valid = torch.minimum(torch.minimum(asked, state.num_drafts[held]), room)
    return torch.where(live, valid.clamp(min=0), 0)


def finish(state: Slots, rows: StepRows, tokens: Tensor, bad: Tensor, packed: Tensor) -> None:
    """Accept drafts that equal the tokens [T] drawn for their rows, and move the slots on.

    bad     [T] bool: a row whose logits could not be used is drawn again in the next step, as the
            first of its own; a sequence whose first row is bad has failed and ends
    packed  [N, FIXED + 1 + 3K] int64: accepted, failed, live, verified, proposed, start, last
            token, first row, number of the next drafts (0 here); then tokens [1 + K], of which
            accepted + 1 count, the step's drafts, the next drafts (`keep_drafts` fills these)
    """
    if tokens.device.type == "cuda" and find_spec("triton"):
        from deepinfer.kernels.turn import triton

        triton.finish(state, rows, tokens, bad, packed)
        return
    drafts = state.drafts[rows.held]
    width = drafts.shape[1]
    place = torch.arange(1 + width, device=tokens.device)
    at = rows.first[:, None] + torch.minimum(place, rows.valid[:, None])
    emitted = tokens[at]
    hits = (emitted[:, :-1] == drafts) & (place[:-1] < rows.valid[:, None])
    good = (~bad[at]).long().cumprod(1).sum(1)
    accepted = torch.minimum(hits.long().cumprod(1).sum(1), (good - 1).clamp(min=0))
    length, live = state.length[rows.held], rows.live
    numbers = (
        accepted, good == 0, live, rows.valid, state.num_drafts[rows.held], length - 1,
        state.last_token[rows.held], rows.first,
    )  # fmt: skip
    packed[:, : FIXED - 1] = torch.stack([n.long() for n in numbers], 1)
    packed[:, FIXED - 1] = 0
    packed[:, FIXED : FIXED + 1 + width] = emitted
    packed[:, FIXED + 1 + width : FIXED + 1 + 2 * width] = drafts
    after = length + accepted + 1
    ended = (emitted[:, :, None] == state.endings[rows.held][:, None]).any(2)
    ended = (ended & (place <= accepted[:, None])).any(1)
    goes = ~(ended | (after >= state.limit[rows.held]) | (good == 0))
    slots = rows.held[live]
    state.length[slots] = after[live]
    state.last_token[slots] = emitted.gather(1, accepted[:, None])[live, 0]
    state.num_drafts[slots] = 0
    state.alive[slots] = goes[live]


def keep_drafts(
    state: Slots,
    slots: Tensor,
    tokens: Tensor | None,
    raw: Tensor | None,
    temperatures: Tensor | None,
    packed: Tensor,
) -> Tensor:
    """Keep drafts for the next step and tell of them; return their confidences [N, K] fp32.

    slots         [N], 0 = padding, whose state is left alone
    tokens, raw   [N, K] int64 and fp32: drafts, and what their confidence is the sigmoid of after
                  division by temperatures [K]; no number counts as 0. None: nothing was drafted,
                  and what the state has is told
    """
    if slots.device.type == "cuda" and find_spec("triton"):
        from deepinfer.kernels.turn import triton

        return triton.keep_drafts(state, slots, tokens, raw, temperatures, packed)
    width = state.drafts.shape[1]
    if tokens is not None and raw is not None and temperatures is not None:
        confidences = (1.0 / (1.0 + torch.exp(-raw / temperatures))).nan_to_num(nan=0.0)
        room = state.limit[slots] - state.length[slots] - 1
        counts = torch.where(state.alive[slots], room.clamp(0, width), 0)
        real = slots > 0
        state.drafts[slots[real]] = tokens[real]
        state.num_drafts[slots[real]] = counts[real]
        state.confidences[slots[real]] = confidences[real]
    packed[:, FIXED - 1] = state.num_drafts[slots]
    packed[:, FIXED + 1 + 2 * width :] = state.drafts[slots]
    return state.confidences[slots]
