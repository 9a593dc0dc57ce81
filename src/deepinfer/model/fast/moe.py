"""Routed experts and the shared expert of one block."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.kernels.expert_linear.fused import experts, fits
from deepinfer.kernels.rows import sum_in_order
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
    if ops.choices["expert_linear"].name == "cpu" and fits(x, weights.w2, weights.shared_w2):
        return experts(
            x,
            chosen,
            weight,
            weights.w1_w3,
            weights.w2,
            weights.shared_w1_w3,
            weights.shared_w2,
            config.swiglu_limit,
            quantize,
        )
    num_rows, num_experts = x.shape[0], weights.bias.shape[0]
    offsets, order, place = _sort_by_expert(chosen.cpu().numpy(), num_experts)
    device = x.device
    quantized = step.act_quantized(x, "act8")
    grouped = quantized[torch.from_numpy(order // num_active).to(device)]
    routed = _expert(
        step,
        ops.expert_linear(grouped, weights.w1_w3, offsets, False),
        weight.flatten()[torch.from_numpy(order).to(device)],
    )
    routed = ops.expert_linear(routed, weights.w2, offsets, quantize)
    terms = routed[torch.from_numpy(place).to(device)].float().view(num_rows, num_active, -1)
    total = sum_in_order(terms, 1)
    shared = _expert(step, ops.fp8_linear(quantized, weights.shared_w1_w3, False), None)
    shared = ops.fp8_linear(shared, weights.shared_w2, quantize)
    return (total + shared.float()).to(x.dtype)


def _expert(step: Pass, gate_up: Tensor, weight: Tensor | None) -> Tensor:
    """Join gate and up, stacked in the last dimension."""
    gate, up = gate_up.chunk(2, dim=-1)
    return step.ops.swiglu(gate, up, step.config.swiglu_limit, weight)


def _sort_by_expert(
    chosen: NDArray[np.int64], num_experts: int
) -> tuple[list[int], NDArray[np.int64], NDArray[np.int64]]:
    """Sort the choices [T, k], counted row by row, by expert.

    Returns where each expert's run begins (E+1), the sorted choices, and for each row the places
    of its choices in ascending expert order.
    """
    num_rows, num_active = chosen.shape
    flat = chosen.ravel()
    order = np.argsort(flat, kind="stable")
    counts = np.bincount(flat, minlength=num_experts)
    offsets = [0, *np.cumsum(counts).tolist()]
    place = np.empty_like(order)
    place[order] = np.arange(order.shape[0])
    ascending = np.argsort(chosen, axis=1) + np.arange(num_rows)[:, None] * num_active
    return offsets, order, place[ascending.ravel()]
