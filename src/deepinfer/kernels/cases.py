"""Named inputs of every op, for tests and benchmarks: shapes, edges, tolerances, work.

Each folder lists its own in `cases.py`; this module owns the form. Nothing here knows a test
framework, and inputs depend on the generator alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TypeAlias

import torch
from torch import Tensor

from deepinfer.kernels.table import TABLE

__all__ = ["Arguments", "Case", "all_cases", "normal", "num_bytes", "take_rows"]

Arguments: TypeAlias = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Inputs of one op for any number of rows.

    build      (number of rows, generator) -> arguments in the order of the op's signature
    rows       places of the arguments that have one row per row of the result
    take       (arguments, ascending row ids [n]) -> the arguments of those rows alone, where
               slicing `rows` is not enough
    tolerance  largest error of an implementation, relative to the RMS of the exact result, besides
               the rounding to the result's type; 0 = bit for bit
    row_flops  multiplications and additions per row, for benchmarks
    large      too slow for the tests: real dimensions, for benchmarks
    timed      row counts that benchmarks run a large case with
    moved      bytes that must be read and written at least; None = every tensor of the arguments
               and the result once, a weight in its stored form
    """

    op: str
    name: str
    build: Callable[[int, torch.Generator], Arguments]
    rows: tuple[int, ...] = (0,)
    take: Callable[[Arguments, Tensor], Arguments] | None = None
    tolerance: float = 2e-6
    row_flops: int = 0
    large: bool = False
    timed: tuple[int, ...] = ()
    moved: Callable[[Arguments], int] | None = None

    def select(self, arguments: Arguments, index: Tensor) -> Arguments:
        """Return the arguments of some rows, index [n] ascending."""
        if self.take is not None:
            return self.take(arguments, index)
        return take_rows(arguments, self.rows, index)


def take_rows(arguments: Arguments, places: tuple[int, ...], index: Tensor) -> Arguments:
    """Return arguments with only the rows index [n] of those at the given places."""
    return tuple(
        value.index_select(0, index) if place in places and isinstance(value, Tensor) else value
        for place, value in enumerate(arguments)
    )


def normal(
    generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> Tensor:
    """Draw a normal tensor of any type."""
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def num_bytes(*values: object) -> int:
    """Add up the bytes of all tensors among values, tuples looked into."""
    total = 0
    for value in values:
        if isinstance(value, Tensor):
            total += value.numel() * value.element_size()
        elif isinstance(value, tuple):
            total += num_bytes(*value)
    return total


def all_cases() -> tuple[Case, ...]:
    """Return the cases of every op in the dispatch table."""
    folders = dict.fromkeys(
        implementation.module.partition(".")[0]
        for line in TABLE.values()
        for implementation in line
    )
    cases: list[Case] = []
    for folder in folders:
        cases.extend(import_module(f"deepinfer.kernels.{folder}.cases").CASES)
    return tuple(cases)
