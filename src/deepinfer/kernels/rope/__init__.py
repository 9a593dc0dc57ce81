"""Rotary positions over the last dimensions of a vector, in adjacent pairs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.errors import ShapeError
from deepinfer.kernels.contract import check
from deepinfer.kernels.quantize import QuantFormat
from deepinfer.kernels.rope import reference

__all__ = ["cos_sin", "rotate_tail"]


def cos_sin(
    positions: Tensor,
    inv_freq: Tensor,
    *,
    impl: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = reference.cos_sin,
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each [T, R/2] fp32, of positions [T] int64 by inv_freq [R/2] fp32.

    The angle is the fp32 product of fp32(position) and the frequency.
    """
    check("cos_sin", ("positions", positions, "T"), ("inv_freq", inv_freq, "F"))
    if positions.dtype != torch.int64:
        raise ShapeError(f"cos_sin: positions have type {positions.dtype}, expected torch.int64")
    return impl(positions, inv_freq)


def rotate_tail(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    inverse: bool = False,
    reuse: bool = False,
    quantize: QuantFormat | None = None,
    *,
    impl: Callable[
        [Tensor, Tensor, Tensor, bool, bool, QuantFormat | None], Tensor
    ] = reference.rotate_tail,
) -> Tensor:
    """Rotate adjacent pairs of the last R dimensions; the others pass unchanged.

    x         [T, D] or [T, H, D]  bf16 or fp32; R = 2 * cos.shape[1] <= D
    cos, sin  [T, R/2]             fp32
    inverse   rotate by the negative angle
    reuse     x is needed no more: an implementation may turn it where it lies and return it
    quantize  then round every vector to this format
    returns   shape and dtype of x; else only rotated dimensions are rounded again
    Source: backbone specification, 3.3 and 3.6.
    """
    if x.ndim not in (2, 3) or 2 * cos.shape[1] > x.shape[-1] or cos.shape[0] != x.shape[0]:
        raise ShapeError(
            f"rotate_tail: x has shape {tuple(x.shape)}, cos {tuple(cos.shape)}; expected [T, D] "
            "or [T, H, D] and [T, R/2] with R <= D"
        )
    return impl(x, cos, sin, inverse, reuse, quantize) if x.shape[0] else x
