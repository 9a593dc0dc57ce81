"""Quantizing there and back in CUDA C++ for SM90: ACT8 of bf16; other calls run in Triton."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from deepinfer.kernels import nvcc
from deepinfer.kernels.quantize import triton

__all__ = ["round_trip"]

SOURCE: Final = Path(__file__).with_name("sm90.cu")


def round_trip(x: Tensor, fmt: str) -> Tensor:
    """As the reference."""
    if x.dtype != torch.bfloat16 or fmt != "act8" or not x.numel():
        return triton.round_trip(x, fmt)
    x = x.contiguous()
    out = torch.empty_like(x)
    nvcc.call(nvcc.load(SOURCE), "round_act8", x.device, x, out, x.numel())
    return out
