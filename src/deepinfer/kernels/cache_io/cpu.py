"""Cache entries on a CPU: quantized by table, in numpy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels.cache_io import PagedCache, reference
from deepinfer.kernels.cache_io.reference import cache_load
from deepinfer.kernels.quantize.cpu import encode

__all__ = ["cache_load", "cache_store"]

_FORMATS = {"window_fp8": "act8", "main_fp4": "act4_e4", "index_fp4": "act4_e8"}


def cache_store(cache: PagedCache, values: Tensor, idx: Tensor) -> None:
    """As the reference."""
    if cache.scales is None or values.dtype != torch.bfloat16:
        reference.cache_store(cache, values, idx)
        return
    target = idx.numpy()
    codes, scales, decoded = encode(values, _FORMATS[cache.format])
    if target.min() < 0:
        kept = target >= 0
        target, codes, scales, decoded = target[kept], codes[kept], scales[kept], decoded[kept]
    block, offset = np.divmod(target, cache.codes.shape[1])
    cache.codes.numpy()[block, offset] = codes
    cache.scales.numpy()[block, offset] = scales
    for copies, start in ((cache.dense, 0), (cache.twice, cache.codes.shape[1])):
        if copies is not None:
            copies.numpy()[block, offset + start] = decoded
