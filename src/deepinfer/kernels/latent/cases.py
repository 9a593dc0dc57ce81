"""Inputs of attention's norms and rotation."""

from __future__ import annotations

from typing import Final

import torch

from deepinfer.kernels.cases import Arguments, Case, normal

__all__ = ["CASES"]


def _case(
    name: str,
    rank: int,
    dim: int,
    rotated: int,
    dtype: torch.dtype = torch.bfloat16,
    timed: tuple[int, ...] = (),
) -> Case:
    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        both = normal(generator, num_rows, rank + dim, dtype=dtype, scale=3.0)
        angle = normal(generator, num_rows, rotated // 2, scale=9.0)
        q_norm, kv_norm = normal(generator, rank), normal(generator, dim)
        return both, q_norm, kv_norm, angle.cos(), angle.sin(), 1e-20

    return Case(
        op="latent_entry",
        name=name,
        build=build,
        rows=(0, 3, 4),
        tolerance=2e-6 if dtype == torch.float32 else 4e-3,
        row_flops=4 * (rank + dim) + 3 * rotated,
        large=bool(timed),
        timed=timed,
    )


CASES: Final = (
    _case("small", 32, 96, 64),
    _case("odd widths", 48, 72, 8),
    _case("strict", 32, 64, 64, torch.float32),
    _case("real", 1280, 512, 64, timed=(32, 192, 4096)),
)
