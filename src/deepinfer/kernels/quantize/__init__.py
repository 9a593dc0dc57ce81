"""Block-scaled FP8 and FP4 of activations and cache entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from torch import Tensor

from deepinfer.errors import ShapeError
from deepinfer.kernels.quantize import reference
from deepinfer.kernels.quantize.reference import (
    act8_values,
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    pow2_ceil,
    repeat_groups,
)

__all__ = [
    "GROUP_SIZE",
    "QuantFormat",
    "act4_e4",
    "act4_e8",
    "act8",
    "act8_values",
    "decode_e2m1",
    "decode_e4m3",
    "decode_ue8m0",
    "pow2_ceil",
    "repeat_groups",
    "round_trip",
]

QuantFormat = Literal["act8", "act4_e8", "act4_e4"]
GROUP_SIZE: Final = {"act8": 32, "act4_e8": 32, "act4_e4": 16}
"""Values that share a scale."""


def act8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to e4m3 in groups of 32 with power-of-two scales.

    x        [..., D]     bf16 or fp32, D a multiple of 32
    returns  codes [..., D] float8_e4m3fn; scales [..., D/32] uint8 (ue8m0)
    Source: weights specification, 3.3.
    """
    _check(x, "act8")
    return reference.act8(x)


def act4_e8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to e2m1 in groups of 32 with power-of-two scales: index queries and keys.

    returns  codes [..., D/2] uint8, the even element in the low nibble; scales [..., D/32] uint8
    """
    _check(x, "act4_e8")
    return reference.act4_e8(x)


def act4_e4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to e2m1 in groups of 16 with e4m3 scales: main compressed KV. True division.

    returns  codes [..., D/2] uint8, the even element in the low nibble; scales [..., D/16] uint8
    (e4m3 bytes)
    """
    _check(x, "act4_e4")
    return reference.act4_e4(x)


def round_trip(
    x: Tensor,
    fmt: QuantFormat,
    *,
    impl: Callable[[Tensor, QuantFormat], Tensor] = reference.round_trip,
) -> Tensor:
    """Quantize and dequantize; returns shape and dtype of x (exact in bf16)."""
    _check(x, fmt)
    return impl(x, fmt) if x.numel() else x


def _check(x: Tensor, fmt: str) -> None:
    group = GROUP_SIZE.get(fmt)
    if group is None:
        raise ShapeError(f"round_trip: format {fmt!r}, expected one of {sorted(GROUP_SIZE)}")
    if x.shape[-1] % group:
        raise ShapeError(f"{fmt}: last dimension {x.shape[-1]}, expected a multiple of {group}")
