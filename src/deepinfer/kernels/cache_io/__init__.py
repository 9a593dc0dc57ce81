"""Storing to and loading from paged caches, in every cache format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from deepinfer.kernels.cache_io import reference
from deepinfer.kernels.contract import check

__all__ = ["CacheFormat", "PagedCache", "cache_load", "cache_store", "copy_entries"]

CacheFormat = Literal["window_fp8", "main_fp4", "index_fp4", "fp32"]


@dataclass(frozen=True, slots=True)
class PagedCache:
    """Views of a pool: entry j of a block, whatever the layout inside the block.

    codes   [blocks, entries, bytes] uint8, or [blocks, entries, D] fp32 for format "fp32"
    scales  [blocks, entries, bytes] uint8, None for "fp32"
    dense   [blocks, entries, D] fp32, the decoded entries, kept where memory allows: loading copies
            them instead of decoding
    twice   [blocks, 2 * entries, D] fp32 of a ring: `dense`, its first half, and the same again, so
            that any run of neighbours is one view
    Formats: window_fp8 = ACT8, main_fp4 = ACT4-E4, index_fp4 = ACT4-E8 (kernels/quantize).
    """

    codes: Tensor
    scales: Tensor | None
    format: CacheFormat
    dim: int
    dense: Tensor | None = None
    twice: Tensor | None = None

    def keep(self, block: Tensor, offset: Tensor, values: Tensor) -> None:
        """Write decoded entries [n, D] at block [n] and offset [n], where copies are kept."""
        if self.dense is not None:
            self.dense[block, offset] = values
        if self.twice is not None:
            self.twice[block, offset + self.codes.shape[1]] = values


def cache_store(
    cache: PagedCache,
    values: Tensor,
    idx: Tensor,
    *,
    impl: Callable[[PagedCache, Tensor, Tensor], None] = reference.cache_store,
) -> None:
    """Quantize values [n, D] into entries idx [n] int64 = block * entries + offset; -1 is skipped.

    No entry may be named twice.
    """
    check("cache_store", ("values", values, "n D"), ("idx", idx, "n"))
    if idx.shape[0]:
        impl(cache, values, idx)


def cache_load(
    cache: PagedCache,
    idx: Tensor,
    *,
    impl: Callable[[PagedCache, Tensor], Tensor] = reference.cache_load,
) -> Tensor:
    """Return entries idx [n] int64 dequantized, [n, D] fp32 (exact in bf16); zeros for -1."""
    check("cache_load", ("idx", idx, "n"))
    if not idx.shape[0]:
        return cache.codes.new_empty(0, cache.dim).float()
    return impl(cache, idx)


def copy_entries(
    source: PagedCache, idx: Tensor, target: PagedCache, places: Tensor | None
) -> None:
    """Copy entries idx [n] of one cache to entries places [n] of another, packed as they are.

    places  int64, no entry twice; None = 0, 1, ...
    Where either is -1 nothing is copied. Caches are of one quantized format, without decoded
    copies in the target.
    """
    assert source.scales is not None and target.scales is not None and target.dense is None
    if not idx.shape[0]:
        return
    if idx.device.type == "cuda" and find_spec("triton"):
        from deepinfer.kernels.cache_io import triton

        triton.copy_entries(source, idx, target, places)
        return
    if places is None:
        places = torch.arange(idx.shape[0], device=idx.device)
    there = (idx >= 0) & (places >= 0)
    from_, to = idx[there], places[there]
    held, room = source.codes.shape[1], target.codes.shape[1]
    for old, new in ((source.codes, target.codes), (source.scales, target.scales)):
        new[to // room, to % room] = old[from_ // held, from_ % held]
