"""The attention sublayer: window, selected compressed entries, output projection."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.config import LayerConfig
from deepinfer.kernels.cache_io import PagedCache
from deepinfer.model.fast.compressor import compress_step
from deepinfer.model.fast.indexer import gather_selected, select
from deepinfer.model.fast.step import Pass, Rotation, Step
from deepinfer.model.fast.weights import AttentionWeights, BlockWeights

__all__ = ["attention", "project_kv", "project_output", "project_queries"]


def project_queries(
    step: Pass, weights: AttentionWeights, x: Tensor, compressed: bool
) -> tuple[Tensor, Tensor]:
    """Return the query latent [T, rank] and the rotated queries [T, H, D].

    x is already quantized and dequantized where the arithmetic asks for it.
    """
    ops, config = step.ops, step.config
    latent = ops.fp8_linear(x, weights.wq_a, False)
    latent = ops.rms_norm(latent, weights.q_norm, config.rms_norm_eps)
    q = ops.fp8_linear(latent, weights.wq_b, step.numerics.quantize)
    q = torch.unflatten(q, -1, (config.num_attention_heads, config.head_dim))
    cos, sin = step.rotation[compressed]
    return latent, ops.rotate_tail(q, cos, sin)


def project_kv(step: Pass, weights: AttentionWeights, x: Tensor, rotation: Rotation) -> Tensor:
    """Return one rotated, unquantized window entry per row, [T, D]; x as in `project_queries`."""
    ops = step.ops
    kv = ops.fp8_linear(x, weights.wkv, False)
    kv = ops.rms_norm(kv, weights.kv_norm, step.config.rms_norm_eps)
    return ops.rotate_tail(kv, *rotation)


def project_output(
    step: Pass, weights: AttentionWeights, out: Tensor, rotation: Rotation
) -> Tensor:
    """Rotate outputs [T, H, D] back and project them to [T, C]."""
    ops, config = step.ops, step.config
    out = ops.rotate_tail(out, *rotation, inverse=True)
    grouped = out.reshape(out.shape[0], config.o_groups, -1)
    latent = ops.grouped_linear(grouped, weights.wo_a, step.numerics.fp8_output)
    return ops.fp8_linear(latent, weights.wo_b, step.numerics.quantize)


def attention(step: Step, layer: LayerConfig, block: BlockWeights, x: Tensor) -> Tensor:
    """Attend x [T, C] to its window and its selected entries; returns [T, C].

    Prefill reads the ring before the step's rows enter it; decode stores first and then reads.
    """
    ops, config, weights = step.ops, step.config, block.attention
    compressed = layer.ratio > 0
    rotation = step.rotation[compressed]
    quantized = step.act_quantized(x, "act8")
    latent, q = project_queries(step, weights, quantized, compressed)
    kv = project_kv(step, weights, quantized, rotation)
    window_kv, window_idx = read_window(step, step.caches.windows[layer.layer_id], kv)
    main_kv = main_idx = None
    if layer.kv_source is not None and layer.index_source is not None:
        if block.compressor is not None:
            compress_step(step, layer, block.compressor, x)
        if block.indexer is not None:
            select(step, layer, block.indexer, latent, x)
        main_kv, main_idx = gather_selected(step, layer.kv_source, layer.index_source)
    out = ops.sparse_attention(
        q,
        window_kv,
        window_idx,
        main_kv,
        main_idx,
        weights.attn_sink,
        config.head_dim**-0.5,
        step.numerics.quantize,
    )
    return project_output(step, weights, out, rotation)


def read_window(step: Step, cache: PagedCache, kv: Tensor) -> tuple[Tensor, Tensor]:
    """Store the rows' entries kv [T, D]; return entries [N, D] fp32 and indices [T, W]."""
    ops, inputs = step.ops, step.inputs
    if inputs.decode:
        ops.cache_store(cache, kv, inputs.window_store)
        slots = inputs.window_slots
        loaded = ops.cache_load(cache, slots.flatten())
        index = torch.arange(slots.numel(), device=slots.device).view_as(slots)
        return loaded, index.masked_fill(slots < 0, -1)
    history = ops.cache_load(cache, inputs.window_load)
    ops.cache_store(cache, kv, inputs.window_store)
    new = step.act_quantized(kv, "act8").float()
    return torch.cat([history, new]), inputs.window_slots
