"""Grouped products with MXFP4 expert weights, and the clamped SwiGLU between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from deepinfer.errors import ShapeError
from deepinfer.kernels.contract import check
from deepinfer.kernels.expert_linear import reference

__all__ = ["Fp4Weight", "expert_linear", "swiglu"]


@dataclass(frozen=True, slots=True)
class Fp4Weight:
    """The same matrix of all experts, in stored form.

    codes  [E, N, K/2] uint8, two e2m1 values a byte, the even input in the low nibble
    scale  [E, N, K/32] uint8 (ue8m0)
    dense  [E, N, K] fp32 of the same values where memory allows, else None
    """

    codes: Tensor
    scale: Tensor
    dense: Tensor | None

    def dequantize(self, expert: int) -> Tensor:
        """Return one expert's matrix [N, K] fp32, exact."""
        if self.dense is not None:
            return self.dense[expert]
        return reference.dequantize_rows(self.codes[expert], self.scale[expert])


def expert_linear(
    x: Tensor,
    weight: Fp4Weight,
    offsets: Sequence[int] | Tensor,
    quantize_input: bool,
    *,
    impl: Callable[
        [Tensor, Fp4Weight, Sequence[int] | Tensor, bool], Tensor
    ] = reference.expert_linear,
) -> Tensor:
    """Multiply rows sorted by expert by their expert's matrix.

    x               [R, K]  bf16 or fp32; rows offsets[e]..offsets[e+1]-1 belong to expert e
    offsets         E+1 ascending numbers, the first 0, the last R; on a card rather a tensor
                    [E+1] int64 there, whose last may be below R: rows behind it get any values
    quantize_input  round the input with ACT8 first
    returns         [R, N]  dtype of x, accumulated in fp32, rounded once
    Source: weights specification, 3.4 and 4.2.
    """
    check("expert_linear", ("x", x, "R K"), ("weight.codes", weight.codes, "E N _"))
    on_device = isinstance(offsets, Tensor)
    if len(offsets) != weight.codes.shape[0] + 1 or (not on_device and offsets[-1] != x.shape[0]):
        raise ShapeError(
            f"expert_linear: {len(offsets)} offsets ending in {offsets[-1]} for "
            f"{weight.codes.shape[0]} experts and {x.shape[0]} rows"
        )
    if not x.shape[0]:
        return x.new_empty(0, weight.codes.shape[1])
    return impl(x, weight, offsets, quantize_input)


def swiglu(
    gate: Tensor,
    up: Tensor,
    limit: float,
    weight: Tensor | None,
    quantize: bool = False,
    *,
    impl: Callable[..., Tensor] = reference.swiglu,
) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit), times each row's routing weight.

    gate, up  [R, I]  bf16 or fp32
    limit     0 disables the clamps
    weight    [R] fp32, or None
    quantize  then round with ACT8
    returns   [R, I]  dtype of gate; fp32 inside, rounded once
    """
    check("swiglu", ("gate", gate, "R I"), ("up", up, "R I"))
    if not gate.shape[0]:
        return gate
    return impl(gate, up, limit, weight, True) if quantize else impl(gate, up, limit, weight)
