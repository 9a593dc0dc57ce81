"""Inputs of the routed experts."""

from __future__ import annotations

from typing import Final, cast

import torch
from torch import Tensor

from deepinfer.kernels.cases import Arguments, Case, normal
from deepinfer.kernels.expert_linear.cases import fp4_weight
from deepinfer.kernels.quantize.reference import round_trip

__all__ = ["CASES"]

_TOKENS = 5


def _case(
    name: str,
    experts: int,
    inner: int,
    dim: int,
    dtype: torch.dtype = torch.bfloat16,
    limit: float = 10.0,
    timed: tuple[int, ...] = (),
) -> Case:
    quantize = dtype == torch.bfloat16

    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        w1_w3 = fp4_weight(generator, experts, 2 * inner, dim, not timed)
        w2 = fp4_weight(generator, experts, dim, inner, not timed)
        tokens = max(1, num_rows // 6) if timed else _TOKENS
        x = normal(generator, tokens, dim, dtype=dtype)
        x = round_trip(x, "act8") if quantize else x
        rows = torch.randint(0, tokens, (num_rows,), generator=generator)
        owner = torch.randint(0, experts, (num_rows,), generator=generator).sort().values
        weights = torch.rand(num_rows, generator=generator)
        return x, rows, weights, _offsets(owner, experts), w1_w3, w2, limit, quantize

    def take(arguments: Arguments, index: Tensor) -> Arguments:
        x, rows, weights, offsets, *rest = arguments
        bounds = cast("Tensor", offsets)
        owner = torch.repeat_interleave(torch.arange(experts), bounds[1:] - bounds[:-1])
        kept = (cast("Tensor", part).index_select(0, index) for part in (rows, weights))
        return x, *kept, _offsets(owner[index], experts), *rest

    return Case(
        op="routed_experts",
        name=name,
        build=build,
        take=take,
        tolerance=2e-6 if not quantize else 4e-2,
        row_flops=6 * inner * dim,
        large=bool(timed),
        timed=timed,
    )


def _offsets(owner: Tensor, experts: int) -> Tensor:
    counts = torch.bincount(owner, minlength=experts)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


CASES: Final = (
    _case("small", 8, 32, 64),
    _case("no limit, strict", 4, 32, 32, torch.float32, 0.0),
    _case("real", 48, 2304, 5120, timed=(192, 384, 768, 1152, 2304, 24576)),
)
