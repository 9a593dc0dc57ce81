"""Rounding as at inference, with the gradient passed straight through.

Every function returns a tensor that holds exactly the values the engine would compute with, and the gradient of
the identity. Source: weights specification, 3; backbone specification, 6.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pow2ceil(x: Tensor) -> Tensor:
    """Return the smallest power of two that is not below `x` (fp32, positive)."""
    return ((x.view(torch.int32) + 0x007FFFFF) & 0x7F800000).view(torch.float32)


def e4m3(x: Tensor) -> Tensor:
    """Round fp32 to the nearest e4m3 value, saturating."""
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).to(torch.float32)


def e2m1(x: Tensor) -> Tensor:
    """Round fp32 to the nearest e2m1 value, ties to the even code, saturating."""
    a = x.abs().clamp(max=6.0)
    r = torch.where(
        a < 2, torch.round(a * 2) / 2, torch.where(a < 4, torch.round(a), torch.round(a / 2) * 2)
    )
    return torch.copysign(r, x)


def _through(x: Tensor, rounded: Tensor) -> Tensor:
    return rounded.detach() + (x - x.detach())


def act8(x: Tensor) -> Tensor:
    """ACT8: e4m3 in groups of 32 along the last dimension, power-of-two scales; dtype kept."""
    v = torch.unflatten(x.detach().float(), -1, (-1, 32))
    s = pow2ceil(v.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448.0)
    return _through(x, (e4m3(v / s) * s).flatten(-2).to(x.dtype))


def act4_e8(x: Tensor) -> Tensor:
    """ACT4-E8: e2m1 in groups of 32, power-of-two scales."""
    v = torch.unflatten(x.detach().float(), -1, (-1, 32))
    s = pow2ceil(v.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-100) / 6.0)
    return _through(x, (e2m1(v / s) * s).flatten(-2).to(x.dtype))


def act4_e4(x: Tensor) -> Tensor:
    """ACT4-E4: e2m1 in groups of 16, e4m3 scales."""
    v = torch.unflatten(x.detach().float(), -1, (-1, 16))
    s = e4m3(v.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-9) / 6.0)
    return _through(x, (e2m1(v / s) * s).flatten(-2).to(x.dtype))


def weight8(w: Tensor) -> Tensor:
    """An fp8 weight [N, K]: e4m3 on a 32 x 32 grid of power-of-two scales; returns bf16."""
    n, k = w.shape
    v = w.detach().view(n // 32, 32, k // 32, 32)
    s = pow2ceil(v.abs().amax((1, 3), keepdim=True).clamp_min(1e-20) / 448.0)
    return _through(w, (e4m3(v / s) * s).view(n, k)).to(torch.bfloat16)


def weight4(w: Tensor) -> Tensor:
    """An MXFP4 weight [..., K]: e2m1 in groups of 32 along the input; returns bf16."""
    v = torch.unflatten(w.detach(), -1, (-1, 32))
    s = pow2ceil(v.abs().amax(-1, keepdim=True).clamp_min(1e-20) / 6.0)
    return _through(w, (e2m1(v / s) * s).flatten(-2)).to(torch.bfloat16)


def rows8(w: Tensor) -> Tensor:
    """Rows of an Engram table [..., n * 32]: e4m3 with a power-of-two scale for 32 columns; returns bf16."""
    v = torch.unflatten(w.detach().float(), -1, (-1, 32))
    s = pow2ceil(v.abs().amax(-1, keepdim=True).clamp_min(1e-20) / 448.0)
    return _through(w.float(), (e4m3(v / s) * s).flatten(-2)).to(torch.bfloat16)
