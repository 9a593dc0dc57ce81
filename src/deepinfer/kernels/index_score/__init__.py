"""Scores of index keys for each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from deepinfer.kernels.contract import check
from deepinfer.kernels.index_score import reference

__all__ = ["IndexRounding", "index_score"]

IndexRounding = Literal["reference", "final", "none"]


def index_score(
    q: Tensor,
    weight: Tensor,
    keys: Tensor,
    rounding: IndexRounding,
    *,
    impl: Callable[[Tensor, Tensor, Tensor, IndexRounding], Tensor] = reference.index_score,
) -> Tensor:
    """Return sum_h weight[t, h] * relu(q[t, h] . key[s]).

    q         [T, H, D]  bf16 or fp32
    weight    [T, H]     bf16 or fp32, signed, the constant already applied
    keys      [S, D] or [T, S, D] fp32, dequantized
    rounding  "reference": to bf16 after the dot product, after the weight and after the sum;
              "final": after the sum only; "none"
    returns   [T, S] fp32; heads are summed in order
    Source: backbone specification, 5.2.
    """
    spec = "S D" if keys.ndim == 2 else "T S D"
    check("index_score", ("q", q, "T H D"), ("weight", weight, "T H"), ("keys", keys, spec))
    if not q.shape[0] or not keys.shape[-2]:
        return keys.new_empty(q.shape[0], keys.shape[-2])
    return impl(q, weight, keys, rounding)
