"""Gated pooling of KV rows into compressed entries."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from deepinfer.errors import ShapeError
from deepinfer.kernels.compress import reference
from deepinfer.kernels.contract import check

__all__ = ["compress"]


def compress(
    kv: Tensor,
    gate: Tensor,
    ratio: int,
    *,
    impl: Callable[[Tensor, Tensor, int], Tensor] = reference.compress,
) -> Tensor:
    """Pool each run of `ratio` projected rows into one entry, by a per-channel softmax.

    kv      [T, D]    fp32, unrounded, in position order; T is a multiple of `ratio`
    gate    [T, D]    fp32, unnormalized weights of the same rows
    returns [T/R, D]  fp32, not rounded
    Raises ShapeError when T is not a multiple of `ratio`. Source: backbone specification, 4.1.
    """
    check("compress", ("kv", kv, "T D"), ("gate", gate, "T D"))
    if kv.shape[0] % ratio:
        raise ShapeError(f"compress: {kv.shape[0]} rows, expected a multiple of {ratio}")
    return impl(kv, gate, ratio) if kv.shape[0] else kv
