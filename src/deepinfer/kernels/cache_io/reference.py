"""Cache entries in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.kernels.quantize import (
    act4_e4,
    act4_e8,
    act8,
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    repeat_groups,
)

if TYPE_CHECKING:
    from deepinfer.kernels.cache_io import PagedCache


def cache_store(cache: PagedCache, values: Tensor, idx: Tensor) -> None:
    """Quantize by the format, then scatter codes and scales."""
    kept = idx >= 0
    if not bool(kept.all()):
        values, idx = values[kept], idx[kept]
        if not idx.shape[0]:
            return
    entries = cache.codes.shape[1]
    block, offset = idx // entries, idx % entries
    if cache.scales is None:
        cache.codes[block, offset] = values.float()
        return
    if cache.format == "window_fp8":
        codes, scales = act8(values)
        codes = codes.view(torch.uint8)
    elif cache.format == "main_fp4":
        codes, scales = act4_e4(values)
    else:
        codes, scales = act4_e8(values)
    cache.codes[block, offset] = codes
    cache.scales[block, offset] = scales
    if cache.dense is not None:
        cache.keep(block, offset, _decode(cache, codes, scales))


def cache_load(cache: PagedCache, idx: Tensor) -> Tensor:
    """Gather, decode, scale, blank what is absent."""
    entries = cache.codes.shape[1]
    absent = idx < 0
    held = idx.clamp(min=0)
    dense = cache.codes if cache.scales is None else cache.dense
    if cache.twice is not None:
        place = held + held // entries * entries
        values = cache.twice.view(-1, cache.dim).index_select(0, place)
    elif dense is not None and dense.is_contiguous():
        values = dense.view(-1, cache.dim).index_select(0, held)
    else:
        block, offset = held // entries, held % entries
        if dense is not None:
            values = dense[block, offset]
        else:
            assert cache.scales is not None
            values = _decode(cache, cache.codes[block, offset], cache.scales[block, offset])
    return values.masked_fill_(absent.unsqueeze(-1), 0.0) if bool(absent.any()) else values


def _decode(cache: PagedCache, codes: Tensor, scales: Tensor) -> Tensor:
    """Return gathered entries [n, D] fp32."""
    if cache.format == "window_fp8":
        return repeat_groups(decode_e4m3(codes), decode_ue8m0(scales))
    if cache.format == "main_fp4":
        return repeat_groups(decode_e2m1(codes), decode_e4m3(scales))
    return repeat_groups(decode_e2m1(codes), decode_ue8m0(scales))
