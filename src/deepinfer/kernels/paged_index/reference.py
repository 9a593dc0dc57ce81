"""Index scores of cached keys in plain torch: bring every row's keys together, then score."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.kernels.cache_io.reference import cache_load
from deepinfer.kernels.index_score.reference import index_score

if TYPE_CHECKING:
    from deepinfer.kernels.cache_io import PagedCache


def paged_index_score(
    q: Tensor,
    weight: Tensor,
    cache: PagedCache,
    table: Tensor,
    rows: Tensor,
    visible: Tensor,
    blocks: Tensor | None,
    block_size: int,
    num_entries: int,
    rounding: str,
) -> Tensor:
    """Load [T, columns, D] and score row by row."""
    device, per_block = q.device, cache.codes.shape[1]
    if blocks is None:
        entry = torch.arange(num_entries, device=device).expand(q.shape[0], -1)
    else:
        inside = torch.arange(block_size, device=device)
        entry = (blocks.unsqueeze(2) * block_size + inside).flatten(1)
        entry = entry.masked_fill((blocks < 0).repeat_interleave(block_size, dim=1), -1)
    seen = (entry >= 0) & (entry < visible[:, None])
    held = entry.masked_fill(~seen, 0)
    flat = table[rows].gather(1, held // per_block) * per_block + held % per_block
    flat = flat.masked_fill(~seen, -1)
    keys = cache_load(cache, flat.flatten()).view(*flat.shape, cache.dim)
    return index_score(q, weight, keys, rounding).masked_fill(~seen, -math.inf)
