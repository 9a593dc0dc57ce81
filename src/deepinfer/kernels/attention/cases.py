"""Inputs of sparse attention: windows, selections, absent slots, empty rows."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from deepinfer.kernels.cases import Arguments, Case, normal

__all__ = ["CASES"]


def _case(
    name: str,
    heads: int,
    dim: int,
    window: int,
    selected: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    sliding: bool = False,
    gathered: bool = False,
    absent: float = 0.0,
    spread: float = 1.0,
    large: bool = False,
    timed: tuple[int, ...] = (),
    pool: int = 0,
) -> Case:
    """`sliding`: row t sees the `window` entries that end with its own, as in a prefill.

    `gathered`: every row brings its own entries, as in a decode step. `absent`: share of slots.
    Every seventh row has no slot at all where any is absent. `pool`: entries to select from.
    """
    exact = dtype == torch.float32

    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        q = normal(generator, num_rows, heads, dim, dtype=dtype, scale=spread)
        sink = normal(generator, heads)
        if sliding:
            idx = (torch.arange(num_rows) - window + 1).clamp(min=0)[:, None]
            idx = idx + torch.arange(window)
            idx = idx.masked_fill(idx > torch.arange(num_rows)[:, None], -1)
            pair = normal(generator, num_rows, dim, dtype=torch.bfloat16).float(), idx
        else:
            pair = _entries(num_rows, window, dim, absent, gathered, generator)
        main_kv, main_idx = None, None
        if selected:
            main_kv, main_idx = _entries(num_rows, selected, dim, absent, gathered, generator, pool)
        return q, *pair, main_kv, main_idx, sink, dim**-0.5, not exact

    return Case(
        op="sparse_attention",
        name=name,
        build=build,
        rows=(0, 1, 2, 3, 4) if gathered else (0, 2, 4),
        tolerance=1e-5 if exact else 8e-3,
        row_flops=4 * heads * dim * (window + selected),
        large=large,
        timed=timed,
    )


def _entries(
    num_rows: int,
    slots: int,
    dim: int,
    absent: float,
    gathered: bool,
    generator: torch.Generator,
    pool: int = 0,
) -> tuple[Tensor, Tensor]:
    missing = torch.rand(num_rows, slots, generator=generator) < absent
    if absent:
        missing[::7] = True
    if gathered:
        kv = normal(generator, num_rows, slots, dim, dtype=torch.bfloat16).float()
        idx = torch.arange(num_rows * slots).view(num_rows, slots)
    else:
        pool = pool or 3 * slots + 1
        kv = normal(generator, pool, dim, dtype=torch.bfloat16).float()
        idx = torch.randint(0, pool, (num_rows, slots), generator=generator)
    return kv, idx.masked_fill(missing, -1)


CASES: Final = (
    _case("prefill window", 4, 128, 128, 0, sliding=True),
    _case("prefill window and selection", 4, 128, 128, 16, sliding=True, absent=0.2),
    _case("decode", 4, 128, 128, 16, gathered=True, absent=0.2),
    _case("narrow window", 3, 64, 48, 24, absent=0.3),
    _case("six heads", 6, 128, 48, 12, sliding=True, absent=0.2),
    _case("six heads, strict", 6, 128, 48, 12, dtype=torch.float32, gathered=True),
    _case("wide heads", 2, 512, 128, 16, sliding=True),
    _case("steep scores", 4, 64, 100, 0, absent=0.1, spread=12.0),
    _case("mostly absent", 2, 32, 70, 70, absent=0.95),
    _case("strict", 3, 96, 50, 17, dtype=torch.float32, absent=0.3),
    _case("strict decode", 4, 128, 128, 16, dtype=torch.float32, gathered=True, absent=0.2),
    _case("real decode", 64, 512, 128, 512, gathered=True, large=True, timed=(32, 192, 768)),
    _case("real prefill", 64, 512, 128, 512, sliding=True, large=True, timed=(4096,), pool=65536),
)
