"""Inputs of attention to packed entries: both caches, absent entries, empty rows."""

from __future__ import annotations

from typing import Final

import torch

from deepinfer.kernels.cache_io import CacheFormat, PagedCache
from deepinfer.kernels.cache_io.cases import empty_cache
from deepinfer.kernels.cache_io.reference import cache_store
from deepinfer.kernels.cases import Arguments, Case, normal
from deepinfer.kernels.quantize import QuantFormat

__all__ = ["CASES"]


def _filled(
    form: CacheFormat, blocks: int, entries: int, dim: int, generator: torch.Generator
) -> PagedCache:
    cache = empty_cache(form, blocks, entries, dim, dense=False, split=False)
    for begin in range(0, blocks * entries, 1 << 16):
        idx = torch.arange(begin, min(begin + (1 << 16), blocks * entries))
        cache_store(cache, normal(generator, len(idx), dim), idx)
    return cache


def _case(
    name: str,
    heads: int,
    dim: int,
    window: int,
    selected: int,
    *,
    forms: tuple[CacheFormat, CacheFormat] = ("window_fp8", "main_fp4"),
    absent: float = 0.2,
    spread: float = 1.0,
    turned: int = 0,
    quantize: QuantFormat | None = None,
    timed: tuple[int, ...] = (),
) -> Case:
    """Every seventh row has no entry at all; the next none of the window. `turned` dims rotate and
    results are rounded to a format behind."""
    exact = "fp32" in forms
    window_blocks, main_blocks = (1024, 15625) if timed else (3, 5)

    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        def draw(total: int, slots: int, empty: int) -> torch.Tensor:
            idx = torch.randint(0, total, (num_rows, slots), generator=generator)
            missing = torch.rand(num_rows, slots, generator=generator) < absent
            if absent and not timed:
                missing[::7] = True
                missing[empty::7] = True
            return idx.masked_fill(missing, -1)

        q = normal(
            generator, num_rows, heads, dim, dtype=torch.float32 if exact else torch.bfloat16
        )
        sink = normal(generator, heads)
        rings = _filled(forms[0], window_blocks, 134, dim, generator)
        main, main_idx = None, None
        if selected:
            main = _filled(forms[1], main_blocks, 64, dim, generator)
            main_idx = draw(main_blocks * 64, selected, 2)
        window_idx = draw(window_blocks * 134, window, 1)
        angle = torch.rand(num_rows, turned // 2, generator=generator) * 6
        turns = (angle.cos(), angle.sin(), quantize) if turned else ()
        return q * spread, rings, window_idx, main, main_idx, sink, dim**-0.5, not exact, *turns

    def moved(arguments: Arguments) -> int:
        q, _, window_idx, _, main_idx, *_ = arguments
        assert isinstance(q, torch.Tensor) and isinstance(window_idx, torch.Tensor)
        entries = int((window_idx >= 0).sum()) * (dim + dim // 32)
        if isinstance(main_idx, torch.Tensor):
            entries += int((main_idx >= 0).sum()) * (dim // 2 + dim // 16)
        return entries + 2 * q.numel() * q.element_size()

    return Case(
        op="paged_attention",
        name=name,
        build=build,
        rows=(0, 2, 4, 8, 9),
        tolerance=1e-5 if exact else 8e-3,
        row_flops=4 * heads * dim * (window + selected),
        large=bool(timed),
        timed=timed,
        moved=moved,
    )


CASES: Final = (
    _case("window", 4, 64, 40, 0),
    _case("both", 4, 64, 48, 24),
    _case("all present", 3, 64, 64, 16, absent=0.0),
    _case("steep", 2, 64, 70, 20, spread=12.0),
    _case("strict", 3, 64, 50, 17, forms=("fp32", "fp32"), absent=0.3),
    _case("turned", 3, 64, 48, 24, turned=32),
    _case("real decode", 64, 512, 128, 512, absent=0.01, timed=(32, 192, 768)),
    _case("real prefill", 64, 512, 128, 512, absent=0.0, timed=(4096,)),
)
