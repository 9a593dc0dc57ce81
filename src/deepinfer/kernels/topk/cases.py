"""Inputs of the selections: ties, nothing visible, fewer entries than wanted."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from deepinfer.kernels.cases import Arguments, Case, normal

__all__ = ["CASES"]


def _scores(num_rows: int, entries: int, levels: int, generator: torch.Generator) -> Tensor:
    """Draw scores of a few levels, some of them -inf."""
    drawn = torch.randint(-levels, levels + 1, (num_rows, entries), generator=generator).float()
    return drawn.masked_fill(drawn == -levels, -math.inf)


def _all_seen(num_rows: int, entries: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw bf16 scores as of a long context, equal ones among them, and say that all are seen."""
    scores = normal(generator, num_rows, entries, dtype=torch.bfloat16)
    return scores, torch.full((num_rows,), entries)


def _visible(num_rows: int, entries: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, entries + 1, (num_rows,), generator=generator)


def _topk(name: str, entries: int, count: int, levels: int, timed: tuple[int, ...] = ()) -> Case:
    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        if timed:
            return *_all_seen(num_rows, entries, generator), count
        scores = _scores(num_rows, entries, levels, generator)
        return scores, _visible(num_rows, entries, generator), count

    return Case(
        op="select_topk",
        name=name,
        build=build,
        rows=(0, 1),
        tolerance=0.0,
        large=bool(timed),
        timed=timed,
    )


def _blocks(
    name: str, entries: int, count: int, size: int, levels: int, timed: tuple[int, ...] = ()
) -> Case:
    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        if timed:
            return *_all_seen(num_rows, entries, generator), count, size
        scores = _scores(num_rows, entries, levels, generator)
        return scores, _visible(num_rows, entries, generator), count, size

    return Case(
        op="select_blocks",
        name=name,
        build=build,
        rows=(0, 1),
        tolerance=0.0,
        large=bool(timed),
        timed=timed,
    )


def _mask(name: str, entries: int, count: int, size: int) -> Case:
    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        blocks = torch.randint(-1, -(-entries // size), (num_rows, count), generator=generator)
        return blocks, entries, size

    return Case(op="block_mask", name=name, build=build, tolerance=0.0)


CASES: Final = (
    _topk("distinct", 300, 16, 1 << 20),
    _topk("ties", 77, 16, 3),
    _topk("fewer entries than wanted", 9, 16, 4),
    _topk("all of one entry", 1, 4, 1),
    _topk("real", 131072, 512, 0, timed=(32, 768)),
    _blocks("real", 131072, 2048, 8, 0, timed=(32, 768)),
    _blocks("distinct", 301, 8, 8, 1 << 20),
    _blocks("ties", 61, 4, 4, 2),
    _blocks("fewer blocks than wanted", 10, 8, 8, 4),
    _mask("partial last block", 61, 5, 8),
    _mask("one block", 3, 2, 4),
)
