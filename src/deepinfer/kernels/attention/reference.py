"""Sparse attention in plain torch, in blocks of 64 slots."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

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
    out = torch.empty_like(queries)
    # An absent slot reads some entry, maybe another sequence's: with a weight of 0, that changes
    # nothing as long as the entry is finite.
    blank = not (_finite(window_kv) and (main_kv is None or _finite(main_kv)))
    for start in range(0, q.shape[0], _ROW_TILE):
        rows = slice(start, start + _ROW_TILE)
        parts = [_gather(window_kv, window_idx, rows)]
        if main_kv is not None and main_idx is not None:
            parts.append(_gather(main_kv, main_idx, rows))
        blocks = _blocks(parts)
        used = present[rows].any(0).tolist()
        kept = [(i, block) for i, block in enumerate(blocks) if used[i]]
        out[rows] = _attend(queries[rows], kept, absent[rows], sink, scale, round_weights, blank)
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
            expected = begin + torch.arange(num_rows)[:, None] * step + torch.arange(num_slots)
            if bool(((index == expected) | (index < 0)).all()):
                dim = entries.shape[1]
                shape, stride = (num_rows, num_slots, dim), (step * dim, dim, 1)
                return entries.as_strided(shape, stride, entries.storage_offset() + begin * dim)
    held = entries.index_select(0, index.clamp(min=0).flatten())
    return held.view(num_rows, num_slots, -1)


def _blocks(parts: list[Tensor]) -> list[Tensor]:
    """Cut joined slots into blocks of 64, copying only where a block joins two parts."""
    if len(parts) == 2 and parts[0].shape[1] % SLOT_BLOCK:
        parts = [torch.cat(parts, dim=1)]
    return [block for part in parts for block in torch.split(part, SLOT_BLOCK, dim=1)]


def _attend(
    queries: Tensor,
    blocks: list[tuple[int, Tensor]],
    absent: Tensor,
    sink: Tensor,
    scale: float,
    round_weights: bool,
    blank: bool,
) -> Tensor:
    """Attend some rows to their blocks, given with their numbers; `blank` empties absent slots.

    Blocks without any entry change nothing and are left out; the last block may be short.
    """
    peak = queries.new_full((*queries.shape[:2], 1), -1e30)
    total = torch.zeros_like(peak)
    acc = torch.zeros_like(queries)
    for number, keys in blocks:
        hidden = absent[:, number * SLOT_BLOCK : (number + 1) * SLOT_BLOCK].unsqueeze(1)
        if keys.shape[1] % _KEY_BLOCK:
            keys = F.pad(keys, (0, 0, 0, -keys.shape[1] % _KEY_BLOCK))
        if blank:
            keys = keys.masked_fill(hidden[..., : keys.shape[1]].transpose(1, 2), 0.0)
        scores = torch.bmm(queries, keys.transpose(1, 2)) * scale
        if keys.shape[1] < SLOT_BLOCK:
            scores = F.pad(scores, (0, SLOT_BLOCK - keys.shape[1]))
        scores.masked_fill_(hidden, -math.inf)
        new_peak = torch.maximum(peak, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - new_peak)
        decay = torch.exp(peak - new_peak)
        total = total * decay + weights.sum(-1, keepdim=True)
        weights = weights[..., : keys.shape[1]]
        if round_weights:
            weights = weights.bfloat16().float()
        acc = acc * decay + torch.bmm(weights, keys)
        peak = new_peak
    return acc / (total + torch.exp(sink[:, None] - peak))
