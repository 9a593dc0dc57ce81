"""Hyper-connections through TileKernels; the projection is DeepGEMM's, whose products are tf32."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.hyper import reference
from deepinfer.kernels.libraries import library
from deepinfer.kernels.linear import DenseWeight

_SPLITS = 16


def _fits(h: Tensor) -> bool:
    return h.dtype == torch.bfloat16 and h.shape[1] == 4 and h.shape[2] % 512 == 0


def hyper_mix(
    h: Tensor,
    fn: DenseWeight,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference for four bf16 streams of a multiple of 512; others take the reference."""
    if not _fits(h):
        return reference.hyper_mix(h, fn, scale, base, norm_eps, hc_eps, iters)
    mhc = library("tile_kernels", "mhc")
    (rows, streams, dim), width = h.shape, fn.stored.shape[0]

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=h.device)

    product, squares = empty(_SPLITS, rows, width), empty(_SPLITS, rows)
    library("deep_gemm").tf32_hc_prenorm_gemm(
        h.flatten(1), fn.fp32(), product, squares, num_splits=_SPLITS
    )
    mixes = empty(rows, width)
    mhc.mhc_reduce_partials_and_rmsnorm_fwd(
        product.unsqueeze(2),
        squares.unsqueeze(2),
        empty(rows, 1, width),
        empty(rows, 1),
        mixes,
        streams * dim,
        norm_eps,
        _SPLITS,
    )
    pre, post = empty(rows, streams), empty(rows, streams)
    raw, comb = empty(rows, streams * streams), empty(rows, streams, streams)
    mhc.mhc_pre_split_mixes_fwd(mixes, scale, base, pre, post, raw, 2.0, hc_eps)
    mhc.mhc_sinkhorn_fwd(raw.view(rows, streams, streams), comb, iters, hc_eps)
    return pre, post, comb


def hyper_collapse(h: Tensor, pre: Tensor) -> Tensor:
    """As the reference where `hyper_mix` is taken."""
    if not _fits(h):
        return reference.hyper_collapse(h, pre)
    out = torch.empty(h.shape[0], h.shape[2], dtype=h.dtype, device=h.device)
    library("tile_kernels", "mhc").mhc_pre_apply_mix_fwd(h, pre.contiguous(), out)
    return out


def hyper_expand(h: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """As the reference where `hyper_mix` is taken."""
    if not _fits(h):
        return reference.hyper_expand(h, y, post, comb)
    out: Tensor = library("tile_kernels", "mhc").mhc_post_fwd(
        y.contiguous().unsqueeze(0),
        h.unsqueeze(0),
        post.contiguous().view(1, *post.shape, 1),
        comb.contiguous().unsqueeze(0),
    )
    return out[0]
