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


def cache_load(cache: PagedCache, idx: Tensor) -> Tensor:
    """Gather, decode, scale, blank what is absent."""
    entries = cache.codes.shape[1]
    held = idx.clamp(min=0)
    block, offset = held // entries, held % entries
    codes = cache.codes[block, offset]
    if cache.scales is None:
        values = codes
    else:
        scales = cache.scales[block, offset]
        if cache.format == "window_fp8":
            values = repeat_groups(decode_e4m3(codes), decode_ue8m0(scales))
        elif cache.format == "main_fp4":
            values = repeat_groups(decode_e2m1(codes), decode_e4m3(scales))
        else:
            values = repeat_groups(decode_e2m1(codes), decode_ue8m0(scales))
    absent = idx < 0
    return values.masked_fill_(absent.unsqueeze(-1), 0.0) if bool(absent.any()) else values
