"""One block: attention and experts between hyper-connections."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.model.fast.moe import moe
from deepinfer.model.fast.step import Pass
from deepinfer.model.fast.weights import BlockWeights, HyperWeights

__all__ = ["run_block", "start_streams"]


def start_streams(
    embed: Tensor, token_ids: Tensor, num_streams: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return what the first block takes: embeddings copied to all streams, and the mix (1, 0, ..).

    embed [V, C], token_ids [T] int64; returns stream [T, M, C] of `dtype` and pre [T, M] fp32.
    """
    stream = embed[token_ids].to(dtype).unsqueeze(1).expand(-1, num_streams, -1).contiguous()
    pre = torch.zeros(token_ids.shape[0], num_streams, device=embed.device)
    pre[:, 0] = 1.0
    return stream, pre


def run_block(
    step: Pass,
    block: BlockWeights,
    stream: Tensor,
    pre: Tensor,
    attend: Callable[[Tensor], Tensor],
    num_active: int,
) -> tuple[Tensor, Tensor]:
    """Run a block on stream [T, M, C]; returns the streams and the mix [T, M] for what follows.

    Each sublayer reads the streams through the mix of the sublayer before it: `pre` comes from the
    previous block's experts, and what is returned goes to the next block's attention.
    """
    ops, eps = step.ops, step.config.rms_norm_eps
    attn_pre, post, comb = _mix(step, block.hc_attn, stream)
    x = ops.rms_norm(ops.hyper_collapse(stream, pre), block.attn_norm, eps)
    out = attend(x)
    step.note("attn_out", out)
    stream = ops.hyper_expand(stream, out, post, comb)
    ffn_pre, post, comb = _mix(step, block.hc_ffn, stream)
    x = ops.rms_norm(ops.hyper_collapse(stream, attn_pre), block.ffn_norm, eps)
    out = moe(step, block.moe, x, num_active)
    step.note("ffn_out", out)
    stream = ops.hyper_expand(stream, out, post, comb)
    step.note("stream_out", stream)
    step.note("pre_mix", ffn_pre)
    return stream, ffn_pre


def _mix(step: Pass, weights: HyperWeights, stream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a sublayer's coefficients pre [T, M], post [T, M] and comb [T, M, M]."""
    config = step.config
    return step.ops.hyper_mix(
        stream,
        weights.fn,
        weights.scale,
        weights.base,
        config.rms_norm_eps,
        config.hc_eps,
        config.hc_sinkhorn_iters,
    )
