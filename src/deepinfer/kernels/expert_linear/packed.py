"""All routed experts of sorted rows on packed weights: two products and one kernel between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.kernels.packed import Decoded, Packed
from deepinfer.kernels.packed.kept import kept_fp4
from deepinfer.kernels.packed.run import in_order, multiply
from deepinfer.kernels.packed.tokens import fold_tokens, gate_tokens

if TYPE_CHECKING:
    from deepinfer.kernels.expert_linear import Fp4Weight

__all__ = ["experts", "forms"]


def forms(w1_w3: Fp4Weight, w2: Fp4Weight, dtype: torch.dtype, e4m3: bool) -> list[Packed] | None:
    """Return the packed forms of both matrices, None where there is none for them.

    e4m3  prefer products in e4m3; bf16 where scales lie too far apart
    """
    if dtype != torch.bfloat16:
        return None
    found = []
    for weight in (w1_w3, w2):
        packed = kept_fp4(weight.codes, weight.scale, Decoded.FP4_E4M3) if e4m3 else None
        packed = packed or kept_fp4(weight.codes, weight.scale, Decoded.FP4_BF16)
        if packed is None:
            return None
        found.append(packed)
    return found


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
    tokens, scale = x, None
    source: Tensor | None = rows
    if w1_w3.decoded is Decoded.FP4_E4M3:
        if in_order(w1_w3.decoded, rows.shape[0], w1_w3.experts):
            source = None
            tokens, scale = fold_tokens(x, rows, offsets)
        else:
            tokens, scale = fold_tokens(x)
    gate_up = multiply(tokens, w1_w3, offsets, token_scale=scale, source=source)
    fold = w2.decoded is Decoded.FP4_E4M3
    hidden, scale = gate_tokens(gate_up, weight, offsets, limit, quantize, fold)
    return multiply(hidden, w2, offsets, token_scale=scale)
