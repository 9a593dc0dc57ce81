"""One block: attention and experts between hyper-connections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.grouping import Terms, whole
from deepinfer.kernels.hyper_site import SiteWeights
from deepinfer.kernels.ops import Ops
from deepinfer.model.fast.moe import moe, moe_terms
from deepinfer.model.fast.step import Pass
from deepinfer.model.fast.weights import BlockWeights, HyperWeights

__all__ = ["Open", "Sites", "begin", "run_block", "run_open", "sites_of"]


@dataclass(frozen=True, slots=True)
class Open:
    """Streams of which a sublayer's output is still to become part.

    stream [T, M, C], pre [T, M] the mix for what follows; out [T, C], or terms that are still to be
    added up, with post [T, M] and comb [T, M, M]; None = nothing is open
    """

    stream: Tensor
    pre: Tensor
    out: Tensor | Terms | None = None
    post: Tensor | None = None
    comb: Tensor | None = None

    def close(self, ops: Ops) -> Open:
        """Write the output into the streams."""
        if self.out is None:
            return self
        stream = ops.hyper_expand(self.stream, whole(self.out), self.post, self.comb)
        return Open(stream, self.pre)


@dataclass(frozen=True, slots=True)
class Sites:
    """The parameters of a block's two sublayers as a hyper-connection site takes them."""

    attn: SiteWeights
    ffn: SiteWeights


def sites_of(block: BlockWeights, dtype: torch.dtype) -> Sites:
    """Return a block's sites; norms in the type of activations, in which they are exact."""
    attn, ffn = block.hc_attn, block.hc_ffn
    return Sites(
        SiteWeights(attn.fn, attn.scale, attn.base, block.attn_norm.to(dtype)),
        SiteWeights(ffn.fn, ffn.scale, ffn.base, block.ffn_norm.to(dtype)),
    )


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


def run_open(
    step: Pass,
    block: BlockWeights,
    sites: Sites,
    before: Open,
    attend: Callable[[Tensor, Tensor | None], Tensor],
    num_active: int,
) -> tuple[Open, Tensor]:
    """As `run_block`, with one op where a sublayer ends and the next begins.

    What the block's experts return stays open, for the next block or `Open.close`; beside it comes
    the stream that the block began with. Nothing is traced.
    """
    x, rounded, attn = begin(step, sites.attn, before, step.numerics.quantize)
    out = attend(x, rounded)
    middle = Open(attn.stream, attn.pre, out, attn.post, attn.comb)
    x, rounded, ffn = begin(step, sites.ffn, middle, step.numerics.quantize)
    terms = moe_terms(step, block.moe, x, num_active, rounded)
    return Open(ffn.stream, ffn.pre, terms, ffn.post, ffn.comb), attn.stream


def begin(
    step: Pass, weights: SiteWeights, before: Open, quantize: bool = False
) -> tuple[Tensor, Tensor | None, Open]:
    """Begin a sublayer; return its normed input and, without its output yet, what it leaves.

    quantize  return the input rounded with ACT8, too, where one op does all of it
    """
    ops, config = step.ops, step.config
    if before.out is None:
        hyper = HyperWeights(weights.fn, weights.base, weights.scale)
        pre, post, comb = _mix(step, hyper, before.stream)
        x = ops.hyper_collapse(before.stream, before.pre)
        x = ops.rms_norm(x, weights.norm, config.rms_norm_eps)
        return x, None, Open(before.stream, pre, None, post, comb)
    given = before.stream, before.out, before.post, before.comb, before.pre, weights
    numbers = config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters
    rounded: Tensor | None = None
    if quantize:
        stream, x, pre, post, comb, rounded = ops.hyper_site_rounded(*given, *numbers)
    else:
        stream, x, pre, post, comb = ops.hyper_site(*given, *numbers)
    return x, rounded, Open(stream, pre, None, post, comb)


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
