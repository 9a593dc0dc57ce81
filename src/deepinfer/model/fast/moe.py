"""Routed experts and the shared expert of one block."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.model.fast.step import Pass
from deepinfer.model.fast.weights import MoeWeights

__all__ = ["moe"]


def moe(step: Pass, weights: MoeWeights, x: Tensor, num_active: int) -> Tensor:
    """Run the experts on x [T, C]; returns [T, C].

    Rows are sorted by expert; each token's terms add up in fp32 in ascending expert order, the
    shared expert last.
    """
    ops, config, quantize = step.ops, step.config, step.numerics.quantize
    chosen, weight = ops.route(
        x, weights.gate, weights.bias, num_active, config.routed_scaling_factor
    )
    step.note("route_idx", chosen.int())
    step.note("route_weight", weight)
    flat = chosen.flatten()
    order = torch.sort(flat, stable=True).indices
    offsets = torch.bincount(flat, minlength=weights.bias.shape[0]).cumsum(0).tolist()
    offsets = [0, *offsets]
    rows = order // num_active
    limit = config.swiglu_limit
    grouped = x[rows]
    if quantize:
        grouped = ops.round_trip(grouped, "act8")
    gate = ops.expert_linear(grouped, weights.w1, offsets, False)
    up = ops.expert_linear(grouped, weights.w3, offsets, False)
    hidden = ops.swiglu(gate, up, limit, weight.flatten()[order])
    routed = ops.expert_linear(hidden, weights.w2, offsets, quantize)
    by_token = torch.sort(chosen, dim=1).indices + torch.arange(
        0, flat.shape[0], num_active, device=x.device
    ).unsqueeze(1)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.shape[0], device=x.device)
    terms = routed[place[by_token.flatten()]].view(x.shape[0], num_active, -1).float()
    total = terms[:, 0]
    for term in range(1, num_active):
        total = total + terms[:, term]
    shared_in = ops.round_trip(x, "act8") if quantize else x
    gate = ops.fp8_linear(shared_in, weights.shared_w1, False)
    up = ops.fp8_linear(shared_in, weights.shared_w3, False)
    shared = ops.fp8_linear(ops.swiglu(gate, up, limit, None), weights.shared_w2, quantize)
    return (total + shared.float()).to(x.dtype)
