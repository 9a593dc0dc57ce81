"""Choosing tokens on a card; `sampling/sampler.py` holds the definition of draws."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

__all__ = ["largest"]


def largest(values: Tensor, plus: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the id of the largest of each row, the lowest on ties, and which rows are bad.

    values   [N, V] fp32, plus [N, V] fp32 added to it
    returns  ids [N] int64, any where a row has NaN; bad [N] bool: some value is not finite
    """
    if values.device.type == "cuda" and find_spec("triton"):
        from deepinfer.kernels.draw import triton

        return triton.largest(values, plus)
    total = values if plus is None else values + plus
    return total.argmax(dim=-1), ~torch.isfinite(total).all(dim=-1)
