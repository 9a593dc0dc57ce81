"""Experts through Humming (MXFP4 weights, bf16 inputs: exact products) and TileKernels' SwiGLU.

Humming reads weights in a layout of its own: a copy is made at the first call with a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.kernels.expert_linear import reference
from deepinfer.kernels.humming import Packed, pack
from deepinfer.kernels.libraries import library
from deepinfer.kernels.quantize import round_trip

if TYPE_CHECKING:
    from deepinfer.kernels.expert_linear import Fp4Weight

_packed: dict[int, Packed] = {}


def expert_linear(
    x: Tensor, weight: Fp4Weight, offsets: Sequence[int] | Tensor, quantize_input: bool
) -> Tensor:
    """As the reference for bf16 rows; others take the reference."""
    if x.dtype != torch.bfloat16:
        return reference.expert_linear(x, weight, offsets, quantize_input)
    bounds = torch.as_tensor(offsets, dtype=torch.int64, device=x.device)
    if quantize_input:
        x = _rounded(x)
    return pack(_packed, weight.codes, weight.scale, fp4=True).multiply(x.contiguous(), bounds)


def swiglu(
    gate: Tensor, up: Tensor, limit: float, weight: Tensor | None, quantize: bool = False
) -> Tensor:
    """As the reference; gate and up that lie side by side are read where they are."""
    if gate.shape[1] % 128:
        return reference.swiglu(gate, up, limit, weight, quantize)
    rows, dim = gate.shape
    beside = gate.data_ptr() + dim * gate.element_size() == up.data_ptr()
    if beside and gate.stride() == up.stride() == (2 * dim, 1):
        both = gate.as_strided((rows, 2 * dim), (2 * dim, 1))
    else:
        both = torch.cat([gate, up], dim=1)
    fmt = "bf16" if gate.dtype == torch.bfloat16 else "fp32"
    out: Tensor = library("tile_kernels", "quant").swiglu_forward(
        both,
        fmt,
        topk_weights=None if weight is None else weight.contiguous(),
        clamp_value=limit if limit > 0 else None,
    )
    return _rounded(out) if quantize else out


def _rounded(x: Tensor) -> Tensor:
    """ACT8 and back, by our own kernel where there is one."""
    if x.device.type == "cuda":
        from deepinfer.kernels.quantize.triton import round_trip as kernel

        return kernel(x, "act8")
    return round_trip(x, "act8")
