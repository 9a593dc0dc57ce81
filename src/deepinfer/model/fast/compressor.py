"""Compressed entries and index keys of a layer that owns them."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.config import LayerConfig
from deepinfer.kernels.pool_pairs import keep_tail, pool_pairs
from deepinfer.model.fast.step import Step
from deepinfer.model.fast.weights import CompressorWeights

__all__ = ["compress_step"]


def compress_step(step: Step, layer: LayerConfig, weights: CompressorWeights, x: Tensor) -> None:
    """Pool the groups that this step completes and store their entries and index keys.

    x [T, C] is the normed input of the sublayer. A group may begin in an earlier step: its first
    token's projections then come from the tail ring, which keeps them in fp32.
    """
    ops, config, inputs, caches = step.ops, step.config, step.inputs, step.caches
    ratio, context = inputs.ratios[layer.ratio], inputs.context
    shared = None if context is None else context.entries.get(layer.ratio)
    normed = False
    if weights.wgate is None:
        pooled = ops.dense_linear(x, weights.wkv, x.dtype)
        if ratio.emit_rows.shape[0] != x.shape[0]:
            pooled = pooled[ratio.emit_rows]
    elif step.fuses and context is None:
        pooled, normed = _pool_directly(step, layer, weights, x), True
    else:
        pooled = _pool(step, layer, weights, x).to(x.dtype)
    if not ratio.emit_entries.shape[0]:
        return
    latent = pooled
    if pooled.shape[0] and not normed:
        latent = ops.rms_norm(pooled, weights.norm, config.rms_norm_eps)
    if shared is not None:
        latent = shared(latent)
    cos, sin = step.emit_rotation[layer.ratio]
    key = ops.dense_linear(latent, weights.index_wk, x.dtype)
    eps, entries = config.rms_norm_eps, ratio.emit_entries
    index, main = caches.index[layer.layer_id], caches.main[layer.layer_id]
    if step.fuses:
        ops.entry_store(key, weights.index_k_norm, cos, sin, eps, index, entries)
        ops.entry_store(latent, None, cos, sin, eps, main, entries)
        return
    key = ops.rotate_tail(ops.rms_norm(key, weights.index_k_norm, eps), cos, sin)
    ops.cache_store(index, key, entries)
    ops.cache_store(main, ops.rotate_tail(latent, cos, sin), entries)


def _pool_directly(step: Step, layer: LayerConfig, weights: CompressorWeights, x: Tensor) -> Tensor:
    """As `_pool` and the norm behind it, in few launches."""
    ops, inputs = step.ops, step.inputs
    assert weights.wgate is not None and inputs.tail is not None and layer.ratio == 2
    if weights.wgate_wkv is not None:
        gate, value = ops.dense_linear(x, weights.wgate_wkv, torch.float32).chunk(2, dim=1)
    else:
        gate, value = (
            ops.dense_linear(x, weight, torch.float32) for weight in (weights.wgate, weights.wkv)
        )
    ring, tail = step.caches.tails[layer.layer_id], inputs.tail
    emit, eps = inputs.ratios[2].emit_rows, step.config.rms_norm_eps
    pooled = pool_pairs(gate, value, ring, tail.load, tail.rows, emit, weights.norm, eps, x.dtype)
    keep_tail(gate, value, ring, tail.store, tail.store_rows)
    return pooled


def _pool(step: Step, layer: LayerConfig, weights: CompressorWeights, x: Tensor) -> Tensor:
    """Pool pairs of rows, [groups, D] fp32, and put the last rows into the tail ring."""
    ops, inputs = step.ops, step.inputs
    assert weights.wgate is not None and inputs.tail is not None and layer.ratio == 2
    value = ops.dense_linear(x, weights.wkv, torch.float32)
    gate = ops.dense_linear(x, weights.wgate, torch.float32)
    new = torch.stack([gate, value], dim=1)  # [T, 2, D]
    context = inputs.context
    if context is not None and context.projections is not None:
        new = context.projections(new)
    ring = step.caches.tails[layer.layer_id]
    length = ring.shape[1]
    load = inputs.tail.load.clamp(min=0)
    history = torch.cat([ring[load // length, load % length], new])
    pairs = history[inputs.tail.rows[inputs.ratios[2].emit_rows].flip(1)]  # [n, 2 tokens, 2, D]
    target = inputs.tail.store
    tails = None if context is None else context.tails
    kept = new[inputs.tail.store_rows] if tails is None else tails(new)
    ring[target // length, target % length] = kept
    flat = pairs.flatten(0, 1)
    return ops.compress(flat[:, 1].contiguous(), flat[:, 0].contiguous(), 2)
