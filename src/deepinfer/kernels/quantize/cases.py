"""Inputs of the quantizers, edges included."""

from __future__ import annotations

from typing import Final

import torch

from deepinfer.kernels.cases import Arguments, Case, normal

__all__ = ["CASES"]

_FORMATS: Final = ("act8", "act4_e8", "act4_e4")


def _random(
    fmt: str, dtype: torch.dtype, dim: int, *middle: int, timed: tuple[int, ...] = ()
) -> Case:
    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        magnitude = 2.0 ** torch.randint(-30, 30, (num_rows,), generator=generator).float()
        x = normal(generator, num_rows, *middle, dim)
        return (x * magnitude.view(-1, *(1,) * (x.ndim - 1))).to(dtype), fmt

    return Case(
        op="round_trip",
        name=f"{fmt} {dtype} {dim}",
        build=build,
        tolerance=0.0,
        large=bool(timed),
        timed=timed,
    )


def _midpoints(fmt: str) -> Case:
    """Rows that fall exactly between two codes, around a group maximum of every size."""

    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        steps = torch.randint(-64, 65, (num_rows, 64), generator=generator).float() / 8.0
        steps[:, ::16] = 6.0 if fmt != "act8" else 448.0
        scale = 2.0 ** torch.randint(-8, 8, (num_rows, 1), generator=generator).float()
        return (steps * scale).bfloat16(), fmt

    return Case(op="round_trip", name=f"{fmt} midpoints", build=build, tolerance=0.0)


def _edges(fmt: str) -> Case:
    """Zeros of both signs, values below the floor, the largest bf16."""

    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        edges = torch.tensor([0.0, -0.0, 1e-30, -1e-5, 2.0**-10, 3.0e38, 2700.0, 1.0])
        x = edges[torch.arange(num_rows) % 8].unsqueeze(1).repeat(1, 64)
        return (x * torch.linspace(0.0, 1.0, 64)).bfloat16(), fmt

    return Case(op="round_trip", name=f"{fmt} edges", build=build, tolerance=0.0)


CASES: Final = (
    *(
        case
        for fmt in _FORMATS
        for case in (
            _random(fmt, torch.bfloat16, 64),
            _random(fmt, torch.float32, 96),
            _random(fmt, torch.bfloat16, 128, 4),
            _midpoints(fmt),
            _edges(fmt),
        )
    ),
    _random("act8", torch.bfloat16, 5120, timed=(32, 4096)),
)
