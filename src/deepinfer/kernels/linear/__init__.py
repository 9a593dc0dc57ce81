"""Matrix products with stored weights: block-scaled FP8, grouped FP8, and unquantized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.contract import check
from deepinfer.kernels.linear import reference

__all__ = ["DenseWeight", "Fp8Weight", "dense_linear", "fp8_linear", "grouped_linear"]


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A matrix in its stored form.

    codes  [N, K] float8_e4m3fn
    scale  [ceil(N/32), K/32] uint8 (ue8m0), one per 32x32 tile
    dense  [N, K] fp32 of the same values where memory allows, else None
    """

    codes: Tensor
    scale: Tensor
    dense: Tensor | None

    def dequantize(self) -> Tensor:
        """Return [N, K] fp32, exact."""
        if self.dense is not None:
            return self.dense
        return reference.dequantize_blocks(self.codes, self.scale)


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """An unquantized matrix: stored [N, K] bf16 or fp32, and fp32 copy where memory allows."""

    stored: Tensor
    dense: Tensor | None

    def fp32(self) -> Tensor:
        """Return [N, K] fp32."""
        return self.stored.float() if self.dense is None else self.dense


def fp8_linear(
    x: Tensor,
    weight: Fp8Weight,
    quantize_input: bool,
    *,
    impl: Callable[[Tensor, Fp8Weight, bool], Tensor] = reference.fp8_linear,
) -> Tensor:
    """Multiply x [T, K] by an FP8 weight, accumulating in fp32, rounding once to x.dtype.

    quantize_input  round the input with ACT8 first (False: it is already, or must not be)
    returns         [T, N]
    Source: weights specification, 3.4.
    """
    check("fp8_linear", ("x", x, "T K"), ("weight.codes", weight.codes, "N K"))
    if not x.shape[0]:
        return x.new_empty(0, weight.codes.shape[0])
    return impl(x, weight, quantize_input)


def dense_linear(
    x: Tensor,
    weight: DenseWeight,
    out: torch.dtype,
    *,
    impl: Callable[[Tensor, DenseWeight, torch.dtype], Tensor] = reference.dense_linear,
) -> Tensor:
    """Multiply x [T, K] by an unquantized weight [N, K] in fp32; returns [T, N] of type `out`."""
    check("dense_linear", ("x", x, "T K"), ("weight.stored", weight.stored, "N K"))
    if not x.shape[0]:
        return x.new_empty(0, weight.stored.shape[0], dtype=out)
    return impl(x, weight, out)


def grouped_linear(
    x: Tensor,
    weight: Fp8Weight,
    quantize_input: bool,
    quantize_output: bool = False,
    *,
    impl: Callable[[Tensor, Fp8Weight, bool, bool], Tensor] = reference.grouped_linear,
) -> Tensor:
    """Multiply each group by its own block of rows: the low-rank output projection.

    x                [T, G, K]
    weight           codes [G*N, K], group g owns rows g*N..(g+1)*N-1
    quantize_input   ACT8 over the K inputs of a group ("fp8" output projection), else unquantized
    quantize_output  ACT8 of what is returned, for a product that takes it so
    returns          [T, G*N] dtype of x
    Source: backbone specification, 3.7.
    """
    check("grouped_linear", ("x", x, "T G K"), ("weight.codes", weight.codes, "N K"))
    if not x.shape[0]:
        return x.new_empty(0, weight.codes.shape[0])
    return impl(x, weight, quantize_input, quantize_output)
