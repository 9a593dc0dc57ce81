"""Sparse attention through FlashMLA's prefill kernel: one pool of bf16 rows, one list a row.

It reads window and selection as one list, so its softmax runs over both at once; weights are
rounded to bf16 whatever is asked.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.kernels.attention import reference
from deepinfer.kernels.libraries import library

_SLOTS = 128  # lists come in multiples of this
_HEADS, _DIM = 64, 512


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
    """As the reference for 64 bf16 heads of 512; other shapes take the reference itself."""
    if q.dtype != torch.bfloat16 or q.shape[1:] != (_HEADS, _DIM):
        return reference.sparse_attention(
            q, window_kv, window_idx, main_kv, main_idx, sink, scale, round_weights
        )
    pools, lists = [], []
    end = 0
    for kv, idx in ((window_kv, window_idx), (main_kv, main_idx)):
        if kv is None or idx is None:
            continue
        if kv.ndim == 3:  # a row's own entries
            own = torch.arange(idx.numel(), device=idx.device).view(idx.shape)
            idx = own.masked_fill(idx < 0, -1)
        pools.append(kv.reshape(-1, _DIM))
        lists.append(torch.where(idx < 0, -1, idx + end))
        end += pools[-1].shape[0]
    joined = torch.cat(lists, dim=1)
    joined = F.pad(joined, (0, -joined.shape[1] % _SLOTS), value=-1)
    pool = torch.cat(pools).to(torch.bfloat16).unsqueeze(1)
    out: Tensor = library("flash_mla").flash_mla_sparse_fwd(
        q.contiguous(), pool, joined.int().unsqueeze(1), scale, d_v=_DIM, attn_sink=sink
    )[0]
    return out.masked_fill((joined < 0).all(1)[:, None, None], 0.0)
