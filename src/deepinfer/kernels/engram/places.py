"""N-grams of a step's tokens, the first of which may reach back into earlier steps."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

__all__ = ["gather_ngrams", "keep_ids"]


def gather_ngrams(
    ids: Tensor, token_map: Tensor, ring: Tensor, load: Tensor, rows: Tensor, pad: int
) -> Tensor:
    """Return the compressed ids [T, G] int64 of each row's token and those before it.

    ids        [N] int64 tokens of the step, token_map [vocab] int64 their compressed ids
    ring       [S, L] int32 compressed ids of earlier tokens
    load       [H] int64 places of the ring, slot * L + entry, -1 = none: `pad`
    rows       [T, G] int64 into [loads | tokens]
    """
    if ids.device.type == "cuda" and find_spec("triton"):
        from deepinfer.kernels.engram import triton

        return triton.gather_ngrams(ids, token_map, ring, load, rows, pad)
    length, held = ring.shape[1], load.clamp(min=0)
    before = ring[held // length, held % length].to(torch.int64).masked_fill(load < 0, pad)
    return torch.cat([before, token_map[ids]])[rows]


def keep_ids(ids: Tensor, token_map: Tensor, ring: Tensor, store: Tensor, rows: Tensor) -> None:
    """Put the compressed ids of rows [m] into the ring's places store [m]; after the gather.

    Places named twice get any of theirs.
    """
    if ids.device.type == "cuda" and find_spec("triton"):
        from deepinfer.kernels.engram import triton

        triton.keep_ids(ids, token_map, ring, store, rows)
        return
    length = ring.shape[1]
    ring[store // length, store % length] = token_map[ids[rows]].to(ring.dtype)
