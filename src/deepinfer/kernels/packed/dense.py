"""Dense products of packed e4m3 weights on SM90a: the schedules of `dense.cu`, and their calls."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from deepinfer.kernels import nvcc
from deepinfer.kernels.packed import Packed
from deepinfer.kernels.quantize.sm90 import round_trip

__all__ = [
    "SCHEDULES",
    "SOURCE",
    "Schedule",
    "fixed_split",
    "multiply",
    "plan",
    "rounds_inside",
    "share_of",
]

SOURCE: Final = Path(__file__).with_name("dense.cu")


@dataclass(frozen=True, slots=True)
class Schedule:
    """One setting of the kernel, and what its time was found to be made of on an H200.

    tokens, outputs  most of a tile
    resident         blocks of a multiprocessor
    costs            microseconds of a launch; of a round of tiles; of 64 inputs of a tile, and for
                     each of its tokens; of sharing a sum, and for each token; of 64 inputs for
                     each tile that a multiprocessor gets on average
    alone            a block takes all of a tile's K, and adds up its parts itself
    """

    tokens: int
    outputs: int
    resident: int
    costs: tuple[float, ...]
    alone: bool = False


SCHEDULES: Final = {
    "few_64": Schedule(32, 64, 3, (0.08, 0.66, 0.145, 0.0017, 2.27, 0.0286, 0.1)),
    "few_128": Schedule(32, 128, 2, (0.01, 1.9, 0.194, 0.0013, 1.39, 0.0441, 0.194)),
    "some_128": Schedule(64, 128, 2, (1.24, 0.0, 0.0, 0.0052, 0.0, 0.0713, 0.218)),
    "half_128": Schedule(96, 128, 2, (2.54, 2.16, 0.255, 0.0002, 2.24, 0.03, 0.232)),
    "step_128": Schedule(128, 128, 1, (0.64, 3.01, 0.22, 0.0003, 2.07, 0.017, 0.158)),
    "step_192": Schedule(128, 192, 1, (0.92, 3.79, 0.275, 0.0003, 1.92, 0.02, 0.284)),
    "wide_128": Schedule(192, 128, 1, (0.4, 2.12, 0.0, 0.0019, 1.73, 0.018, 0.232)),
    "wide_192": Schedule(192, 192, 1, (0.43, 3.88, 0.0, 0.0029, 5.21, 0.0, 0.289)),
    "whole_128": Schedule(128, 128, 1, (0.0, 1.11, 0.0, 0.0026, 0.0, 0.0, 0.212), alone=True),
    "whole_wide": Schedule(192, 128, 1, (0.0, 1.8, 0.0, 0.003, 0.0, 0.0, 0.191), alone=True),
    "slim_8": Schedule(8, 64, 1, (1.95, 0.54, 0.0, 0.0066, 0.0, 0.0, 0.0607), alone=True),
    "slim_4": Schedule(8, 64, 2, (0.48, 1.3, 0.0, 0.0101, 0.0, 0.0, 0.068), alone=True),
}

_HELD: Final = {
    1: (132, 66, 39, 30, 22, 17, 15, 15),
    2: (264, 132, 79, 62, 47, 39, 32, 30),
    3: (396, 198, 124, 92, 69, 62, 47, 45),
}
"""Blocks of a multiprocessor -> how many clusters of 1..8 blocks an H200 holds at once.

Not asked of the card: which blocks share a sum decides its bits, on all cards alike.
"""

_NAMES: Final = (
    (32, ("few_64", "few_128")),
    (64, ("some_128",)),
    (128, ("half_128", "step_128", "step_192")),
    (512, ("wide_128", "wide_192")),
    (1 << 62, ("wide_192",)),
)
"""Most rows -> schedules that may take them."""

_WIDTHS: Final = {"wide_128": (160, 176), "wide_192": (160, 176)}
"""Tokens that a tile may be cut to: its products take less time then."""

_LEAST_SLIM: Final = 1024
"""Fewest inputs of "slim": all of its warps have some."""

_MANY: Final = 1024
"""From more rows on a block adds up the parts of a fixed split itself, whatever the estimate."""

_TYPICAL: Final = ((8, 1.0), (32, 1.0), (192, 1.0), (4096, 0.025))
"""Rows, and what their time counts, where one split serves all."""


@cache
def plan(outputs: int, groups: int, inputs: int, rows: int, split: int = 0) -> tuple[str, int]:
    """Return schedule and parts of K for a number of rows, the fastest where no split is given.

    split  parts of K that are added up in their order: a row's bits depend on it, "slim" apart,
           which takes no split
    """
    names = next(names for most, names in _NAMES if rows <= most)
    splits = (split,) if split else _splits(inputs)
    found = [(name, s) for name in names for s in splits]
    if not split and rows <= SCHEDULES["slim_8"].tokens and inputs >= _LEAST_SLIM:
        found += (("slim_8", 1), ("slim_4", 1))
    if split > 1 and rows > 256:
        whole = [(name, split) for name in ("whole_128", "whole_wide")]
        found = whole if rows > _MANY else found + whole
    return min(found, key=lambda at: _time(at[0], at[1], outputs, groups, inputs, rows))


@cache
def fixed_split(outputs: int, groups: int, inputs: int) -> int:
    """Return how many blocks share the K of a matrix's tiles, whatever the number of rows."""

    def cost(split: int) -> float:
        total = 0.0
        for rows, share in _TYPICAL:
            name, _ = plan(outputs, groups, inputs, rows, split)
            total += share * _time(name, split, outputs, groups, inputs, rows)
        return total

    return min(_splits(inputs), key=cost)


def _splits(inputs: int) -> range:
    """Splits that leave each block four steps of 64 inputs."""
    return range(1, max(1, min(8, inputs // 256)) + 1)


def _time(name: str, split: int, outputs: int, groups: int, inputs: int, rows: int) -> float:
    """Estimate a product's microseconds."""
    schedule = SCHEDULES[name]
    split = 1 if schedule.alone else split
    share, steps, shared = share_of(rows, name), inputs / 64 / split, float(split > 1)
    tiles = groups * -(-outputs // schedule.outputs) * -(-rows // schedule.tokens)
    rounds = -(-tiles // _HELD[schedule.resident][split - 1])
    parts = (
        1.0,
        rounds,
        rounds * steps,
        rounds * steps * share,
        rounds * shared,
        rounds * shared * share,
        tiles * split / _HELD[1][0] * steps,
    )
    return sum(cost * part for cost, part in zip(schedule.costs, parts, strict=True))


def share_of(rows: int, name: str, high: int = 0) -> int:
    """Return the tokens of a schedule's tile: equal parts, a multiple of 8.

    high  tiles above each other, where each is one block's: many tokens are parted so that rounds
          of tiles are full
    """
    schedule = SCHEDULES[name]
    least = -(-rows // schedule.tokens)
    most = least + least // 4 if high and name in _WIDTHS else least

    def cost(parts: int) -> int:
        share = _share(rows, parts)
        width = next((w for w in _WIDTHS.get(name, ()) if share <= w), schedule.tokens)
        return -(-high * parts // _HELD[schedule.resident][0]) * width

    return _share(rows, min(range(least, most + 1), key=cost))


def _share(rows: int, parts: int) -> int:
    return -(-rows // (8 * parts)) * 8


@cache
def rounds_inside(name: str, parts: int) -> bool:
    """Whether a schedule rounds what it stores: sums are sent by 32 outputs then, if they fit."""
    schedule = SCHEDULES[name]
    if schedule.alone or schedule.tokens > 64:
        return True
    pieces = schedule.outputs // 16 * schedule.tokens // 8

    def sent(parts: int, together: int) -> int:
        return -(-pieces // together // parts) * together * (parts - 1)

    return sent(parts, 2) <= max(sent(size, 1) for size in range(2, 9))


def multiply(
    x: Tensor,
    weight: Packed,
    groups: int = 1,
    *,
    out: Tensor | None = None,
    split: int = 0,
    rounds: bool = False,
) -> Tensor:
    """Multiply all rows by an e4m3 matrix, each group of its outputs by its own inputs.

    x        [T, G, K] bf16, contiguous
    split    parts of K that are added up in their order, so that a row's bits do not depend on its
             batch; by default chosen with the schedule for the number of rows
    rounds   round the outputs with ACT8 as well
    returns  [T, outputs] bf16, accumulated in fp32, rounded once
    """
    rows = x.shape[0]
    size = (weight.outputs // groups, groups, weight.inputs)
    name, parts = plan(*size, rows, split)
    if out is None:
        out = torch.empty(rows, weight.outputs, dtype=torch.bfloat16, device=x.device)
    schedule = SCHEDULES[name]
    high = groups * -(-size[0] // schedule.outputs) if parts == 1 else 0
    inside = rounds and rounds_inside(name, parts)
    nvcc.call(
        nvcc.load(SOURCE), name, x.device,
        x, weight.data, weight.row_scale, out,
        groups, size[0], weight.inputs, x.stride(0) * x.element_size(),
        rows, share_of(rows, name, high), weight.outputs, int(inside),
        nvcc.processors(x.device) * schedule.resident, parts,
    )  # fmt: skip
    return round_trip(out, "act8") if rounds and not inside else out
