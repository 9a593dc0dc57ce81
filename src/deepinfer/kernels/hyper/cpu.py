"""Hyper-connections for a CPU: elementwise work and short sums in numpy, with the same bits.

Projection, mean and exponential stay torch's. A sum over an axis that is not the last, and one of
fewer than 8 terms, runs from left to right in numpy too.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels.hyper import reference
from deepinfer.kernels.hyper.reference import hyper_expand
from deepinfer.kernels.linear import DenseWeight
from deepinfer.kernels.rows import ROW_BLOCK
from deepinfer.kernels.workspace import FloatArray, as_array, as_tensor, kept_rows, multiply, total

__all__ = ["MAX_STREAMS", "Sinkhorn", "hyper_collapse", "hyper_expand", "hyper_mix"]

MAX_STREAMS = 6  # with an epsilon beside them still fewer than 8 terms
_ONE, _TWO = np.float32(1.0), np.float32(2.0)


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
    if n > MAX_STREAMS or num_rows > ROW_BLOCK:
        return reference.hyper_mix(h, fn, scale, base, norm_eps, hc_eps, iters)
    rows = kept_rows(num_rows, n * width)
    flat = rows.tensor
    flat.copy_(h.view(num_rows, n * width))
    norm = flat.square().sum(-1, keepdim=True).numpy()
    mixes = multiply(rows, fn.fp32()).array
    np.divide(norm, np.float32(n * width), norm)
    np.add(norm, np.float32(norm_eps), norm)
    np.sqrt(norm, norm)
    np.divide(_ONE, norm, norm)
    np.multiply(mixes, norm, mixes)
    np.multiply(mixes, scale.numpy().repeat((n, n, n * n)), mixes)
    np.add(mixes, base.numpy(), mixes)
    sides, raw = mixes[:, : 2 * n], mixes[:, 2 * n :].reshape(num_rows, n, n)
    np.negative(sides, sides)
    np.subtract(raw, np.maximum.reduce(raw, -1, keepdims=True), raw)
    exps = torch.exp(torch.from_numpy(mixes)).numpy()
    sides = exps[:, : 2 * n]
    np.add(sides, _ONE, sides)
    np.divide(_ONE, sides, sides)
    pre, post = sides[:, :n] + np.float32(hc_eps), sides[:, n:] * _TWO
    sinkhorn = Sinkhorn(num_rows, n, iters, hc_eps)
    sinkhorn.run(exps[:, 2 * n :].reshape(num_rows, n, n))
    comb = np.ascontiguousarray(sinkhorn.result)
    return torch.from_numpy(pre), torch.from_numpy(post), torch.from_numpy(comb)


class Sinkhorn:
    """The iterations for T matrices, tokens last: every call runs over long rows.

    result  [T, M, M], a view that holds until the next run
    A row and a column of epsilons beside the matrix end each sum, without a call of its own. What
    an iteration leaves as it is stays so in all that follow.
    """

    def __init__(self, num_rows: int, n: int, iters: int, eps: float) -> None:
        self._eps = np.array(eps, dtype=np.float32)
        self._iters = iters
        self._padded = np.full((n + 1, n + 1, num_rows), self._eps, dtype=np.float32)
        self._comb = self._padded[:n, :n]
        self._rows, self._columns = self._padded[:n], self._padded[:, :n]
        self._row_sum = np.empty((n, 1, num_rows), dtype=np.float32)
        self._column_sum = np.empty((1, n, num_rows), dtype=np.float32)
        self.result = self._comb.transpose(2, 0, 1)

    def run(self, exps: FloatArray) -> None:
        """Make exps [T, M, M] doubly stochastic."""
        comb, row_sum, column_sum = self._comb, self._row_sum, self._column_sum
        rows, columns, bits = self._rows, self._columns, self._padded.tobytes
        divide = np.divide
        self.result[...] = exps
        total(comb, 1, None, row_sum, True)
        divide(comb, row_sum, comb)
        np.add(comb, self._eps, comb)
        total(columns, 0, None, column_sum, True)
        divide(comb, column_sum, comb)
        before = b""
        for _ in range(self._iters - 1):
            total(rows, 1, None, row_sum, True)
            divide(comb, row_sum, comb)
            total(columns, 0, None, column_sum, True)
            divide(comb, column_sum, comb)
            after = bits()
            if after == before:
                break
            before = after


def hyper_collapse(h: Tensor, pre: Tensor) -> Tensor:
    """As the reference."""
    terms = pre.numpy()[:, :, None] * as_array(h)
    return as_tensor(np.add.reduce(terms, 1), h.dtype)
