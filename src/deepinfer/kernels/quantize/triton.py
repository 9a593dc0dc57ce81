"""Quantizing there and back in Triton: one program per tile of groups."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.tiles import (
    act4_e4_scale,
    act4_e8_scale,
    act8_scale,
    ceil_div,
    e2m1_round,
    e4m3_round,
    in_turn,
    launch,
    narrow,
    pow2_inverse,
)

_GROUPS = 32


@triton.jit
def rounded(values, FORMAT: tl.constexpr):
    """Groups, one a row, on a format's grid."""
    amax = tl.max(tl.abs(values), 1)[:, None]
    if FORMAT == "act8":
        scale = act8_scale(amax)
        return e4m3_round(values * pow2_inverse(scale)) * scale
    elif FORMAT == "act4_e8":
        scale = act4_e8_scale(amax)
        return e2m1_round(values * pow2_inverse(scale)) * scale
    else:
        scale = act4_e4_scale(amax)
        return e2m1_round(tl.div_rn(values, tl.broadcast_to(scale, values.shape))) * scale


@triton.jit
def _round_trip(x, out, total, FORMAT: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    in_turn()
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    place = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    held = (group < total)[:, None]
    values = tl.load(x + place, held, 0.0).to(tl.float32)
    tl.store(out + place, narrow(rounded(values, FORMAT), out.dtype.element_ty), held)


def round_trip(x: Tensor, fmt: str) -> Tensor:
    """As the reference."""
    x = x.contiguous()
    out = torch.empty_like(x)
    size = 16 if fmt == "act4_e4" else 32
    groups = x.numel() // size
    launch(
        _round_trip, (ceil_div(groups, _GROUPS),), x, out, groups,
        FORMAT=fmt, GROUPS=_GROUPS, SIZE=size,
    )  # fmt: skip
    return out
