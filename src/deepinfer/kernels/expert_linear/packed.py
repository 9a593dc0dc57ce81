"""All routed experts of sorted rows on packed weights: two products and one kernel between them."""

from __future__ import annotations

from torch import Tensor

from deepinfer.kernels.packed import Decoded, Packed
from deepinfer.kernels.packed.run import multiply
from deepinfer.kernels.packed.triton import fold_tokens, gate_tokens

__all__ = ["experts"]


def experts(
    x: Tensor,
    rows: Tensor,
    offsets: Tensor,
    weight: Tensor,
    w1_w3: Packed,
    w2: Packed,
    limit: float,
    quantize: bool,
) -> Tensor:
    """Run each row's expert; returns [P, C] bf16, with any values behind the last expert's rows.

    x         [T, C] bf16, rounded with ACT8 already
    rows      [P] int64: the row of x of each choice, sorted by expert
    offsets   [E+1] int64 on the device, where each expert's run begins
    weight    [P] fp32 routing weights
    quantize  round the gated values with ACT8
    """
    fold = w1_w3.decoded is Decoded.FP4_E4M3
    tokens, scale = fold_tokens(x) if fold else (x, None)
    gate_up = multiply(tokens, w1_w3, offsets, token_scale=scale, source=rows)
    fold = w2.decoded is Decoded.FP4_E4M3
    hidden, scale = gate_tokens(gate_up, weight, offsets, limit, quantize, fold)
    return multiply(hidden, w2, offsets, token_scale=scale)
