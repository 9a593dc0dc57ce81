"""Inputs of the router."""

from __future__ import annotations

import dataclasses
from typing import Final

import torch

from deepinfer.kernels.cases import Arguments, Case, normal
from deepinfer.kernels.linear import DenseWeight

__all__ = ["CASES"]


def _case(
    name: str,
    experts: int,
    active: int,
    dim: int,
    scale: float,
    ties: bool = False,
    timed: tuple[int, ...] = (),
) -> Case:
    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        stored = normal(generator, experts, dim, dtype=torch.bfloat16, scale=scale * dim**-0.5)
        bias = normal(generator, experts, scale=0.1)
        if ties:
            stored[1::2] = stored[::2]
            bias[1::2] = bias[::2]
        x = normal(generator, num_rows, dim, dtype=torch.bfloat16)
        return x, DenseWeight(stored, None if timed else stored.float()), bias, active, 1.5

    return Case(
        op="route",
        name=name,
        build=build,
        row_flops=2 * experts * dim,
        large=bool(timed),
        timed=timed,
    )


_ROUTES: Final = (
    _case("eight experts", 8, 3, 64, 1.0),
    _case("steep", 24, 6, 96, 30.0),
    _case("pairs of equal experts", 12, 5, 64, 1.0, ties=True),
    _case("real", 384, 6, 5120, 1.0, timed=(32, 192, 4096)),
    _case("all chosen", 4, 4, 32, 1.0),
)

CASES: Final = _ROUTES + tuple(
    dataclasses.replace(case, op="route_rounded")
    for case in _ROUTES
    if case.name in ("eight experts", "steep", "real")
)
