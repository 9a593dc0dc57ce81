"""Rotary positions in CUDA C++ for SM90: tails where they lie, or whole vectors rounded behind.

`sm90.cu` says how. Other tails than 64 bf16 dimensions, and copies that are not rounded, run in
Triton.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from deepinfer.kernels import nvcc
from deepinfer.kernels.quantize import QuantFormat
from deepinfer.kernels.rope import triton

__all__ = ["accepts", "rotate_tail"]

SOURCE: Final = Path(__file__).with_name("sm90.cu")
_PAIRS: Final = 32
_ROUNDED: Final[dict[QuantFormat, int]] = {"act8": 512, "act4_e8": 128}  # format -> dimensions


def accepts(x: Tensor, cos: Tensor, sin: Tensor, reuse: bool, quantize: QuantFormat | None) -> bool:
    """Whether the kernel takes a call: 64 rotated dimensions, vectors of aligned 16-byte pieces."""
    return (
        x.dtype == torch.bfloat16
        and cos.shape[1] == _PAIRS
        and cos.is_contiguous()
        and sin.is_contiguous()
        and cos.data_ptr() % 16 == 0
        and sin.data_ptr() % 16 == 0
        and x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and x.shape[-1] % 8 == 0
        and all(stride % 8 == 0 for stride in x.stride()[:-1])
        and (x.shape[-1] == _ROUNDED.get(quantize, 0) if quantize else reuse)
    )


def rotate_tail(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    inverse: bool = False,
    reuse: bool = False,
    quantize: QuantFormat | None = None,
) -> Tensor:
    """As the reference; where x may be reused, in place."""
    if not x.numel() or not accepts(x, cos, sin, reuse, quantize):
        return triton.rotate_tail(x, cos, sin, inverse, reuse, quantize)
    out = x if reuse else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads = x.shape[1] if x.ndim == 3 else 1
    row, head, out_row, out_head = (
        t.stride(d) if d < t.ndim - 1 else 0 for t in (x, out) for d in (0, 1)
    )
    nvcc.call(
        nvcc.load(SOURCE), "rotate_tail", x.device, x, cos, sin, out, x.shape[0], heads,
        x.shape[-1], row, head, out_row, out_head, int(inverse), int(quantize is not None),
    )  # fmt: skip
    return out
