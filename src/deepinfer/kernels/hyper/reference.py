"""Hyper-connections in plain torch; short sums from left to right."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.linear import DenseWeight
from deepinfer.kernels.rows import matmul_rows, sigmoid, sum_in_order


def project(
    h: Tensor, fn: DenseWeight, scale: Tensor, base: Tensor, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three groups of projections before their nonlinearities."""
    n = h.shape[1]
    flat = h.float().flatten(1)
    norm = torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    mixes = matmul_rows(flat, fn.fp32()) * norm
    gains = scale.repeat_interleave(torch.tensor([n, n, n * n], device=scale.device))
    pre, post, raw = (mixes * gains + base).split_with_sizes([n, n, n * n], dim=-1)
    return pre, post, raw.unflatten(-1, (n, n))


def hyper_mix(
    h: Tensor,
    fn: DenseWeight,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sigmoids of the first two groups, Sinkhorn of the third."""
    pre, post, raw = project(h, fn, scale, base, norm_eps)
    return sigmoid(pre) + hc_eps, 2.0 * sigmoid(post), sinkhorn(raw, iters, hc_eps)


def sinkhorn(raw: Tensor, iters: int, eps: float) -> Tensor:
    """Make [T, M, M] doubly stochastic; begins and ends with the columns."""
    exps = torch.exp(raw - raw.amax(-1, keepdim=True))
    comb = exps / sum_in_order(exps, -1).unsqueeze(-1) + eps
    comb = comb / (sum_in_order(comb, -2).unsqueeze(-2) + eps)
    for _ in range(iters - 1):
        comb = comb / (sum_in_order(comb, -1).unsqueeze(-1) + eps)
        comb = comb / (sum_in_order(comb, -2).unsqueeze(-2) + eps)
    return comb


def hyper_collapse(h: Tensor, pre: Tensor) -> Tensor:
    """sum_i pre_i h_i."""
    return sum_in_order(pre.unsqueeze(-1) * h.float(), 1).to(h.dtype)


def hyper_expand(h: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """post_j y + sum_i comb_ij h_i."""
    mixed = sum_in_order(comb.unsqueeze(-1) * h.float().unsqueeze(2), 1)
    return (post.unsqueeze(-1) * y.float().unsqueeze(1) + mixed).to(h.dtype)
