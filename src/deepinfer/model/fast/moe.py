"""Routed experts and the shared expert of one block."""

from __future__ import annotations

from torch import Tensor

from deepinfer.kernels.expert_linear.fused import experts, fits
from deepinfer.kernels.grouping import combine, group
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
    held = weights.w2.codes.shape[0]
    if held < weights.bias.shape[0]:  # a slice of the experts stands for all
        chosen = chosen % held
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
    groups = group(chosen, weight, held)
    quantized = step.act_quantized(x, "act8")
    routed = _expert(
        step,
        ops.expert_linear(quantized[groups.rows], weights.w1_w3, groups.offsets, False),
        groups.weights,
    )
    routed = ops.expert_linear(routed, weights.w2, groups.offsets, quantize)
    shared = _expert(step, ops.fp8_linear(quantized, weights.shared_w1_w3, False), None)
    shared = ops.fp8_linear(shared, weights.shared_w2, quantize)
    return combine(routed, groups.place, shared)


def _expert(step: Pass, gate_up: Tensor, weight: Tensor | None) -> Tensor:
    """Join gate and up, stacked in the last dimension."""
    gate, up = gate_up.chunk(2, dim=-1)
    return step.ops.swiglu(gate, up, step.config.swiglu_limit, weight)
