"""Index scores in CUDA C++ for SM90a: FP4 keys decoded into registers, FP8 warp-group products.

`sm90.cu` says how. What its contract leaves out runs in Triton: other dimensions than 32 heads of
128, keys that are not FP4, queries in fp32, and the rounding of every part ("reference").
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from deepinfer.kernels import nvcc
from deepinfer.kernels.paged_index import triton

if TYPE_CHECKING:
    from deepinfer.kernels.cache_io import PagedCache

__all__ = ["accepts", "paged_index_score"]

SOURCE: Final = Path(__file__).with_name("sm90.cu")
TILE: Final = 64  # keys of one product
FEW_ROWS: Final = 8  # up to here pairs share a read: more of the card is busy
RESIDENT: Final = {1: 4, 2: 4, 4: 3, 6: 3, 8: 2}  # blocks of a multiprocessor, by rows
BEGIN: Final = 6  # what a block costs before its first product, in products


def _power(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def accepts(
    q: Tensor, weight: Tensor, cache: PagedCache, blocks: Tensor | None, size: int, rounding: str
) -> bool:
    """Whether the kernel takes a call: the published dimensions, FP4 entries of aligned pieces."""
    scales = cache.scales
    return (
        q.dtype == torch.bfloat16
        and tuple(q.shape[1:]) == (32, 128)
        and weight.dtype == torch.bfloat16
        and cache.format == "index_fp4"
        and scales is not None
        and rounding != "reference"
        and _power(cache.codes.shape[1])
        and cache.codes.stride(2) == scales.stride(2) == 1
        and all(n % 16 == 0 for n in (cache.codes.data_ptr(), *cache.codes.stride()[:2]))
        and all(n % 4 == 0 for n in (scales.data_ptr(), *scales.stride()[:2]))
        and (blocks is None or _power(size))
    )


def rows_each(num_rows: int, num_sequences: int) -> int:
    """How many neighbouring rows share a read of the keys.

    A guess that costs time only: rows of different sequences that meet in a group are scored one
    after the other. It depends on nothing that changes between replays of a recorded step.
    """
    most = -(-num_rows // max(1, num_sequences))
    return next(n for n in (1, 2, 4, 6, 8) if n >= min(most, 8 if num_rows > FEW_ROWS else 2))


@cache
def stretch(entries: int, groups: int, slots: int, unit: int, most: int) -> int:
    """How many entries a block takes so that the last round of blocks is nearly full.

    slots  blocks that run at the same time
    unit   the stretch is a multiple of it, and at most `most`
    """
    best, least = unit, math.inf
    for parts in range(1, max(2, min(256, -(-entries // unit) + 1))):
        size = -(-entries // (parts * unit)) * unit
        rounds = -(-(-(-entries // size) * groups) // slots)
        cost = rounds * (size // TILE + BEGIN)
        if size <= most and cost < least:
            best, least = size, cost
    return best


def paged_index_score(
    q: Tensor,
    weight: Tensor,
    cache: PagedCache,
    table: Tensor,
    rows: Tensor,
    visible: Tensor,
    blocks: Tensor | None,
    block_size: int,
    num_entries: int,
    rounding: str,
    *,
    each: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """As the reference, in bf16 where `rounding` is "final": the same values in half the bytes.

    each   rows that share a read of the keys, 1, 2, 4, 6 or 8
    chunk  entries of one block of threads: a multiple of 64; with candidates of 32 of their blocks,
           128 times that at most
    """
    if not accepts(q, weight, cache, blocks, block_size, rounding):
        return triton.paged_index_score(
            q, weight, cache, table, rows, visible, blocks, block_size, num_entries, rounding
        )
    assert cache.scales is not None
    num_rows, codes, scales = q.shape[0], cache.codes, cache.scales
    table = table if table.stride(1) == 1 else table.contiguous()
    num_blocks = 0 if blocks is None else blocks.shape[1]
    columns = num_entries if blocks is None else num_blocks * block_size
    dtype = torch.bfloat16 if rounding == "final" else torch.float32
    out = torch.empty(num_rows, -(-columns // 8) * 8, dtype=dtype, device=q.device)
    if not num_rows or not columns:
        return out[:, :columns]
    each = each or rows_each(num_rows, table.shape[0])
    groups = -(-num_rows // each)
    if chunk is None:
        unit = TILE if blocks is None else 32 * block_size  # whole words of a bitmap
        most = num_entries + unit if blocks is None else 64 * unit
        slots = nvcc.processors(q.device) * RESIDENT[each]
        chunk = stretch(num_entries, groups, slots, unit, most)
    q, weight, rows, visible = (x.contiguous() for x in (q, weight, rows, visible))
    nvcc.call(
        nvcc.load(SOURCE), "index_scores", q.device, q, weight,
        codes, codes.stride(0), codes.stride(1), scales, scales.stride(0), scales.stride(1),
        codes.shape[1].bit_length() - 1, table, table.stride(0), rows, visible,
        None if blocks is None else blocks.contiguous(), num_blocks, block_size.bit_length() - 1,
        out, out.element_size(), out.stride(0), num_rows, num_entries, each, chunk,
    )  # fmt: skip
    return out[:, :columns]
