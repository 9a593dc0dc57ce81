"""Coefficients for a CPU: Sinkhorn on tiny arrays costs a third in numpy, with the same bits."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.kernels.hyper import reference
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
    n = h.shape[1]
    if n >= 8:  # numpy sums 8 and more in another order
        return reference.hyper_mix(h, fn, scale, base, norm_eps, hc_eps, iters)
    sides, raw = reference.project(h, fn, scale, base, norm_eps)
    exps = torch.exp(raw - raw.amax(-1, keepdim=True))  # torch's exp: numpy's has other bits
    sides = sigmoid(sides)
    comb = torch.from_numpy(_normalize(exps.numpy(), iters, np.float32(hc_eps)))
    return sides[:, :n] + hc_eps, 2.0 * sides[:, n:], comb


def _normalize(exps: NDArray[np.float32], iters: int, eps: np.float32) -> NDArray[np.float32]:
    """The iterations on [M, M, T]: tokens last, so that every call runs over long rows."""
    comb = np.ascontiguousarray(exps.transpose(1, 2, 0))
    row_sum, column_sum = np.empty_like(comb[:, :1]), np.empty_like(comb[:1])
    add, divide, total = np.add, np.divide, np.add.reduce
    with np.errstate(invalid="ignore", divide="ignore"):  # damaged weights are reported later
        total(comb, axis=1, out=row_sum, keepdims=True)
        divide(comb, row_sum, comb)
        add(comb, eps, comb)
        total(comb, axis=0, out=column_sum, keepdims=True)
        add(column_sum, eps, column_sum)
        divide(comb, column_sum, comb)
        for _ in range(iters - 1):
            total(comb, axis=1, out=row_sum, keepdims=True)
            add(row_sum, eps, row_sum)
            divide(comb, row_sum, comb)
            total(comb, axis=0, out=column_sum, keepdims=True)
            add(column_sum, eps, column_sum)
            divide(comb, column_sum, comb)
    return np.ascontiguousarray(comb.transpose(2, 0, 1))
