"""Coefficients for a CPU: Sinkhorn on tiny arrays costs a third in numpy, with the same bits."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.kernels.hyper.reference import project
from deepinfer.kernels.linear import DenseWeight
from deepinfer.kernels.rows import sigmoid


def hyper_mix(
    h: Tensor,
    fn: DenseWeight,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference."""
    pre, post, raw = project(h, fn, scale, base, norm_eps)
    exps = torch.exp(raw - raw.amax(-1, keepdim=True))  # torch's exp: numpy's has other bits
    both = sigmoid(torch.cat([pre, post], dim=-1))
    n = pre.shape[1]
    comb = torch.from_numpy(_normalize(exps.numpy(), iters, np.float32(hc_eps)))
    return both[:, :n] + hc_eps, 2.0 * both[:, n:], comb


def _normalize(exps: NDArray[np.float32], iters: int, eps: np.float32) -> NDArray[np.float32]:
    """The iterations on [M, M, T] (tokens last, so that every step runs over long rows)."""
    comb = np.ascontiguousarray(exps.transpose(1, 2, 0))
    total = np.empty_like(comb[0])
    with np.errstate(invalid="ignore", divide="ignore"):  # damaged weights are reported later
        _sum(comb.swapaxes(0, 1), total)
        np.divide(comb, total[:, None], out=comb)
        np.add(comb, eps, out=comb)
        for step in range(2 * iters - 1):
            if step % 2 == 0:
                _sum(comb, total)
                np.add(total, eps, out=total)
                np.divide(comb, total[None], out=comb)
            else:
                _sum(comb.swapaxes(0, 1), total)
                np.add(total, eps, out=total)
                np.divide(comb, total[:, None], out=comb)
    return np.ascontiguousarray(comb.transpose(2, 0, 1))


def _sum(parts: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Sum over the first axis from left to right."""
    if len(parts) == 1:
        out[:] = parts[0]
        return
    np.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        np.add(out, part, out=out)
