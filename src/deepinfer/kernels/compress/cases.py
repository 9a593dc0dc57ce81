"""Inputs of the pooling."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from deepinfer.kernels.cases import Arguments, Case, normal, take_rows

__all__ = ["CASES"]


def _case(name: str, ratio: int, dim: int, spread: float) -> Case:
    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        kv = normal(generator, num_rows * ratio, dim)
        gate = normal(generator, num_rows * ratio, dim, scale=spread)
        return kv, gate, ratio

    def take(arguments: Arguments, index: Tensor) -> Arguments:
        members = (index[:, None] * ratio + torch.arange(ratio)).flatten()
        return take_rows(arguments, (0, 1), members)

    return Case(op="compress", name=name, build=build, take=take, row_flops=6 * ratio * dim)


CASES: Final = (
    _case("pairs", 2, 512, 1.0),
    _case("pairs, one dominates", 2, 96, 60.0),
    _case("four rows, odd width", 4, 33, 1.0),
)
