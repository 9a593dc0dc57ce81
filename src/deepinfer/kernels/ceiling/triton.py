"""Reading memory and nothing else, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.tiles import launch

_BLOCK, _UNROLL = 4096, 4


@triton.jit
def _fold(a, b):
    return a ^ b


@triton.jit
def _read(x, out, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * (BLOCK * UNROLL)
    acc = tl.zeros((BLOCK,), tl.int32)
    for part in tl.static_range(UNROLL):
        acc = acc ^ tl.load(x + base + part * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.reduce(acc, 0, _fold))


def read_memory(x: Tensor) -> Tensor:
    """Read x [n] int32, n a multiple of 16,384; returns one word a block."""
    blocks = x.numel() // (_BLOCK * _UNROLL)
    out = torch.empty(blocks, dtype=torch.int32, device=x.device)
    launch(_read, (blocks,), x, out, BLOCK=_BLOCK, UNROLL=_UNROLL, num_warps=8)
    return out
