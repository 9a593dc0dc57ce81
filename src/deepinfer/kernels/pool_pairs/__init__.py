"""Pooling of pairs whose first half may come from an earlier step, in decode steps of a card.

No op of the dispatch table: it is `compress` and `rms_norm` with their gathers and stores. The
plain forms define the others.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from deepinfer.kernels.compress.reference import compress
from deepinfer.kernels.rms_norm.reference import rms_norm

__all__ = ["keep_tail", "pool_pairs"]


def pool_pairs(
    gate: Tensor,
    value: Tensor,
    ring: Tensor,
    load: Tensor,
    rows: Tensor,
    emit: Tensor,
    norm: Tensor,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Pool pairs of tokens and norm what comes out; returns [n, D] of `dtype`.

    gate, value  [T, D] fp32 of the step's rows
    ring         [S, L, 2, D] fp32: gate and value of earlier tokens
    load         [H] int64 places of the ring, slot * L + entry, -1 = any
    rows         [T, 2] int64 into [loads | rows]: each token and the one before it
    emit         [n] int64, the rows that end a pair
    norm         [D] fp32
    """
    if gate.device.type == "cuda" and find_spec("triton"):
        from deepinfer.kernels.pool_pairs import triton

        return triton.pool_pairs(gate, value, ring, load, rows, emit, norm, eps, dtype)
    new, held, length = torch.stack([gate, value], 1), load.clamp(min=0), ring.shape[1]
    every = torch.cat([ring[held // length, held % length], new])
    flat = every[rows[emit].flip(1)].flatten(0, 1)
    pooled = compress(flat[:, 1].contiguous(), flat[:, 0].contiguous(), 2)
    return rms_norm(pooled.to(dtype), norm, eps)


def keep_tail(gate: Tensor, value: Tensor, ring: Tensor, store: Tensor, rows: Tensor) -> None:
    """Put rows [m] of gate and value [T, D] into the ring's places store [m]; after `pool_pairs`.

    Places named twice get any of theirs.
    """
    if gate.device.type == "cuda" and find_spec("triton"):
        from deepinfer.kernels.pool_pairs import triton

        triton.keep_tail(gate, value, ring, store, rows)
        return
    length = ring.shape[1]
    ring[store // length, store % length] = torch.stack([gate[rows], value[rows]], 1)
