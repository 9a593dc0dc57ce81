"""Index scores in plain torch, over keys in zero-padded blocks of 64."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.kernels.rows import matmul_rows, sum_in_order

_KEY_BLOCK: Final = 64


def _bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def index_score(q: Tensor, weight: Tensor, keys: Tensor, rounding: str) -> Tensor:
    """Score key block by key block: a score's bits depend on neither T nor S."""
    num_rows, heads, dim = q.shape
    num_keys = keys.shape[0]
    keys = F.pad(keys, (0, 0, 0, -num_keys % _KEY_BLOCK))
    flat, factor = q.float().reshape(-1, dim), weight.float().unsqueeze(-1)
    columns = []
    for block in keys.split(_KEY_BLOCK):
        dots = matmul_rows(flat, block).view(num_rows, heads, -1)
        if rounding == "reference":
            columns.append(sum_in_order(_bf16(_bf16(dots).clamp(min=0.0) * factor), 1))
        else:
            columns.append(sum_in_order(dots.clamp(min=0.0) * factor, 1))
    scores = torch.cat(columns, dim=1)[:, :num_keys]
    return scores if rounding == "none" else _bf16(scores)
