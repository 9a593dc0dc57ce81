"""Where residual streams begin, and what drafts are made from: copies and means.

No op of the dispatch table: there is one way to copy, and the mean adds its few terms in order.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from deepinfer.kernels.rows import sum_in_order

__all__ = ["mean_into", "start_streams"]


def start_streams(
    embed: Tensor, token_ids: Tensor, num_streams: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return what the first block takes: embeddings copied to all streams, and the mix (1, 0, ..).

    embed [V, C], token_ids [T] int64; returns stream [T, M, C] of `dtype` and pre [T, M] fp32.
    """
    if token_ids.device.type == "cuda" and find_spec("triton"):
        from deepinfer.kernels.streams import triton

        return triton.start_streams(embed, token_ids, num_streams, dtype)
    stream = embed[token_ids].to(dtype).unsqueeze(1).expand(-1, num_streams, -1).contiguous()
    pre = torch.zeros(token_ids.shape[0], num_streams, device=embed.device)
    pre[:, 0] = 1.0
    return stream, pre


def mean_into(stream: Tensor, out: Tensor) -> None:
    """Write the mean over M of stream [T, M, C] to out [T, C], whose rows may lie apart."""
    if stream.device.type == "cuda" and find_spec("triton"):
        from deepinfer.kernels.streams import triton

        triton.mean_into(stream, out)
        return
    out.copy_(sum_in_order(stream.float(), 1) / stream.shape[1])
