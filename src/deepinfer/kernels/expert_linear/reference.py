"""Expert products in plain torch, one expert after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.kernels.quantize import act8_values, decode_e2m1, decode_ue8m0, repeat_groups
from deepinfer.kernels.rows import matmul_rows

if TYPE_CHECKING:
    from deepinfer.kernels.expert_linear import Fp4Weight


def dequantize_rows(codes: Tensor, scale: Tensor) -> Tensor:
    """[N, K] from packed e2m1 and one power of two per 32 inputs."""
    return repeat_groups(decode_e2m1(codes), decode_ue8m0(scale))


def borders(offsets: Sequence[int] | Tensor) -> Sequence[int]:
    """Return offsets as host numbers; waits for the device that holds them."""
    return offsets.tolist() if isinstance(offsets, Tensor) else offsets


def expert_linear(
    x: Tensor, weight: Fp4Weight, offsets: Sequence[int] | Tensor, quantize_input: bool
) -> Tensor:
    """Multiply each expert's rows in 16-row blocks."""
    x32 = act8_values(x) if quantize_input else x.float()
    out = x32.new_empty(x.shape[0], weight.codes.shape[1])
    for expert, (begin, end) in enumerate(pairwise(borders(offsets))):
        if begin < end:
            out[begin:end] = matmul_rows(x32[begin:end], weight.dequantize(expert))
    return out.to(x.dtype)


def swiglu(
    gate: Tensor, up: Tensor, limit: float, weight: Tensor | None, quantize: bool = False
) -> Tensor:
    """Clamp the stored values, then everything in fp32."""
    g, u = gate.float(), up.float()
    if limit > 0:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    hidden = g / (1.0 + torch.exp(-g)) * u
    if weight is not None:
        hidden = weight.unsqueeze(1) * hidden
    out = hidden.to(gate.dtype)
    return act8_values(out).to(gate.dtype) if quantize else out
