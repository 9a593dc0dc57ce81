"""Rotary positions in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.quantize import QuantFormat
from deepinfer.kernels.quantize.reference import round_trip


def cos_sin(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Angles in fp32."""
    angle = positions.float()[:, None] * inv_freq
    return torch.cos(angle), torch.sin(angle)


def rotate_tail(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    inverse: bool = False,
    reuse: bool = False,
    quantize: QuantFormat | None = None,
) -> Tensor:
    """Rotate pairs (2j, 2j+1) of the tail in fp32, on a copy."""
    dims = 2 * cos.shape[1]
    if x.ndim == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    tail = x[..., -dims:].float()
    even, odd = tail[..., 0::2], tail[..., 1::2]
    if inverse:
        sin = -sin
    out = x.clone()
    out[..., -dims::2] = even * cos - odd * sin
    out[..., 1 - dims :: 2] = even * sin + odd * cos
    return round_trip(out, quantize) if quantize else out
