"""Expert products in e4m3 for Hopper: weights exact, rows with one power of two each.

A row's codes are those of ACT8 but for values below 2^-14 of its largest; the tensor unit adds up
128 products with fewer bits than fp32. About one output in twelve differs in its last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.kernels.expert_linear import sm90
from deepinfer.kernels.packed import Decoded
from deepinfer.kernels.packed.kept import kept_fp4
from deepinfer.kernels.packed.run import multiply
from deepinfer.kernels.packed.tokens import fold_tokens

if TYPE_CHECKING:
    from deepinfer.kernels.expert_linear import Fp4Weight


def expert_linear(
    x: Tensor, weight: Fp4Weight, offsets: Sequence[int] | Tensor, quantize_input: bool
) -> Tensor:
    """As the reference of ACT8 rows; where scales lie too far apart, exact products."""
    packed = None
    if x.dtype == torch.bfloat16:
        packed = kept_fp4(weight.codes, weight.scale, Decoded.FP4_E4M3)
    if packed is None:
        return sm90.expert_linear(x, weight, offsets, quantize_input)
    codes, scale = fold_tokens(x)
    return multiply(codes, packed, sm90.bounds(offsets, x.device), token_scale=scale)
