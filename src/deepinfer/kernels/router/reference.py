"""Routing in plain torch."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from deepinfer.kernels.linear import DenseWeight
from deepinfer.kernels.quantize.reference import round_trip
from deepinfer.kernels.rows import matmul_rows, sum_in_order

EPS: Final = 1e-20  # of the weights' sum; equals rms_norm_eps by accident


def route(
    x: Tensor, gate: DenseWeight, bias: Tensor, num_active: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """sqrt(softplus) scores, biased selection, normalized unbiased weights."""
    logits = matmul_rows(x.float(), gate.fp32())
    scores = torch.sqrt(torch.where(logits > 20.0, logits, torch.log1p(torch.exp(logits))))
    order = (scores + bias).sort(dim=-1, descending=True, stable=True).indices
    chosen = order[:, :num_active]
    weights = scores.gather(1, chosen)
    weights = weights / (sum_in_order(weights, 1).unsqueeze(1) + EPS)
    return chosen, weights * scaling


def route_rounded(
    x: Tensor, gate: DenseWeight, bias: Tensor, num_active: int, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Route, round."""
    return *route(x, gate, bias, num_active, scaling), round_trip(x, "act8")
