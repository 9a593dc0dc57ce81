"""Inputs of the RMS norm."""

from __future__ import annotations

from typing import Final

import torch

from deepinfer.kernels.cases import Arguments, Case, normal

__all__ = ["CASES"]


def _case(name: str, dim: int, dtype: torch.dtype, scale: float = 1.0, large: bool = False) -> Case:
    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        weight = 1.0 + normal(generator, dim, scale=0.1)
        x = normal(generator, num_rows, dim, dtype=dtype, scale=scale)
        return x, weight.to(dtype), 1e-20

    return Case(
        op="rms_norm",
        name=name,
        build=build,
        row_flops=4 * dim,
        large=large,
        timed=(32, 512, 4096) if large else (),
    )


CASES: Final = (
    _case("hidden", 64, torch.bfloat16),
    _case("head", 512, torch.bfloat16),
    _case("strict", 96, torch.float32),
    _case("tiny values", 64, torch.bfloat16, 1e-12),
    _case("large values", 64, torch.bfloat16, 1e15),
    _case("real hidden", 5120, torch.bfloat16, large=True),
)
