"""Routing on a CPU: few numbers sorted in numpy; exponential, logarithm and root are torch's."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels.linear import DenseWeight
from deepinfer.kernels.router import reference
from deepinfer.kernels.rows import ROW_BLOCK
from deepinfer.kernels.workspace import kept_rows, multiply


def route(
    x: Tensor, gate: DenseWeight, bias: Tensor, num_active: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """As the reference."""
    num_rows, width = x.shape
    if num_rows > ROW_BLOCK:
        return reference.route(x, gate, bias, num_active, scaling)
    rows = kept_rows(num_rows, width)
    rows.tensor.copy_(x)
    result = multiply(rows, gate.fp32())
    logits = result.tensor
    soft = torch.log1p(torch.exp(logits))
    scores = torch.sqrt(torch.where(logits > 20.0, logits, soft)).numpy()
    order = np.argsort(-(scores + bias.numpy()), axis=-1, kind="stable")
    chosen = np.ascontiguousarray(order[:, :num_active])
    weights = np.take_along_axis(scores, chosen, 1)
    total = weights[:, 0]
    for column in range(1, num_active):
        total = total + weights[:, column]
    weights = weights / (total + np.float32(reference.EPS))[:, None] * np.float32(scaling)
    return torch.from_numpy(chosen), torch.from_numpy(weights)
