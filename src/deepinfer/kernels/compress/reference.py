"""Pooling in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.rows import sum_in_order


def compress(kv: Tensor, gate: Tensor, ratio: int) -> Tensor:
    """Softmax over the run, per channel, then the weighted sum."""
    values, gates = (torch.unflatten(t, 0, (-1, ratio)) for t in (kv, gate))
    exps = torch.exp(gates - gates.amax(1, keepdim=True))
    weights = exps / sum_in_order(exps, 1).unsqueeze(1)
    return sum_in_order(weights * values, 1)
