"""Sparse attention in plain torch, in blocks of 64 slots."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.kernels.rows import bmm_rows

SLOT_BLOCK: Final = 64
_KEY_BLOCK: Final = 16  # products over fewer keys take another routine, with other bits
_ROW_TILE: Final = 32  # rows whose entries are gathered together; changes no bit


def sparse_attention(
    q: Tensor,
    window_kv: Tensor,
    window_idx: Tensor,
    main_kv: Tensor | None,
    main_idx: Tensor | None,
    sink: Tensor,
    scale: float,
    round_weights: bool,
) -> Tensor:
    """Tile of rows by tile of rows: bring the entries together, then attend."""
    slots = window_idx if main_idx is None else torch.cat([window_idx, main_idx], dim=1)
    absent = F.pad(slots < 0, (0, -slots.shape[1] % SLOT_BLOCK), value=True)
    present = torch.unflatten(~absent, 1, (-1, SLOT_BLOCK)).any(-1)
    queries = q.float()
    out = torch.zeros_like(queries)
    # An absent slot reads some entry, maybe another sequence's: with a weight of 0, that changes
    # nothing as long as the entry is finite.
    blank = not (_finite(window_kv) and (main_kv is None or _finite(main_kv)))
    for start in range(0, q.shape[0], _ROW_TILE):
        rows = slice(start, start + _ROW_TILE)
        parts = [_gather(window_kv, window_idx, rows)]
        if main_kv is not None and main_idx is not None:
            parts.append(_gather(main_kv, main_idx, rows))
        used = present[rows].any(0).nonzero().flatten().tolist()
        if used:
            args = parts, absent[rows], used, sink, scale, round_weights, blank
            out[rows] = _attend(queries[rows], *args)
    return out.to(q.dtype)


def _finite(entries: Tensor) -> bool:
    """Whether no entry holds NaN or infinity; entries by row have zeros where absent."""
    return entries.ndim == 3 or bool(entries.sum().isfinite())


def _gather(entries: Tensor, idx: Tensor, rows: slice) -> Tensor:
    """Return the entries of some rows, [t, S, D]; of absent slots any.

    Rows whose slots are neighbours, each row one further or none, are a view: the window of a
    prefill needs no copy.
    """
    if entries.ndim == 3:
        return entries[rows]
    index = idx[rows]
    num_rows, num_slots = index.shape
    if num_rows > 1:
        begin, end = int(index[0, 0]), int(index[-1, 0])
        step = (end - begin) // (num_rows - 1)
        if begin >= 0 and step in (0, 1) and end + num_slots <= entries.shape[0]:
            row, slot = (torch.arange(n, device=idx.device) for n in (num_rows, num_slots))
            expected = begin + row[:, None] * step + slot
            if bool(((index == expected) | (index < 0)).all()):
                dim = entries.shape[1]
                shape, stride = (num_rows, num_slots, dim), (step * dim, dim, 1)
                return entries.as_strided(shape, stride, entries.storage_offset() + begin * dim)
    held = entries.index_select(0, index.clamp(min=0).flatten())
    return held.view(num_rows, num_slots, -1)


def _attend(
    queries: Tensor,
    parts: list[Tensor],
    absent: Tensor,
    used: list[int],
    sink: Tensor,
    scale: float,
    round_weights: bool,
    blank: bool,
) -> Tensor:
    """Attend some rows to their entries; `blank` empties absent slots.

    The maximum so far is known for all blocks before the sums begin. Blocks without any entry, all
    but `used`, change nothing and are left out of the sums.
    """
    if len(parts) == 2 and parts[0].shape[1] % SLOT_BLOCK:
        parts = [torch.cat(parts, dim=1)]
    keys: list[Tensor] = []  # by block
    dots: list[Tensor] = []
    for part in parts:
        if part.shape[1] % _KEY_BLOCK:
            part = F.pad(part, (0, 0, 0, -part.shape[1] % _KEY_BLOCK))
        if blank:
            start = len(keys) * SLOT_BLOCK
            hidden = absent[:, start : start + part.shape[1]]
            part = part.masked_fill(hidden.unsqueeze(-1), 0.0)
        dots.append(bmm_rows(queries, part.transpose(1, 2)))
        keys.extend(torch.split(part, SLOT_BLOCK, dim=1))
    scores = dots[0] if len(dots) == 1 else torch.cat(dots, dim=2)
    if scores.shape[2] % SLOT_BLOCK:
        scores = F.pad(scores, (0, -scores.shape[2] % SLOT_BLOCK))
    scores = scores.mul_(scale).masked_fill_(absent.unsqueeze(1), -math.inf)
    scores = scores.view(*scores.shape[:2], -1, SLOT_BLOCK)
    peak = scores.amax(-1).clamp_(min=-1e30).cummax(-1).values
    weights = scores.sub_(peak.unsqueeze(-1)).exp_()
    sums = weights.sum(-1)
    fade = torch.exp(F.pad(peak[..., :-1], (1, 0), value=-1e30) - peak)
    if round_weights:
        weights = weights.bfloat16().float()
    total, acc = torch.zeros_like(sums[..., 0]), torch.zeros_like(queries)
    for block in used:  # the maximum stays over the blocks between
        total = total * fade[..., block] + sums[..., block]
        value = bmm_rows(weights[:, :, block, : keys[block].shape[1]], keys[block])
        acc = acc.mul_(fade[..., block, None]).add_(value)
    total = total + torch.exp(sink - peak[..., -1])
    return acc.div_(total.unsqueeze(-1))
