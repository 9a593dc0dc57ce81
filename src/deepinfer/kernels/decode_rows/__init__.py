"""Where the rows of a decode step read and write, worked out on the device from slot state.

The host knows which slots run and how many drafts each may verify, and nothing else: lengths and
tokens are the device's. Shapes depend on the number of rows alone, so a step can be recorded once
and played again. No op of the dispatch table: what comes out is integers, equal everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["LayoutForm", "RowLayout", "lay_out", "lay_out_plain"]


@dataclass(frozen=True, slots=True)
class LayoutForm:
    """Sizes of the caches that rows are laid out for.

    window, ring     positions that a row sees, and that a ring holds
    ratios           compression ratios
    tokens_per_block positions of a block
    tail             length of the compressors' tail rings, 0 = none
    depth, engram    tokens that Engram looks back, and its ring's length; 0 = none
    """

    window: int
    ring: int
    ratios: tuple[int, ...]
    tokens_per_block: int
    tail: int
    depth: int
    engram: int


class RowLayout(NamedTuple):
    """T rows; R ratios. A row of slot 0 is padding: position 0, nothing seen, nothing stored.

    token_ids, positions  [T]
    window_store  [T]       flat ring entry, -1 = none
    window_slots  [T, W]    flat ring entries, -1 = absent
    visible       [R, T]    compressed entries that a row sees
    emit_entries  [R, T]    flat entry that a row completes, -1 = none
    emit_starts   [R, T]    position of that entry's first token, 0 where there is none
    tail_*, engram_*        look-back as in `History`: loads [T * depth], one `depth` a row; rows
                            [T, 1 + depth] into [loads | T rows]; store [T], padding into slot 0
    """

    token_ids: Tensor
    positions: Tensor
    window_store: Tensor
    window_slots: Tensor
    visible: Tensor
    emit_entries: Tensor
    emit_starts: Tensor
    tail_load: Tensor
    tail_rows: Tensor
    tail_store: Tensor
    engram_load: Tensor
    engram_rows: Tensor
    engram_store: Tensor


def lay_out(
    slots: Tensor,
    places: Tensor,
    length: Tensor,
    last_token: Tensor,
    drafts: Tensor,
    table: Tensor,
    form: LayoutForm,
) -> RowLayout:
    """Lay out rows; all arguments and results int64.

    slots       [T]         of each row, 0 = padding; rows of one slot are neighbours, in order
    places      [T]         0 = the slot's last token, i = its i-th draft
    length      [S]         tokens of each slot
    last_token  [S]
    drafts      [S, K]
    table       [S, width]  block tables
    """
    if slots.device.type == "cuda" and find_spec("triton"):
        from deepinfer.kernels.decode_rows import triton

        return triton.lay_out(slots, places, length, last_token, drafts, table, form)
    return lay_out_plain(slots, places, length, last_token, drafts, table, form)


def lay_out_plain(
    slots: Tensor,
    places: Tensor,
    length: Tensor,
    last_token: Tensor,
    drafts: Tensor,
    table: Tensor,
    form: LayoutForm,
) -> RowLayout:
    """As `lay_out`, in plain torch."""
    device, num = slots.device, slots.shape[0]
    live = slots > 0
    position = torch.where(live, length[slots] - 1 + places, 0)
    token = last_token[slots]
    if drafts.shape[1]:
        token = torch.where(places > 0, drafts[slots, (places - 1).clamp(min=0)], token)
    first = (position - (form.window - 1)).clamp(min=0)
    held = first[:, None] + torch.arange(form.window, device=device)
    seen = (held <= position[:, None]) & live[:, None]
    visible, entries, starts = [], [], []
    for ratio in form.ratios:
        per_block = form.tokens_per_block // ratio
        count = torch.where(live, (position + 1) // ratio, 0)
        emits = live & ((position + 1) % ratio == 0)
        number = (count - 1).clamp(min=0)
        page = table[slots, number // per_block]
        visible.append(count)
        entries.append(torch.where(emits, page * per_block + number % per_block, -1))
        starts.append(torch.where(emits, number * ratio, 0))
    row = torch.arange(num, device=device)[:, None]

    def history(depth: int, ring: int) -> tuple[Tensor, Tensor, Tensor]:
        back = torch.arange(1, depth + 1, device=device)
        inside = places[:, None] >= back
        where = position[:, None] - back
        known = ~inside & (where >= 0) & live[:, None]
        load = torch.where(known, slots[:, None] * ring + where % max(1, ring), -1)
        rows = torch.where(inside, num * depth + row - back, row * depth + back - 1)
        rows = torch.cat([num * depth + row, rows], dim=1)
        return load.flatten(), rows, slots * ring + position % max(1, ring)

    none = slots.new_empty(0)
    return RowLayout(
        torch.where(live, token, 0),
        position,
        torch.where(live, slots * form.ring + position % form.ring, -1),
        torch.where(seen, slots[:, None] * form.ring + held % form.ring, -1),
        torch.stack(visible) if visible else slots.new_empty(0, num),
        torch.stack(entries) if entries else slots.new_empty(0, num),
        torch.stack(starts) if starts else slots.new_empty(0, num),
        *(history(1, form.tail) if form.tail else (none, none.view(0, 2), none)),
        *(history(form.depth, form.engram) if form.engram else (none, none.view(0, 1), none)),
    )
