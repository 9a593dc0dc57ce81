"""Inputs of the expert products."""

from __future__ import annotations

from itertools import pairwise
from typing import Final, cast

import torch
from torch import Tensor

from deepinfer.kernels.cases import Arguments, Case, normal
from deepinfer.kernels.expert_linear import Fp4Weight

__all__ = ["CASES"]

_PAIRS: Final = (192, 384, 768, 1152, 2304, 24576)
"""(token, expert) pairs of a decode step or a prefill chunk at one rank of eight."""


def fp4_weight(
    generator: torch.Generator, experts: int, rows: int, columns: int, copied: bool
) -> Fp4Weight:
    """Draw stacked FP4 weights of about unit gain, with or without their fp32 copies."""
    shape = (experts, rows, columns // 2)
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    middle = 126 - columns.bit_length() // 2
    shape = (experts, rows, columns // 32)
    scale = torch.randint(middle - 2, middle + 3, shape, generator=generator, dtype=torch.uint8)
    weight = Fp4Weight(codes, scale, None)
    if not copied:
        return weight
    return Fp4Weight(codes, scale, torch.stack([weight.dequantize(e) for e in range(experts)]))


def _experts(
    name: str,
    experts: int,
    rows: int,
    columns: int,
    dtype: torch.dtype = torch.bfloat16,
    quantize: bool = True,
    copied: bool = True,
    skewed: bool = False,
    large: bool = False,
) -> Case:
    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        weight = fp4_weight(generator, experts, rows, columns, copied)
        x = normal(generator, num_rows, columns, dtype=dtype)
        if skewed:  # one expert takes nearly all
            owner = torch.full((num_rows,), experts - 2)
            owner[: num_rows // 8] = 0
        else:
            owner = torch.randint(0, experts, (num_rows,), generator=generator).sort().values
        return x, weight, _offsets(owner, experts), quantize

    def take(arguments: Arguments, index: Tensor) -> Arguments:
        x, weight, offsets, quantized = arguments
        bounds = torch.as_tensor(cast("list[int] | Tensor", offsets))
        owner = torch.repeat_interleave(torch.arange(experts), bounds[1:] - bounds[:-1])
        kept = cast("Tensor", x).index_select(0, index)
        return kept, weight, _offsets(owner[index], experts), quantized

    def moved(arguments: Arguments) -> int:  # experts without rows are not read
        bounds: list[int] = torch.as_tensor(cast("list[int] | Tensor", arguments[2])).tolist()
        hit = sum(1 for begin, end in pairwise(bounds) if begin < end)
        return hit * rows * columns * 17 // 32 + 2 * bounds[-1] * (columns + rows)

    return Case(
        op="expert_linear",
        name=name,
        build=build,
        take=take,
        row_flops=2 * rows * columns,
        large=large,
        timed=_PAIRS if large else (),
        moved=moved if large else None,
    )


def _offsets(owner: Tensor, experts: int) -> list[int] | Tensor:
    """Return where each expert's rows begin: numbers, on a card a tensor there."""
    counts = torch.bincount(owner, minlength=experts)
    offsets = [0, *counts.cumsum(0).tolist()]
    return torch.tensor(offsets) if owner.is_cuda else offsets


def _swiglu(
    name: str, dim: int, limit: float, weighted: bool, dtype: torch.dtype, large: bool = False
) -> Case:
    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        gate = normal(generator, num_rows, dim, dtype=dtype, scale=4.0)
        up = normal(generator, num_rows, dim, dtype=dtype, scale=4.0)
        weight = torch.rand(num_rows, generator=generator) if weighted else None
        return gate, up, limit, weight

    return Case(
        op="swiglu",
        name=name,
        build=build,
        rows=(0, 1, 3),
        row_flops=6 * dim,
        large=large,
        timed=(1152, 24576) if large else (),
    )


CASES: Final = (
    _experts("w1", 8, 32, 64),
    _experts("w2", 8, 64, 32, copied=False),
    _experts("most experts idle", 12, 48, 96, skewed=True),
    _experts("strict", 4, 32, 64, torch.float32, quantize=False),
    _experts("real gate and up, 48 local", 48, 4608, 5120, copied=False, large=True),
    _experts("real down, 48 local", 48, 5120, 2304, copied=False, large=True),
    _swiglu("real", 2304, 10.0, True, torch.bfloat16, large=True),
    _swiglu("routed", 32, 1.0, True, torch.bfloat16),
    _swiglu("shared", 32, 10.0, False, torch.bfloat16),
    _swiglu("no limit, odd width", 33, 0.0, True, torch.float32),
)
