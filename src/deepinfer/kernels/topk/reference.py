"""Selection in plain torch, by a stable sort."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def _best(scores: Tensor, count: int) -> Tensor:
    """Indices of the best entries, ascending, -1 padded; -inf is never picked."""
    absent = scores.shape[1]
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    order = order.masked_fill(scores.gather(1, order) == -math.inf, absent).sort(dim=-1).values
    order = order.masked_fill(order == absent, -1)
    return F.pad(order, (0, count - order.shape[1]), value=-1)


def select_topk(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """Mask, sort, cut."""
    entry = torch.arange(scores.shape[1], device=scores.device)
    return _best(scores.masked_fill(entry >= visible[:, None], -math.inf), count)


def select_blocks(scores: Tensor, visible: Tensor, num_blocks: int, block_size: int) -> Tensor:
    """Largest visible score of each block, +inf for the newest block."""
    entry = torch.arange(scores.shape[1], device=scores.device)
    scores = scores.masked_fill(entry >= visible[:, None], -math.inf)
    scores = F.pad(scores, (0, -scores.shape[1] % block_size), value=-math.inf)
    best = torch.unflatten(scores, 1, (-1, block_size)).amax(-1)
    block = torch.arange(best.shape[1], device=scores.device)
    newest = torch.div(visible - 1, block_size, rounding_mode="floor")
    return _best(best.masked_fill(block == newest[:, None], math.inf), num_blocks)


def block_mask(blocks: Tensor, num_entries: int, block_size: int) -> Tensor:
    """Scatter the blocks, then repeat them over their entries."""
    count = -(-num_entries // block_size)
    kept = torch.zeros(blocks.shape[0], count + 1, dtype=torch.bool, device=blocks.device)
    kept = kept.scatter(1, blocks.masked_fill(blocks < 0, count), True)
    return kept[:, :count].repeat_interleave(block_size, dim=1)[:, :num_entries]
