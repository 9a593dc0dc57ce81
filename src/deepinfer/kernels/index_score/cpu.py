"""Index scores of few rows on a CPU: products and roundings are torch's, the rest numpy's."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.kernels.index_score import reference
from deepinfer.kernels.index_score.reference import KEY_BLOCK
from deepinfer.kernels.rows import ROW_BLOCK


def index_score(q: Tensor, weight: Tensor, keys: Tensor, rounding: str) -> Tensor:
    """As the reference, to the sign of zero: numpy's maximum and sums would lose it."""
    num_rows, num_heads, _ = q.shape
    num_keys = keys.shape[-2]
    if num_rows > ROW_BLOCK or num_heads % 4:
        return reference.index_score(q, weight, keys, rounding)
    if num_keys % KEY_BLOCK:
        keys = F.pad(keys, (0, 0, 0, -num_keys % KEY_BLOCK))
    if keys.ndim == 2:
        keys = keys.expand(num_rows, -1, -1)
    queries, columns = q.float(), keys.transpose(1, 2)
    if num_keys <= KEY_BLOCK:
        dots = torch.bmm(queries, columns)
    else:
        blocks = torch.split(columns, KEY_BLOCK, dim=2)
        dots = torch.cat([torch.bmm(queries, block) for block in blocks], dim=2)
    factor, scores = weight.float().numpy()[..., None], dots.numpy()
    stepwise = rounding == "reference"
    if stepwise:
        dots.copy_(dots.bfloat16())
    dots.clamp_(min=0.0)
    np.multiply(scores, factor, scores)
    if stepwise:
        dots.copy_(dots.bfloat16())
    first = scores[:, 0]
    for head in range(1, num_heads):
        np.add(first, scores[:, head], first)
    sums = dots[:, 0, :num_keys]
    return sums if rounding == "none" else sums.bfloat16().float()
