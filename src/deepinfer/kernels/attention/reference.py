"""Sparse attention in plain torch, in blocks of 64 slots."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

SLOT_BLOCK: Final = 64
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
    """Gather, score, rescale, accumulate: tile of rows by tile of rows."""
    entries, slots = window_kv, window_idx
    if main_kv is not None and main_idx is not None:
        entries = torch.cat([window_kv, main_kv])
        shifted = torch.where(main_idx < 0, main_idx, main_idx + window_kv.shape[0])
        slots = torch.cat([window_idx, shifted], dim=1)
    slots = F.pad(slots, (0, -slots.shape[1] % SLOT_BLOCK), value=-1)
    absent = slots < 0
    present = (~absent).unflatten(1, (-1, SLOT_BLOCK)).any(-1)
    slots = slots.clamp(min=0)
    queries = q.float()
    out = torch.empty_like(queries)
    for start in range(0, q.shape[0], _ROW_TILE):
        rows = slice(start, start + _ROW_TILE)
        used = present[rows].any(0).tolist()
        out[rows] = _tile(
            queries[rows], entries, slots[rows], absent[rows], used, sink, scale, round_weights
        )
    return out.to(q.dtype)


def _tile(
    queries: Tensor,
    entries: Tensor,
    slots: Tensor,
    absent: Tensor,
    used: list[bool],
    sink: Tensor,
    scale: float,
    round_weights: bool,
) -> Tensor:
    """Attend some rows; blocks without any entry change nothing and are left out."""
    peak = queries.new_full((*queries.shape[:2], 1), -1e30)
    total = torch.zeros_like(peak)
    acc = torch.zeros_like(queries)
    for block, needed in enumerate(used):
        if not needed:
            continue
        part = slice(block * SLOT_BLOCK, (block + 1) * SLOT_BLOCK)
        index = slots[:, part]
        keys = entries.index_select(0, index.flatten()).view(*index.shape, -1)
        scores = torch.bmm(queries, keys.transpose(1, 2)) * scale
        scores.masked_fill_(absent[:, part].unsqueeze(1), -math.inf)
        new_peak = torch.maximum(peak, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - new_peak)
        decay = torch.exp(peak - new_peak)
        total = total * decay + weights.sum(-1, keepdim=True)
        if round_weights:
            weights = weights.bfloat16().float()
        acc = acc * decay + torch.bmm(weights, keys)
        peak = new_peak
    return acc / (total + torch.exp(sink[:, None] - peak))
