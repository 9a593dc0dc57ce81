"""Quantizers in plain torch; all arithmetic fp32."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_FP4_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_VALUES: Final = torch.tensor([*_FP4_MAGNITUDES, *(-v for v in _FP4_MAGNITUDES)])
# A byte -> its two e2m1 values, the low nibble first.
_FP4_PAIRS: Final = torch.stack([_FP4_VALUES.repeat(16), _FP4_VALUES.repeat_interleave(16)], 1)
_E4M3_VALUES: Final = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def pow2_ceil(x: Tensor) -> Tensor:
    """Smallest power of two at or above each positive fp32 value, by its bits."""
    return ((x.view(torch.int32) + 0x007FFFFF) & 0x7F800000).view(torch.float32)


def decode_ue8m0(scale: Tensor) -> Tensor:
    """Power-of-two scales from their bytes, fp32."""
    return scale.view(torch.float8_e8m0fnu).float()


def decode_e4m3(codes: Tensor) -> Tensor:
    """e4m3 values of bytes (uint8 or float8_e4m3fn), fp32."""
    return codes.view(torch.float8_e4m3fn).float()


def decode_e2m1(codes: Tensor) -> Tensor:
    """Values of packed pairs, [..., D/2] uint8 -> [..., D] fp32."""
    table = _FP4_PAIRS if codes.device.type == "cpu" else _FP4_PAIRS.to(codes.device)
    pairs = table.index_select(0, codes.flatten().to(torch.int32))
    return pairs.view(*codes.shape[:-1], 2 * codes.shape[-1])


def repeat_groups(values: Tensor, scale: Tensor) -> Tensor:
    """Multiply values [..., D] by one scale per group [..., D/G]."""
    grouped = values.view(*scale.shape, values.shape[-1] // scale.shape[-1])
    return (grouped * scale.unsqueeze(-1)).view(values.shape)


def _grouped(x: Tensor, group: int, floor: float) -> tuple[Tensor, Tensor]:
    groups = x.float().view(*x.shape[:-1], x.shape[-1] // group, group)
    return groups, groups.abs().amax(-1, keepdim=True).clamp_(min=floor)


def scaled8(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes and fp32 scales."""
    groups, amax = _grouped(x, 32, 1e-4)
    scale = pow2_ceil(amax.div_(448.0))
    # No clamp: |x / scale| exceeds 448 by a rounding at most, and the cast brings that to 448.
    return (groups / scale).to(torch.float8_e4m3fn), scale


def scaled4(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Values on the e2m1 grid (with the sign of zero) and fp32 scales."""
    if group == 32:
        groups, amax = _grouped(x, 32, 6.0 * 2.0**-126)
        scale = pow2_ceil(amax / 6.0)
    else:
        groups, amax = _grouped(x, 16, 6.0 * 2.0**-9)
        scale = (amax / 6.0).clamp(max=448.0).to(torch.float8_e4m3fn).float()
    return nearest4(groups / scale), scale


def nearest4(scaled: Tensor) -> Tensor:
    """Nearest values of the e2m1 grid."""
    size = scaled.abs().clamp(max=6.0)
    step = torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0))
    return torch.copysign(torch.round(size / step) * step, scaled)


def _ue8m0_bytes(scale: Tensor) -> Tensor:
    return (scale.squeeze(-1).contiguous().view(torch.int32) >> 23).to(torch.uint8)


def code4(values: Tensor) -> Tensor:
    """e2m1 values -> their codes, one a byte."""
    size = values.abs()
    code = torch.where(size < 2.0, size * 2.0, torch.where(size < 4.0, size + 2.0, size / 2 + 4.0))
    return code.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)


def _pack(values: Tensor) -> Tensor:
    """e2m1 values [..., G, g] -> packed codes [..., D/2]."""
    pairs = torch.unflatten(code4(values).flatten(-2), -1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def act8(x: Tensor) -> tuple[Tensor, Tensor]:
    """ACT8 codes and scale bytes."""
    codes, scale = scaled8(x)
    return codes.flatten(-2), _ue8m0_bytes(scale)


def act4_e8(x: Tensor) -> tuple[Tensor, Tensor]:
    """ACT4-E8 codes and scale bytes."""
    values, scale = scaled4(x, 32)
    return _pack(values), _ue8m0_bytes(scale)


def act4_e4(x: Tensor) -> tuple[Tensor, Tensor]:
    """ACT4-E4 codes and scale bytes."""
    values, scale = scaled4(x, 16)
    return _pack(values), scale.squeeze(-1).to(torch.float8_e4m3fn).view(torch.uint8)


def act8_values(x: Tensor) -> Tensor:
    """Quantize with ACT8 and dequantize, [..., D] fp32."""
    codes, scale = scaled8(x)
    return codes.float().mul_(scale).view(x.shape)


def round_trip(x: Tensor, fmt: str) -> Tensor:
    """Quantize and dequantize without packing."""
    return rounded_values(x, fmt).to(x.dtype)


def rounded_values(x: Tensor, fmt: str) -> Tensor:
    """What x becomes, fp32."""
    if fmt == "act8":
        return act8_values(x)
    values, scale = scaled4(x, 32 if fmt == "act4_e8" else 16)
    return (values * scale).flatten(-2)
