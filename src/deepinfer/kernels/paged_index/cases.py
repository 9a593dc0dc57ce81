"""Inputs of the index scores on cached keys: pages out of order, ragged lengths, few candidates."""

from __future__ import annotations

from typing import Final, cast

import torch
from torch import Tensor

from deepinfer.kernels.cache_io import CacheFormat, PagedCache
from deepinfer.kernels.cache_io.cases import empty_cache
from deepinfer.kernels.cache_io.reference import cache_store
from deepinfer.kernels.cases import Arguments, Case, normal, num_bytes
from deepinfer.kernels.quantize.reference import round_trip

__all__ = ["CASES"]


def _case(
    name: str,
    heads: int,
    dim: int,
    per_block: int,
    entries: int,
    rounding: str,
    form: CacheFormat = "index_fp4",
    candidates: int = 0,
    timed: tuple[int, ...] = (),
) -> Case:
    """`candidates` blocks of 8 a row, of which a fifth is absent; three sequences.

    Where timed: sequences of six neighbouring rows, which see all of their own entries.
    """
    dtype = torch.float32 if form == "fp32" else torch.bfloat16
    width = -(-entries // per_block)

    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        sequences = -(-num_rows // 6) if timed else 3
        pages = sequences * width + 1
        cache = empty_cache(form, pages, per_block, dim, dense=False, split=form != "fp32")
        total = pages * per_block
        for begin in range(0, total, 1 << 16):
            idx = torch.arange(begin, min(begin + (1 << 16), total))
            cache_store(cache, normal(generator, len(idx), dim), idx)
        q = normal(generator, num_rows, heads, dim, dtype=dtype)
        q = q if form == "fp32" else round_trip(q, "act4_e8")
        weight = normal(generator, num_rows, heads, dtype=dtype, scale=heads**-0.5)
        table = torch.randperm(pages - 1, generator=generator).view(sequences, width) + 1
        if timed:
            rows = torch.arange(num_rows) // 6
            visible = torch.full((num_rows,), entries)
        else:
            rows = torch.randint(0, 3, (num_rows,), generator=generator)
            visible = torch.randint(0, entries + 1, (num_rows,), generator=generator)
            visible[1::3] = entries
        blocks = None
        if candidates:
            most = -(-entries // 8)
            drawn = [
                torch.randperm(most, generator=generator)[:candidates].sort().values
                for _ in range(num_rows)
            ]
            blocks = torch.stack(drawn) if drawn else torch.zeros(0, candidates, dtype=torch.int64)
            blocks[:, candidates - candidates // 5 :] = -1
        return q, weight, cache, table, rows, visible, blocks, 8, entries, rounding

    def moved(arguments: Arguments) -> int:  # candidates alone are read
        q, weight, cache, *_ = arguments
        rows, page = cast("Tensor", q).shape[0], cast("PagedCache", cache)
        kept = 8 * (candidates - candidates // 5)
        whole = num_bytes(page.codes, page.scales)
        each = whole // (page.codes.shape[0] * page.codes.shape[1])
        return num_bytes(q, weight) + min(rows * kept * each, whole) + 2 * rows * candidates * 8

    return Case(
        op="paged_index_score",
        name=name,
        build=build,
        take=_take,
        row_flops=2 * heads * dim * (8 * candidates or entries),
        tolerance={"reference": 4e-2, "final": 2e-6, "none": 2e-6}[rounding],
        large=bool(timed),
        moved=moved if timed and candidates else None,
        timed=timed,
    )


def _take(arguments: Arguments, index: Tensor) -> Arguments:
    taken = list(arguments)
    for place in (0, 1, 4, 5, 6):
        if taken[place] is not None:
            taken[place] = cast("Tensor", taken[place]).index_select(0, index)
    return tuple(taken)


CASES: Final = (
    _case("pages", 4, 128, 16, 40, "reference"),
    _case("one page", 3, 64, 32, 30, "final"),
    _case("candidates", 4, 128, 16, 90, "final", candidates=6),
    _case("strict, candidates", 3, 96, 24, 70, "none", "fp32", candidates=5),
    _case("real", 32, 128, 128, 65536, "final", timed=(6, 192, 768)),
    _case("real, candidates", 32, 128, 128, 131072, "final", candidates=2048, timed=(6, 768)),
)
