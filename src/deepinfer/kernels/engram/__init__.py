"""Engram: hash of n-grams to table rows, lookup, and the gate that adds them to the streams."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.kernels.contract import check
from deepinfer.kernels.engram import reference

__all__ = ["engram_gate", "engram_hash", "engram_lookup"]


def engram_hash(
    ngrams: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    *,
    impl: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = reference.engram_hash,
) -> Tensor:
    """Hash each token's 2- to G-grams to table rows of one layer.

    ngrams       [T, G] int64 compressed ids: the token's own, then 1.. tokens back
    multipliers  [G], primes [G-1, H], offsets [(G-1)*H]  int64
    returns      [T, (G-1)*H] int64, order-major, head-minor
    Source: weights specification, 5.4.
    """
    check("engram_hash", ("ngrams", ngrams, "T G"), ("multipliers", multipliers, "G"))
    return impl(ngrams, multipliers, primes, offsets)


def engram_lookup(
    codes: Tensor,
    scale: Tensor,
    rows: Tensor,
    dtype: torch.dtype,
    *,
    impl: Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor] = reference.engram_lookup,
) -> Tensor:
    """Return dequantized table rows [T, columns * D] (exact in bf16).

    codes [rows, D] float8_e4m3fn and scale [rows, D/32] uint8 may be views of a file; only the
    named rows [T, columns] are touched.
    """
    check("engram_lookup", ("codes", codes, "N D"), ("scale", scale, "N _"), ("rows", rows, "T _"))
    if not rows.shape[0]:
        return scale.new_empty(0, rows.shape[1] * codes.shape[1], dtype=dtype)
    return impl(codes, scale, rows, dtype)


def engram_gate(
    x: Tensor,
    kv: Tensor,
    qk_weight: Tensor,
    eps: float,
    *,
    impl: Callable[[Tensor, Tensor, Tensor, float], Tensor] = reference.engram_gate,
) -> Tensor:
    """Add one value to every stream, each through its own gate.

    x          [T, M, C]    bf16 or fp32
    kv         [T, (M+1)*C] dtype of x: a key per stream, then the shared value
    qk_weight  [M, C]       fp32, q_weight * k_weight
    returns    [T, M, C]    dtype of x, rounded once
    Source: weights specification, 5.6.
    """
    check("engram_gate", ("x", x, "T M C"), ("kv", kv, "T _"), ("qk_weight", qk_weight, "M C"))
    return impl(x, kv, qk_weight, eps)
