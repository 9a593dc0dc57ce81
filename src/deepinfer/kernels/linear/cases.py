"""Inputs of the products with FP8 and unquantized weights."""

from __future__ import annotations

from typing import Final

import torch

from deepinfer.kernels.cases import Arguments, Case, normal
from deepinfer.kernels.linear import DenseWeight, Fp8Weight

__all__ = ["CASES"]

_TOKENS: Final = (1, 32, 192, 384, 4096)
"""Rows of the dense linears: one stream, decode steps, a prefill chunk."""


def fp8_weight(
    generator: torch.Generator, rows: int, columns: int, copied: bool, group: int = 32
) -> Fp8Weight:
    """Draw an FP8 weight of about unit gain, with or without its fp32 copy.

    group  scales are equal over blocks of so many rows and columns, a multiple of 32
    """
    codes = normal(generator, rows, columns, scale=64.0).to(torch.float8_e4m3fn)
    middle = 121 - columns.bit_length() // 2
    shape = (-(-rows // 32), columns // 32)
    scale = torch.randint(middle - 2, middle + 3, shape, generator=generator, dtype=torch.uint8)
    if group > 32:
        first = [torch.arange(n) // (group // 32) * (group // 32) for n in shape]
        scale = scale[first[0]][:, first[1]].contiguous()
    weight = Fp8Weight(codes, scale, None)
    return Fp8Weight(codes, scale, weight.dequantize()) if copied else weight


def _fp8(
    name: str,
    rows: int,
    columns: int,
    dtype: torch.dtype = torch.bfloat16,
    quantize: bool = True,
    copied: bool = True,
    large: bool = False,
    group: int = 32,
) -> Case:
    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        weight = fp8_weight(generator, rows, columns, copied, group)
        return normal(generator, num_rows, columns, dtype=dtype), weight, quantize

    return Case(
        op="fp8_linear",
        name=name,
        build=build,
        row_flops=2 * rows * columns,
        large=large,
        timed=_TOKENS if large else (),
    )


def _dense(
    name: str,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    out: torch.dtype,
    timed: tuple[int, ...] = (),
) -> Case:
    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        stored = normal(generator, rows, columns, dtype=dtype, scale=columns**-0.5)
        weight = DenseWeight(stored, None if timed or rows % 64 == 0 else stored.float())
        return normal(generator, num_rows, columns, dtype=dtype), weight, out

    return Case(
        op="dense_linear",
        name=name,
        build=build,
        row_flops=2 * rows * columns,
        large=bool(timed),
        timed=timed,
    )


def _grouped(
    name: str,
    groups: int,
    rows: int,
    columns: int,
    quantize: bool,
    rounds: bool = False,
    large: bool = False,
) -> Case:
    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        weight = fp8_weight(generator, groups * rows, columns, False)
        x = normal(generator, num_rows, groups, columns, dtype=torch.bfloat16)
        return x, weight, quantize, rounds

    return Case(
        op="grouped_linear",
        name=name,
        build=build,
        row_flops=2 * groups * rows * columns,
        large=large,
        timed=_TOKENS if large else (),
    )


CASES: Final = (
    _fp8("latent to queries", 2048, 32),
    _fp8("hidden to latent", 32, 64, copied=False),
    _fp8("ragged rows", 72, 160),
    _fp8("input as it is", 64, 64, quantize=False),
    _fp8("strict", 96, 128, torch.float32, quantize=False),
    _fp8("long inputs", 64, 1088),
    _fp8("real wq_a and wkv", 1792, 5120, quantize=False, copied=False, large=True),
    _fp8("real wq_b", 32768, 1280, quantize=False, copied=False, large=True),
    _fp8("real wo_b", 5120, 8192, quantize=False, copied=False, large=True),
    _fp8("real shared gate and up", 4608, 5120, quantize=False, copied=False, large=True),
    _fp8("real shared down", 5120, 2304, quantize=False, copied=False, large=True),
    _fp8("shared down, scales of 128", 5120, 2304, copied=False, large=True, group=128),
    _dense("head", 288, 64, torch.bfloat16, torch.float32),
    _dense("one output", 1, 80, torch.bfloat16, torch.float32),
    _dense("keys", 128, 512, torch.bfloat16, torch.bfloat16),
    _dense("strict", 24, 256, torch.float32, torch.float32),
    _grouped("bf16 projection", 2, 32, 1024, False),
    _grouped("fp8 projection", 3, 32, 256, True),
    _grouped("real wo_a", 8, 1024, 4096, False, large=True),
    _dense("real head", 129280, 5120, torch.bfloat16, torch.float32, timed=(32, 192)),
)
