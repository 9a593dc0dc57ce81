"""Inputs of loads from paged caches; stores are tested with them."""

from __future__ import annotations

from typing import Final

import torch

from deepinfer.kernels.cache_io import CacheFormat, PagedCache
from deepinfer.kernels.cache_io.reference import cache_store
from deepinfer.kernels.cases import Arguments, Case, normal

__all__ = ["CASES"]

_SIZES: Final[dict[str, tuple[int, int]]] = {  # format -> values per code byte and per scale byte
    "window_fp8": (1, 32),
    "main_fp4": (2, 16),
    "index_fp4": (2, 32),
}


def empty_cache(
    form: CacheFormat, blocks: int, entries: int, dim: int, *, dense: bool, split: bool
) -> PagedCache:
    """Allocate a cache of zeros.

    dense  keep decoded entries
    split  all scales of a block behind all its codes, else each entry's scales behind its codes
    """
    if form == "fp32":
        return PagedCache(torch.zeros(blocks, entries, dim), None, form, dim)
    per_code, per_scale = _SIZES[form]
    code_bytes, scale_bytes = dim // per_code, dim // per_scale
    pool = torch.zeros(blocks, entries * (code_bytes + scale_bytes), dtype=torch.uint8)
    if split:
        cut = entries * code_bytes
        codes = torch.unflatten(pool[:, :cut], 1, (entries, code_bytes))
        scales = torch.unflatten(pool[:, cut:], 1, (entries, scale_bytes))
    else:
        joined = torch.unflatten(pool, 1, (entries, code_bytes + scale_bytes))
        codes, scales = joined[..., :code_bytes], joined[..., code_bytes:]
    kept = torch.zeros(blocks, entries, dim) if dense else None
    return PagedCache(codes, scales, form, dim, kept)


def _case(form: CacheFormat, dim: int, entries: int, dense: bool, split: bool = False) -> Case:
    blocks = 5

    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        cache = empty_cache(form, blocks, entries, dim, dense=dense, split=split)
        values = normal(generator, blocks * entries, dim)
        cache_store(cache, values, torch.arange(blocks * entries))
        return cache, torch.randint(-1, blocks * entries, (num_rows,), generator=generator)

    name = f"{form} {dim}{' decoded' if dense else ''}{' split' if split else ''}"
    return Case(op="cache_load", name=name, build=build, rows=(1,), tolerance=0.0)


CASES: Final = (
    _case("window_fp8", 512, 134, False),
    _case("window_fp8", 512, 134, True),
    _case("main_fp4", 512, 64, False),
    _case("main_fp4", 128, 48, True),
    _case("index_fp4", 128, 64, False, split=True),
    _case("index_fp4", 64, 32, True, split=True),
    _case("fp32", 96, 32, False),
)
