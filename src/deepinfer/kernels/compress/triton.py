"""Gated pooling in Triton: one program per entry and stretch of channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.tiles import ceil_div, in_turn, launch, next_power


@triton.jit
def _compress(kv, gate, out, D, kv_row, gate_row, RATIO: tl.constexpr, BLOCK: tl.constexpr):
    in_turn()
    entry = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = channel < D
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    for i in tl.static_range(RATIO):
        row = entry * RATIO + i
        peak = tl.maximum(peak, tl.load(gate + row * gate_row + channel, held, 0.0))
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(RATIO):
        row = entry * RATIO + i
        total += tl.exp(tl.load(gate + row * gate_row + channel, held, 0.0) - peak)
    acc = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(RATIO):
        row = entry * RATIO + i
        part = tl.exp(tl.load(gate + row * gate_row + channel, held, 0.0) - peak)
        acc += tl.div_rn(part, total) * tl.load(kv + row * kv_row + channel, held, 0.0)
    tl.store(out + entry * D + channel, acc, held)


def compress(kv: Tensor, gate: Tensor, ratio: int) -> Tensor:
    """As the reference."""
    kv, gate = (t if t.stride(1) == 1 else t.contiguous() for t in (kv, gate))
    entries, dim = kv.shape[0] // ratio, kv.shape[1]
    out = torch.empty(entries, dim, dtype=torch.float32, device=kv.device)
    block = min(256, next_power(dim))
    launch(
        _compress, (ceil_div(dim, block), entries), kv, gate, out, dim,
        kv.stride(0), gate.stride(0), RATIO=ratio, BLOCK=block,
    )  # fmt: skip
    return out
