"""The routed experts of sorted rows as one op: both products and the gate between them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.errors import ShapeError
from deepinfer.kernels.contract import check
from deepinfer.kernels.expert_linear import Fp4Weight
from deepinfer.kernels.routed_experts import reference

__all__ = ["routed_experts"]

_Impl = Callable[[Tensor, Tensor, Tensor, Tensor, Fp4Weight, Fp4Weight, float, bool], Tensor]


def routed_experts(
    x: Tensor,
    rows: Tensor,
    weights: Tensor,
    offsets: Tensor,
    w1_w3: Fp4Weight,
    w2: Fp4Weight,
    limit: float,
    quantize: bool,
    *,
    impl: _Impl = reference.routed_experts,
) -> Tensor:
    """Run each choice's expert on its row.

    x        [T, C]  bf16 or fp32, rounded with ACT8 already where `quantize` is set
    rows     [P]     int64, the row of x of each choice, sorted by expert
    weights  [P]     fp32, each choice's routing weight
    offsets  [E+1]   int64 tensor: choices offsets[e]..offsets[e+1]-1 belong to expert e
    w1_w3    gate and up stacked in rows, [E, 2I, C]; w2 [E, C, I]
    limit    of SwiGLU, 0 = none
    quantize round the gated values with ACT8
    returns  [P, C]  dtype of x; any values behind the last expert's choices
    Equals `expert_linear`, `swiglu` and `expert_linear`, each rounded to the dtype of x.
    """
    check(
        "routed_experts",
        ("x", x, "_ C"),
        ("rows", rows, "P"),
        ("weights", weights, "P"),
        ("w1_w3.codes", w1_w3.codes, "E _ _"),
        ("w2.codes", w2.codes, "E C _"),
    )
    if rows.dtype != torch.int64 or offsets.shape != (w2.codes.shape[0] + 1,):
        raise ShapeError(
            f"routed_experts: rows of type {rows.dtype} and offsets of shape "
            f"{tuple(offsets.shape)}, expected int64 and [{w2.codes.shape[0] + 1}]"
        )
    if not rows.shape[0]:
        return x.new_empty(0, w2.codes.shape[1])
    return impl(x, rows, weights, offsets, w1_w3, w2, limit, quantize)
