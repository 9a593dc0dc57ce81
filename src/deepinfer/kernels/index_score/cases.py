"""Inputs of the index scores."""

from __future__ import annotations

from typing import Final

import torch

from deepinfer.kernels.cases import Arguments, Case, normal
from deepinfer.kernels.quantize.reference import round_trip

__all__ = ["CASES"]


def _case(
    name: str,
    heads: int,
    dim: int,
    keys: int,
    rounding: str,
    dtype: torch.dtype = torch.bfloat16,
    own: bool = False,
    timed: tuple[int, ...] = (),
) -> Case:
    """`own`: every row has its own keys."""

    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        q = round_trip(normal(generator, num_rows, heads, dim, dtype=dtype), "act4_e8")
        weight = normal(generator, num_rows, heads, dtype=dtype, scale=heads**-0.5)
        shape = (num_rows, keys, dim) if own else (keys, dim)
        return q, weight, round_trip(normal(generator, *shape), "act4_e8"), rounding

    return Case(
        op="index_score",
        name=name,
        build=build,
        rows=(0, 1, 2) if own else (0, 1),
        row_flops=2 * heads * dim * keys,
        tolerance={"reference": 4e-2, "final": 2e-6, "none": 2e-6}[rounding],
        large=bool(timed),
        timed=timed,
    )


CASES: Final = (
    _case("few keys", 8, 128, 5, "reference"),
    _case("many keys", 8, 128, 300, "reference"),
    _case("own keys", 4, 64, 70, "reference", own=True),
    _case("six heads", 6, 64, 70, "reference"),
    _case("real, rounded once", 32, 128, 65536, "final", timed=(6, 768)),
    _case("rounded once", 8, 128, 130, "final"),
    _case("strict", 3, 96, 65, "none", torch.float32),
    _case("strict, own keys", 3, 96, 65, "none", torch.float32, own=True),
)
