"""Index scores in plain torch, over keys in zero-padded blocks of 64."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.kernels.rows import bmm_rows, sum_in_order

KEY_BLOCK: Final = 64


def _bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def index_score(q: Tensor, weight: Tensor, keys: Tensor, rounding: str) -> Tensor:
    """One product per row and key block: a score's bits depend on neither T nor S."""
    num_keys = keys.shape[-2]
    keys = F.pad(keys, (0, 0, 0, -num_keys % KEY_BLOCK)).expand(q.shape[0], -1, -1)
    queries, factor = q.float(), weight.float().unsqueeze(-1)
    blocks = torch.split(keys, KEY_BLOCK, dim=1)
    dots = torch.cat([bmm_rows(queries, block.transpose(1, 2)) for block in blocks], dim=2)
    if rounding == "reference":
        scores = sum_in_order(_bf16(_bf16(dots).clamp_(min=0.0) * factor), 1)
    else:
        scores = sum_in_order(dots.clamp_(min=0.0) * factor, 1)
    scores = scores[:, :num_keys]
    return scores if rounding == "none" else _bf16(scores)
