"""Hyper-connections for a CPU: elementwise work and short sums in numpy, with the same bits.

Projection, mean and exponential stay torch's. A sum over an axis that is not the last, and one of
fewer than 8 terms, runs from left to right in numpy too.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels.hyper import reference
from deepinfer.kernels.linear import DenseWeight
from deepinfer.kernels.rows import ROW_BLOCK
from deepinfer.kernels.workspace import FloatArray, as_array, as_tensor, kept_rows, multiply

_MAX_STREAMS = 6  # with an epsilon beside them still fewer than 8 terms
_ONE = np.float32(1.0)


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
    num_rows, n, width = h.shape
    if n > _MAX_STREAMS or num_rows > ROW_BLOCK:
        return reference.hyper_mix(h, fn, scale, base, norm_eps, hc_eps, iters)
    rows = kept_rows(num_rows, n * width)
    flat = rows.tensor
    flat.copy_(h.view(num_rows, n * width))
    norm = flat.square().mean(-1, keepdim=True).numpy()
    mixes = multiply(rows, fn.fp32()).array
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # reported later
        np.divide(_ONE, np.sqrt(norm + np.float32(norm_eps)), norm)
        np.multiply(mixes, norm, mixes)
        np.multiply(mixes, _gains(scale.numpy(), n), mixes)
        np.add(mixes, base.numpy(), mixes)
        sides, raw = mixes[:, : 2 * n], mixes[:, 2 * n :].reshape(num_rows, n, n)
        np.negative(sides, sides)
        np.subtract(raw, np.maximum.reduce(raw, -1, keepdims=True), raw)
        exps = torch.exp(torch.from_numpy(mixes)).numpy()
        weights = _ONE / (exps[:, : 2 * n] + _ONE)
        pre = weights[:, :n] + np.float32(hc_eps)
        post = weights[:, n:] * np.float32(2.0)
        comb = _normalize(exps[:, 2 * n :].reshape(num_rows, n, n), iters, np.float32(hc_eps))
    return torch.from_numpy(pre), torch.from_numpy(post), torch.from_numpy(comb)


def _gains(scale: FloatArray, n: int) -> FloatArray:
    """The gain of each projection."""
    return scale.repeat((n, n, n * n))


def _normalize(exps: FloatArray, iters: int, eps: np.float32) -> FloatArray:
    """The iterations, tokens last: every call runs over long rows.

    A row and a column of epsilons beside the matrix end each sum, without a call of its own.
    """
    num_rows, n, _ = exps.shape
    padded = np.full((n + 1, n + 1, num_rows), eps, dtype=np.float32)
    comb = padded[:n, :n]
    comb[...] = exps.transpose(1, 2, 0)
    rows, columns = padded[:n], padded[:, :n]
    row_sum = np.empty((n, 1, num_rows), dtype=np.float32)
    column_sum = np.empty((1, n, num_rows), dtype=np.float32)
    divide, total = np.divide, np.add.reduce
    total(comb, axis=1, out=row_sum, keepdims=True)
    divide(comb, row_sum, comb)
    np.add(comb, eps, comb)
    total(columns, axis=0, out=column_sum, keepdims=True)
    divide(comb, column_sum, comb)
    for _ in range(iters - 1):
        total(rows, axis=1, out=row_sum, keepdims=True)
        divide(comb, row_sum, comb)
        total(columns, axis=0, out=column_sum, keepdims=True)
        divide(comb, column_sum, comb)
    return comb.transpose(2, 0, 1)


def hyper_collapse(h: Tensor, pre: Tensor) -> Tensor:
    """As the reference."""
    terms = pre.numpy()[:, :, None] * as_array(h)
    return as_tensor(np.add.reduce(terms, 1), h.dtype)


def hyper_expand(h: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """As the reference."""
    terms = comb.numpy()[..., None] * as_array(h)[:, :, None]
    mixed = np.add.reduce(terms, 1)
    written = post.numpy()[:, :, None] * as_array(y)[:, None]
    return as_tensor(np.add(written, mixed, mixed), h.dtype)
