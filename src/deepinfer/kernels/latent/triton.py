"""Latent and entry in Triton: one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.tiles import act8_round_trip, launch, narrow, next_power


@triton.jit
def _latent_entry(
    both, q_norm, kv_norm, cos, sin, latent, entry, Q, D, R, stride, eps,
    QUANTIZE: tl.constexpr, BQ: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source = both + row * stride
    column = tl.arange(0, BQ)
    held = column < Q
    values = tl.load(source + column, held, 0.0).to(tl.float32)
    mean = tl.div_rn(tl.sum(values * values, 0), Q.to(tl.float32))
    scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    normed = tl.load(q_norm + column, held, 0.0) * (values * scale)
    if QUANTIZE:
        normed = narrow(normed, latent.dtype.element_ty).to(tl.float32)
        normed = tl.reshape(act8_round_trip(tl.reshape(normed, (1, BQ)), 1, BQ), (BQ,))
    tl.store(latent + row * Q + column, narrow(normed, latent.dtype.element_ty), held)
    source += Q
    column = tl.arange(0, BD)
    held = column < D
    values = tl.load(source + column, held, 0.0).to(tl.float32)
    mean = tl.div_rn(tl.sum(values * values, 0), D.to(tl.float32))
    scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    normed = tl.load(kv_norm + column, held, 0.0) * (values * scale)
    kept = column < D - R
    tl.store(entry + row * D + column, narrow(normed, entry.dtype.element_ty), kept)
    pair = tl.arange(0, BR)
    held = pair < R // 2
    place = D - R + 2 * pair
    even = tl.load(source + place, held, 0.0).to(tl.float32) * scale
    odd = tl.load(source + place + 1, held, 0.0).to(tl.float32) * scale
    even = narrow(tl.load(kv_norm + place, held, 0.0) * even, entry.dtype.element_ty)
    odd = narrow(tl.load(kv_norm + place + 1, held, 0.0) * odd, entry.dtype.element_ty)
    even, odd = even.to(tl.float32), odd.to(tl.float32)
    c = tl.load(cos + row * (R // 2) + pair, held, 0.0)
    s = tl.load(sin + row * (R // 2) + pair, held, 0.0)
    target = entry + row * D + place
    tl.store(target, narrow(even * c - odd * s, entry.dtype.element_ty), held)
    tl.store(target + 1, narrow(even * s + odd * c, entry.dtype.element_ty), held)


def latent_entry(
    both: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    quantize: bool = False,
) -> tuple[Tensor, Tensor]:
    """As the reference."""
    both = both if both.stride(1) == 1 else both.contiguous()
    num_rows, rank, dim = both.shape[0], q_norm.shape[0], kv_norm.shape[0]
    latent = torch.empty(num_rows, rank, dtype=both.dtype, device=both.device)
    entry = torch.empty(num_rows, dim, dtype=both.dtype, device=both.device)
    rotated = 2 * cos.shape[1]
    launch(
        _latent_entry, (num_rows,), both, q_norm.contiguous(), kv_norm.contiguous(),
        cos.contiguous(), sin.contiguous(), latent, entry, rank, dim, rotated, both.stride(0), eps,
        QUANTIZE=quantize, BQ=next_power(rank, 32), BD=next_power(dim),
        BR=next_power(max(1, rotated // 2)),
    )  # fmt: skip
    return latent, entry
