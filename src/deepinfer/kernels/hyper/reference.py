"""Hyper-connections in plain torch; short sums from left to right."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from deepinfer.kernels.linear import DenseWeight
from deepinfer.kernels.rows import matmul_rows, sigmoid, sum_in_order


def project(
    h: Tensor, fn: DenseWeight, scale: Tensor, base: Tensor, norm_eps: float
) -> tuple[Tensor, Tensor]:
    """Return raw projections: for pre and post [T, 2M], for comb [T, M, M]."""
    n = h.shape[1]
    flat = h.float().flatten(1)
    norm = torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    mixes = matmul_rows(flat, fn.fp32()) * norm
    mixes = mixes * scale[_gain_index(n, scale.device)] + base
    return mixes[:, : 2 * n], torch.unflatten(mixes[:, 2 * n :], -1, (n, n))


@cache
def _gain_index(n: int, device: torch.device) -> Tensor:
    """Which of the three gains each projection takes."""
    return torch.tensor([0] * n + [1] * n + [2] * n * n, device=device)


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
    sides, raw = project(h, fn, scale, base, norm_eps)
    sides, n = sigmoid(sides), h.shape[1]
    return sides[:, :n] + hc_eps, 2.0 * sides[:, n:], sinkhorn(raw, iters, hc_eps)


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
