"""The gate of an expert in CUDA C++ for SM90, of bf16; other calls run in Triton."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from deepinfer.kernels import nvcc
from deepinfer.kernels.expert_linear import triton

__all__ = ["accepts", "swiglu"]

SOURCE: Final = Path(__file__).with_name("gate.cu")


def accepts(gate: Tensor, up: Tensor) -> bool:
    """Whether the kernel takes a call: whole groups of 32 bf16 values in aligned pieces."""
    return gate.shape[1] % 32 == 0 and all(
        t.dtype == torch.bfloat16
        and t.stride(1) == 1
        and t.stride(0) % 8 == 0
        and t.data_ptr() % 16 == 0
        for t in (gate, up)
    )


def swiglu(
    gate: Tensor, up: Tensor, limit: float, weight: Tensor | None, quantize: bool = False
) -> Tensor:
    """As the reference."""
    if not gate.numel() or not accepts(gate, up):
        return triton.swiglu(gate, up, limit, weight, quantize)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    nvcc.call(
        nvcc.load(SOURCE), "swiglu", gate.device, gate, up,
        None if weight is None else weight.contiguous(), out, *gate.shape, gate.stride(0),
        up.stride(0), int(quantize), float(limit),
    )  # fmt: skip
    return out
