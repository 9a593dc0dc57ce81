"""Inputs of the rotary ops."""

from __future__ import annotations

from typing import Final, cast

import torch
from torch import Tensor

from deepinfer.kernels.cases import Arguments, Case, normal, num_bytes
from deepinfer.kernels.quantize import QuantFormat
from deepinfer.kernels.rope.reference import cos_sin

__all__ = ["CASES"]


def _frequencies(dims: int) -> torch.Tensor:
    exponent = torch.arange(0, dims, 2, dtype=torch.float32) / dims
    return 1.0 / (10000.0**exponent)


def _angles(dims: int, limit: int) -> Case:
    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        return torch.randint(0, limit, (num_rows,), generator=generator), _frequencies(dims)

    return Case(op="cos_sin", name=f"{dims} dims below {limit}", build=build, row_flops=dims)


def _rotation(
    name: str,
    shape: tuple[int, ...],
    dims: int,
    dtype: torch.dtype,
    inverse: bool = False,
    timed: tuple[int, ...] = (),
    reuse: bool = False,
    quantize: QuantFormat | None = None,
) -> Case:
    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        positions = torch.randint(0, 1 << 20, (num_rows,), generator=generator)
        cos, sin = cos_sin(positions, _frequencies(dims))
        x = normal(generator, num_rows, *shape, dtype=dtype)
        return x, cos, sin, inverse, *((reuse, quantize) if reuse or quantize else ())

    def moved(arguments: Arguments) -> int:  # all of x where it is rounded, else its tails
        x = cast("Tensor", arguments[0])
        part = 1.0 if quantize else dims / shape[-1]
        return int(2 * num_bytes(x) * part) + num_bytes(*arguments[1:3])

    return Case(
        op="rotate_tail",
        name=name,
        build=build,
        rows=(0, 1, 2),
        row_flops=3 * dims,
        large=bool(timed),
        timed=timed,
        moved=moved if timed else None,
    )


_TIMED: Final = (32, 192, 4096)

CASES: Final = (
    _angles(64, 1000),
    _angles(32, 1 << 20),
    _rotation("queries", (4, 512), 64, torch.bfloat16),
    _rotation("real queries", (64, 512), 64, torch.bfloat16, timed=_TIMED, reuse=True),
    _rotation(
        "real outputs, rounded", (64, 512), 64, torch.bfloat16, True, timed=_TIMED, quantize="act8"
    ),
    _rotation("outputs back", (3, 128), 32, torch.bfloat16, inverse=True),
    _rotation(
        "real index queries", (32, 128), 64, torch.bfloat16, timed=_TIMED, quantize="act4_e8"
    ),
    _rotation("entries", (512,), 64, torch.bfloat16),
    _rotation("all dims, strict", (2, 32), 32, torch.float32, inverse=True),
)
