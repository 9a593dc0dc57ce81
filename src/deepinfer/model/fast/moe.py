"""Routed experts and the shared expert of one block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.kernels.expert_linear.fused import experts, fits
from deepinfer.kernels.grouping import Terms, group, whole
from deepinfer.model.fast.step import Pass
from deepinfer.model.fast.weights import MoeWeights
from deepinfer.parallel.experts import LayerExperts, Pending

__all__ = ["moe", "moe_terms", "serve_experts"]


def moe(step: Pass, weights: MoeWeights, x: Tensor, num_active: int) -> Tensor:
    """Run the experts on x [T, C]; returns [T, C]."""
    return whole(moe_terms(step, weights, x, num_active))


def moe_terms(
    step: Pass, weights: MoeWeights, x: Tensor, num_active: int, rounded: Tensor | None = None
) -> Tensor | Terms:
    """Run the experts on x [T, C]; returns [T, C], or what is to be added up to it.

    rounded  x rounded with ACT8, where that is done already
    Rows are sorted by expert; each token's terms add up in fp32 in ascending expert order, the
    shared expert last.
    """
    ops, config, quantize = step.ops, step.config, step.numerics.quantize
    given = x, weights.gate, weights.bias, num_active, config.routed_scaling_factor
    quantized = x
    shared: Callable[[], Tensor] | None = None
    if rounded is not None:
        quantized = rounded
        if weights.ranks is None or step.branches:
            shared = step.beside(lambda: _shared(step, weights, rounded))
        if weights.ranks is not None and step.trace is None:
            sent = weights.ranks.route(ops, *given, step.live)
            return _ranked(step, weights, weights.ranks, rounded, *sent, shared)
        chosen, weight = ops.route(*given)
    elif quantize and step.fuses:
        chosen, weight, quantized = ops.route_rounded(*given)
    else:
        chosen, weight = ops.route(*given)
    if step.trace is not None:
        step.note("route_idx", chosen.int())
        step.note("route_weight", weight)
    if weights.ranks is not None:
        if quantized is x:
            quantized = step.act_quantized(x, "act8")
        sent = weights.ranks.choose(chosen, weight, step.live)
        return _ranked(step, weights, weights.ranks, quantized, *sent, shared)
    held = weights.w2.codes.shape[0]
    whole = held == weights.bias.shape[0]
    if not whole:  # a slice of the experts stands for all; a row may take one of them twice
        chosen = chosen % held
    fused = whole and ops.choices["expert_linear"].name == "cpu"
    if fused and fits(x, weights.w2, weights.shared_w2):
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
    groups = group(chosen, weight, held, step.live)
    if quantized is x:
        quantized = step.act_quantized(x, "act8")
    routed = ops.routed_experts(
        quantized,
        groups.rows,
        groups.weights,
        groups.offsets,
        weights.w1_w3,
        weights.w2,
        config.swiglu_limit,
        quantize,
    )
    own = _shared(step, weights, quantized) if shared is None else shared()
    return Terms(routed, groups.place, own)


def serve_experts(step: Pass, weights: MoeWeights, num_active: int) -> None:
    """Take part in a layer without rows of its own: run the rows that other ranks send."""
    if weights.ranks is None:
        return
    gate = weights.gate.stored
    x = torch.empty(0, gate.shape[1], dtype=step.numerics.dtype, device=gate.device)
    chosen = torch.empty(0, num_active, dtype=torch.int64, device=gate.device)
    weight = torch.empty(0, num_active, device=gate.device)
    slots, weight, _ = weights.ranks.choose(chosen, weight)
    pending = weights.ranks.dispatch(x, slots, weight)
    _serve(step, weights, weights.ranks, pending)


def _ranked(
    step: Pass,
    weights: MoeWeights,
    ranks: LayerExperts,
    quantized: Tensor,
    slots: Tensor,
    weight: Tensor,
    places: Tensor,
    shared: Callable[[], Tensor] | None,
) -> Terms:
    """Run experts that other ranks hold as well; the shared expert runs while rows travel.

    slots, weight, places  as `LayerExperts.choose` returns them
    shared                 what it returns, where it runs already

    Every choice's row comes back unsummed, and the sum is that of one process. Rounding twice with
    ACT8 changes nothing, so a back end that rounds as it packs takes rounded rows, too.
    """
    pending = ranks.dispatch(quantized, slots, weight)
    own = None if shared is not None else _shared(step, weights, quantized)
    terms = _serve(step, weights, ranks, pending)
    if own is None and shared is not None:
        own = shared()
    assert own is not None
    return Terms(terms.flatten(0, 1), places, own)


def _serve(step: Pass, weights: MoeWeights, ranks: LayerExperts, pending: Pending) -> Tensor:
    """Run the rows that came for this rank's experts; return those of its own tokens [T, k, C]."""
    ops, found = step.ops, pending.wait()
    if not found.rows.shape[0]:
        return ranks.exchange.combine(pending, found.values[:0])
    routed = ops.routed_experts(
        found.values,
        found.rows,
        found.weight,
        found.offsets,
        weights.w1_w3,
        weights.w2,
        step.config.swiglu_limit,
        step.numerics.quantize,
    )
    return ranks.exchange.combine(pending, routed)


def _shared(step: Pass, weights: MoeWeights, quantized: Tensor) -> Tensor:
    """Run the shared expert."""
    ops, quantize = step.ops, step.numerics.quantize
    gate, up = ops.fp8_linear(quantized, weights.shared_w1_w3, False).chunk(2, dim=-1)
    if step.fuses:
        hidden = ops.swiglu(gate, up, step.config.swiglu_limit, None, quantize)
        return ops.fp8_linear(hidden, weights.shared_w2, False)
    hidden = ops.swiglu(gate, up, step.config.swiglu_limit, None)
    return ops.fp8_linear(hidden, weights.shared_w2, quantize)
