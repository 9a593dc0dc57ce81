"""The attention sublayer: window, selected compressed entries, output projection."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deepinfer.config import LayerConfig
from deepinfer.kernels.attention.reference import SLOT_BLOCK
from deepinfer.kernels.cache_io import PagedCache, copy_entries
from deepinfer.kernels.paged_attention import reads_packed
from deepinfer.kernels.quantize import QuantFormat
from deepinfer.kernels.rows import ROW_BLOCK
from deepinfer.model.fast.compressor import compress_step
from deepinfer.model.fast.indexer import gather_selected, select, selected_entries
from deepinfer.model.fast.step import Pass, Rotation, Step
from deepinfer.model.fast.weights import AttentionWeights, BlockWeights

__all__ = [
    "attention",
    "project",
    "project_output",
    "rounds_outputs",
    "store_entries",
    "store_window",
]


Target = tuple[PagedCache, Tensor]
"""A cache, and which of its entries rows go to, [T] int64."""


def project(
    step: Pass,
    weights: AttentionWeights,
    x: Tensor,
    rotation: Rotation,
    into: Target | None = None,
    begin: Callable[[Tensor], None] | None = None,
    rounded: Tensor | None = None,
    apart: bool = False,
    turned: bool = True,
) -> tuple[Tensor, Callable[[], Tensor], Tensor | None]:
    """Return the query latent [T, rank], queries [T, H, D] and window entries [T, D] of x [T, C].

    Entries are rotated, not yet quantized; the latent is where ops fuse. What stands for the
    queries makes or awaits them.
    into     store the entries here instead of returning them
    begin    called with the entries before the queries are made
    rounded  x rounded with ACT8, where that is done already
    apart    queries are made beside what follows, where a step has branches
    turned   queries are rotated here; else attention does that
    """
    ops, config, quantize = step.ops, step.config, step.numerics.quantize
    given = (x, quantize) if rounded is None else (rounded, False)
    both = ops.fp8_linear(given[0], weights.wq_a_wkv, given[1])
    norms = weights.q_norm, weights.kv_norm
    kv: Tensor | None = None
    if step.fuses and into is not None:
        latent = ops.latent_store(both, *norms, *rotation, config.rms_norm_eps, quantize, *into)
    elif step.fuses:
        latent, kv = ops.latent_entry(both, *norms, *rotation, config.rms_norm_eps, quantize)
    else:
        latent = ops.rms_norm(both[:, : config.q_lora_rank], weights.q_norm, config.rms_norm_eps)
        kv = _entries(step, weights, both[:, config.q_lora_rank :], rotation)
        if into is not None:
            ops.cache_store(into[0], kv, into[1])
            kv = None
    if kv is not None and begin is not None:
        begin(kv)

    def queries() -> Tensor:
        q = ops.fp8_linear(latent, weights.wq_b, quantize and not step.fuses)
        q = torch.unflatten(q, -1, (config.num_attention_heads, config.head_dim))
        return ops.rotate_tail(q, *rotation, reuse=True) if turned else q

    if apart:
        return latent, step.beside(queries), kv
    made = queries()
    return latent, lambda: made, kv


def store_entries(
    step: Step, targets: Sequence[tuple[AttentionWeights, PagedCache]], x: Tensor
) -> None:
    """Store the window entries of x [T, C] only, of several sublayers of draft blocks."""
    ops, config, rotation = step.ops, step.config, step.rotation[False]
    if step.fuses:  # all of them take x rounded
        x = step.act_quantized(x, "act8")
    quantize = step.numerics.quantize and not step.fuses
    for weights, cache in targets:
        kv = ops.fp8_linear(x, weights.wq_a_wkv, quantize)[:, config.q_lora_rank :]
        if step.fuses and _stores_directly(step):
            ops.entry_store(
                kv, weights.kv_norm, *rotation, config.rms_norm_eps, cache, step.inputs.window_store
            )
        else:
            store_window(step, cache, shared_window(step, _entries(step, weights, kv, rotation)))


def _stores_directly(step: Step) -> bool:
    """Whether every row's entry goes to one place, which is this rank's."""
    return step.inputs.window_save is None and step.inputs.context is None


def _entries(step: Pass, weights: AttentionWeights, kv: Tensor, rotation: Rotation) -> Tensor:
    kv = step.ops.rms_norm(kv, weights.kv_norm, step.config.rms_norm_eps)
    return step.ops.rotate_tail(kv, *rotation)


def project_output(
    step: Pass, weights: AttentionWeights, out: Tensor, rotation: Rotation | None
) -> Tensor:
    """Rotate outputs [T, H, D] back, where no attention did, and project them to [T, C]."""
    ops, config = step.ops, step.config
    rounded = rounds_outputs(step)
    if rotation is not None:
        out = ops.rotate_tail(out, *rotation, inverse=True, reuse=True, quantize=rounded)
    grouped = out.reshape(out.shape[0], config.o_groups, -1)
    inputs = step.numerics.fp8_output and rounded is None
    quantize, fused = step.numerics.quantize, step.numerics.quantize and step.fuses
    latent = ops.grouped_linear(grouped, weights.wo_a, inputs, fused)
    return ops.fp8_linear(latent, weights.wo_b, quantize and not fused)


def rounds_outputs(step: Pass) -> QuantFormat | None:
    """Return what outputs are rounded to where they are rotated back."""
    return "act8" if step.fuses and step.numerics.fp8_output else None


def attention(
    step: Step, layer: LayerConfig, block: BlockWeights, x: Tensor, rounded: Tensor | None = None
) -> Tensor:
    """Attend x [T, C] to its window and its selected entries; returns [T, C].

    rounded  x rounded with ACT8, where that is done already
    Prefill reads the ring before the step's rows enter it; decode stores first and then reads.
    """
    ops, config, weights = step.ops, step.config, block.attention
    rotation = step.rotation[layer.ratio > 0]
    window = step.caches.windows[layer.layer_id]
    paged = step.inputs.paged and (step.inputs.decode or _reads_packed(step, window))
    into: Target | None = None
    if paged and step.inputs.decode and _stores_directly(step):
        into = window, step.inputs.window_store
    context = step.inputs.context  # ranks that share the step: entries travel behind the queries
    seen: Target | None = None
    whole = paged and not step.inputs.decode and context is None and window.dense is None
    if whole and step.fuses:
        seen = into = open_window(step, window)
    begin = None if context is None else context.window.begin
    compressed = layer.kv_source is not None and layer.index_source is not None
    compress: Callable[[], None] | None = None
    if compressed and block.compressor is not None and not step.compressed:
        compress = functools.partial(compress_step, step, layer, block.compressor, x)
        if step.branches:
            compress = step.beside(compress)
    apart = compress is None and block.indexer is not None
    latent, queries, kv = project(
        step, weights, x, rotation, into, begin, rounded, apart, not paged
    )
    if seen is not None:
        keep_window(step, window, seen)
        window = seen[0]
    elif kv is not None and paged and step.inputs.decode:
        store_window(step, window, kv)
    elif kv is not None and paged:
        window = pack_window(step, window, kv)
    elif kv is not None:
        window_kv, window_idx = read_window(step, window, kv)
    main_kv = main_idx = None
    if layer.kv_source is not None and layer.index_source is not None:
        if compress is not None:
            compress()
        if block.indexer is not None:
            select(step, layer, block.indexer, latent, x)
        if not paged:
            main_kv, main_idx = gather_selected(step, layer.kv_source, layer.index_source)
    q = queries()
    if paged:
        out = _attend_pages(step, layer, weights, q, window, rotation)
        return project_output(step, weights, out, None)
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


def _attend_pages(
    step: Step,
    layer: LayerConfig,
    weights: AttentionWeights,
    q: Tensor,
    window: PagedCache,
    rotation: Rotation,
) -> Tensor:
    """Attend to packed entries: the window's, and those in the pages of the layer's source.

    Queries are rotated on the way, and outputs rotated back and rounded.
    """
    main = main_idx = None
    if layer.kv_source is not None and layer.index_source is not None:
        main = step.caches.main[layer.kv_source]
        main_idx = selected_entries(step, layer.kv_source, layer.index_source)
    return step.ops.paged_attention(
        q,
        window,
        step.inputs.window_slots,
        main,
        main_idx,
        weights.attn_sink,
        step.config.head_dim**-0.5,
        step.numerics.quantize,
        *rotation,
        rounds_outputs(step),
    )


def store_window(step: Step, cache: PagedCache, kv: Tensor) -> None:
    """Put the rows' entries kv [T, D] into the rings of their slots, and of checkpoints.

    Where ranks share the step, rows are those of `shared_window`.
    """
    step.ops.cache_store(cache, kv, step.inputs.window_store)
    if step.inputs.window_save is not None:
        rows, entries = step.inputs.window_save
        step.ops.cache_store(cache, kv[rows], entries)


def shared_window(step: Step, kv: Tensor) -> Tensor:
    """Return the entries of the rows that this rank reads or keeps, given those of its own rows."""
    context = step.inputs.context
    return kv if context is None else context.window(kv)


def read_window(step: Step, cache: PagedCache, kv: Tensor) -> tuple[Tensor, Tensor]:
    """Store the rows' entries kv [T, D] and return what the rows see.

    Decode: entries [T, W, D] and ring entries [T, W], or rings [N, D] and indices [T, W] where a
    window can be read in place; prefill: entries [N, D] and indices [T, W].
    All fp32; absent slots are -1 in the second.
    """
    ops, inputs = step.ops, step.inputs
    if inputs.decode:
        ops.cache_store(cache, kv, inputs.window_store)
        if cache.twice is not None and _reads_runs(step) and inputs.window_runs is not None:
            return cache.twice.view(-1, cache.dim), inputs.window_runs
        slots = inputs.window_slots
        return ops.cache_load(cache, slots.flatten()).view(*slots.shape, cache.dim), slots
    history = ops.cache_load(cache, inputs.window_load)
    kv = shared_window(step, kv)
    store_window(step, cache, kv)
    new = step.act_quantized(kv, "act8").float()
    return torch.cat([history, new]), inputs.window_slots


def open_window(step: Step, cache: PagedCache) -> tuple[PagedCache, Tensor]:
    """Return one block that a prefill's `window_slots` point into, and where rows' entries go.

    It holds what the rings do; of positions before the first nothing that is read.
    """
    inputs, size = step.inputs, cache.codes.stride(1)
    assert inputs.window_rows is not None
    loaded, code_bytes = inputs.window_load.shape[0], cache.codes.shape[2]
    packed = cache.codes.new_empty(1, loaded + inputs.window_rows.shape[0], size)
    seen = PagedCache(packed[..., :code_bytes], packed[..., code_bytes:], cache.format, cache.dim)
    copy_entries(cache, inputs.window_load, seen, None)
    return seen, inputs.window_rows


def pack_window(step: Step, cache: PagedCache, kv: Tensor) -> PagedCache:
    """As `read_window` in a prefill, but packed: one block that `window_slots` points into."""
    seen, rows = open_window(step, cache)
    kv = shared_window(step, kv)
    store_window(step, cache, kv)
    step.ops.cache_store(seen, kv, rows)
    return seen


def keep_window(step: Step, cache: PagedCache, seen: Target) -> None:
    """As `store_window`, of entries that are packed already."""
    packed, rows = seen
    copy_entries(packed, rows, cache, step.inputs.window_store)
    if step.inputs.window_save is not None:
        saved, entries = step.inputs.window_save
        copy_entries(packed, rows[saved], cache, entries)


def _reads_packed(step: Step, cache: PagedCache) -> bool:
    """Whether prefill may attend to packed entries: where no row's entries are loaded first."""
    config, choice = step.config, step.ops.choices["paged_attention"]
    return cache.format == "window_fp8" and reads_packed(
        choice.name, config.num_attention_heads, config.head_dim, step.numerics.quantize
    )


def _reads_runs(step: Step) -> bool:
    """Whether attention reads runs of entries in place, by the shapes it asks for."""
    config = step.config
    few = step.inputs.num_rows <= ROW_BLOCK
    return few and config.num_attention_heads % 4 == 0 and config.sliding_window % SLOT_BLOCK == 0
