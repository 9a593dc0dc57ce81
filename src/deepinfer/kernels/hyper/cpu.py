"""Hyper-connections for a CPU: elementwise work and short sums in numpy, with the same bits.

Projection, mean and exponential stay torch's. A sum over an axis that is not the last, and one of
fewer than 8 terms, runs from left to right in numpy too.
"""

from __future__ import annotations

from functools import cache

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


@cache
def _sum_matrices(n: int) -> tuple[FloatArray, FloatArray] | None:
    """Return matrices [M*M, M*M] of zeros and ones that turn flat [M, M] matrices into their sums
    over rows and over columns, each in its entry's place; None where their bits are not those of a
    sum from left to right.

    Products with zeros and ones are exact, so only the order of the terms could differ. It is the
    library's choice for a shape: some hundred matrices with unlike terms show it.
    """
    place = np.arange(n * n)
    row, column = place // n, place % n
    over_rows = (row[:, None] == row).astype(np.float32)
    over_columns = (column[:, None] == column).astype(np.float32)
    generator = np.random.Generator(np.random.PCG64(n))
    for _ in range(32):
        x = np.exp(6 * generator.standard_normal((ROW_BLOCK, n * n))).astype(np.float32)
        for matrix, axis in ((over_rows, 2), (over_columns, 1)):
            sums = _sums_in_order(x, n, axis)
            if not np.array_equal(np.dot(x, matrix), sums):
                return None
    return over_rows, over_columns


def _sums_in_order(x: FloatArray, n: int, axis: int) -> FloatArray:
    """Return sums over rows (axis 2) or columns (1) of x [T, M*M], in their entries' places."""
    matrices = x.reshape(-1, n, n)
    sums = total(matrices, axis, None, None, True)
    return np.broadcast_to(sums, matrices.shape).copy().reshape(x.shape)


class Sinkhorn:
    """The iterations for T matrices, each flat in a row of a 16-row block.

    result  [T, M, M], a view that holds until the next run
    One product sums all rows or columns (`_sum_matrices`), and every other call runs over arrays of
    one shape, which costs a quarter of what broadcasting does. What an iteration leaves as it is
    stays so in all that follow.
    """

    def __init__(self, num_rows: int, n: int, iters: int, eps: float) -> None:
        self._n, self._iters = n, iters
        self._eps = np.array(eps, dtype=np.float32)
        self._block, self._sums = np.zeros((2, ROW_BLOCK, n * n), dtype=np.float32)
        self._comb = self._block[:num_rows]
        self._matrices = _sum_matrices(n)
        self.result = self._comb.reshape(num_rows, n, n)

    def _sum(self, axis: int) -> FloatArray:
        if self._matrices is None:
            return _sums_in_order(self._comb, self._n, axis)
        np.dot(self._block, self._matrices[2 - axis], self._sums)
        return self._sums[: self._comb.shape[0]]

    def run(self, exps: FloatArray) -> None:
        """Make exps [T, M, M] doubly stochastic."""
        comb, eps, total_of = self._comb, self._eps, self._sum
        divide, add = np.divide, np.add
        self.result[...] = exps
        divide(comb, total_of(2), comb)
        add(comb, eps, comb)
        sums = total_of(1)
        divide(comb, add(sums, eps, sums), comb)
        before = b""
        for _ in range(self._iters - 1):
            sums = total_of(2)
            divide(comb, add(sums, eps, sums), comb)
            sums = total_of(1)
            divide(comb, add(sums, eps, sums), comb)
            after = comb.tobytes()
            if after == before:
                break
            before = after


def hyper_collapse(h: Tensor, pre: Tensor) -> Tensor:
    """As the reference."""
    terms = pre.numpy()[:, :, None] * as_array(h)
    return as_tensor(np.add.reduce(terms, 1), h.dtype)
