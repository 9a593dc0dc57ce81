"""Which compressed entries each row attends to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.config import LayerConfig
from deepinfer.kernels.paged_index.places import block_entries, flat_entries
from deepinfer.model.fast.inputs import RatioInputs
from deepinfer.model.fast.step import Step
from deepinfer.model.fast.weights import IndexerWeights

__all__ = ["choose", "select", "select_all", "selected_entries"]

_SCORES = 1 << 27
"""Most scores that are held at a time."""


def select(
    step: Step, layer: LayerConfig, weights: IndexerWeights, latent: Tensor, x: Tensor
) -> None:
    """Score the visible entries and keep the best, as `step.topk[layer]`.

    latent [T, rank] is the query latent shared with attention, x [T, C] the sublayer's input.
    Where everything visible fits nothing is scored.
    """
    if select_all(step, layer):
        return
    ops, config = step.ops, step.config
    q = ops.fp8_linear(latent, weights.wq_b, step.numerics.quantize and not step.fuses)
    q = torch.unflatten(q, -1, (config.index_n_heads, config.index_head_dim))
    cos, sin = step.rotation[True]
    if step.fuses and step.numerics.quantize:
        q = ops.rotate_tail(q, cos, sin, reuse=True, quantize="act4_e8")
    else:
        q = step.act_quantized(ops.rotate_tail(q, cos, sin, reuse=True), "act4_e8")
    head_weight = ops.dense_linear(x, weights.weights_proj, x.dtype)
    factor = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
    size = config.index_head_dim * config.index_n_heads
    if size & (size - 1) or size.bit_length() % 2 == 0:  # a power of two turns no order of scores
        head_weight = head_weight * factor
    choose(step, layer, q, head_weight)


def select_all(step: Step, layer: LayerConfig) -> bool:
    """Select everything visible if it fits; returns whether it did."""
    config, inputs = step.config, step.inputs
    ratio = inputs.ratios[layer.ratio]
    all_blocks = ratio.max_visible <= config.candidate_topk_blocks * config.candidate_block_size
    if ratio.max_visible <= config.index_topk and (all_blocks or not layer.is_candidate_source):
        count = torch.arange(config.index_topk, device=ratio.visible.device)
        topk = count.expand(inputs.num_rows, -1).masked_fill(count >= ratio.visible[:, None], -1)
        if layer.is_candidate_source:
            step.candidates = None  # nothing to filter
            _note_all_blocks(step, ratio.visible, ratio.max_visible)
        _keep(step, layer, topk)
        return True
    return False


def choose(step: Step, layer: LayerConfig, q: Tensor, head_weight: Tensor) -> None:
    """Keep the best entries by queries q [T, H, D], quantized, and head_weight [T, H].

    Scores may be any multiple of what the definition says.
    """
    if step.inputs.paged:
        _choose_paged(step, layer, q, head_weight)
        return
    ops, config, inputs = step.ops, step.config, step.inputs
    ratio = inputs.ratios[layer.ratio]
    source = max(i for i in config.index_k_source_layer_ids if i <= layer.layer_id)
    cache = step.caches.index[source]
    rounding = step.numerics.index_rounding
    size = config.candidate_block_size
    parts: list[Tensor] = []
    candidates: list[Tensor] = []
    for rows, entries in _score_groups(step, ratio):
        visible = ratio.visible[rows]
        keys = ops.cache_load(cache, entries.flatten()).view(*entries.shape, cache.dim)
        scores = ops.index_score(q[rows], head_weight[rows], keys, rounding)
        if layer.is_candidate_source:
            candidates.append(
                ops.select_blocks(scores, visible, config.candidate_topk_blocks, size)
            )
        elif layer.filters_candidates and step.candidates is not None:
            kept = ops.block_mask(step.candidates[rows], scores.shape[1], size)
            scores = scores.masked_fill(~kept, -math.inf)
        parts.append(ops.select_topk(scores, visible, config.index_topk))
    if candidates:
        step.candidates = _joined(candidates)
        _note_candidates(step, ratio)
    _keep(step, layer, _joined(parts))


def _note_candidates(step: Step, ratio: RatioInputs) -> None:
    if step.trace is not None and step.candidates is not None:
        width = -(-ratio.max_visible // step.config.candidate_block_size)
        blocks = step.candidates
        note = torch.zeros(len(blocks), width + 1, dtype=torch.uint8, device=blocks.device)
        target = blocks.masked_fill(blocks < 0, width)
        step.note("cand_blocks", note.scatter(1, target, 1)[:, :width])


def _choose_paged(step: Step, layer: LayerConfig, q: Tensor, head_weight: Tensor) -> None:
    """As `choose`, on keys where they lie; behind a candidate source only its blocks are scored."""
    ops, config, inputs = step.ops, step.config, step.inputs
    ratio = inputs.ratios[layer.ratio]
    source = max(i for i in config.index_k_source_layer_ids if i <= layer.layer_id)
    cache, size = step.caches.index[source], config.candidate_block_size
    rounding, table = step.numerics.index_rounding, ratio.blocks
    filtered = layer.filters_candidates and step.candidates is not None
    columns = ratio.max_visible
    if filtered and step.candidates is not None:
        columns = step.candidates.shape[1] * size
    step_rows = max(1, _SCORES // max(1, columns))
    parts: list[Tensor] = []
    candidates: list[Tensor] = []
    for begin in range(0, inputs.num_rows, step_rows):
        rows = slice(begin, begin + step_rows)
        visible = ratio.visible[rows]
        blocks = step.candidates[rows] if filtered and step.candidates is not None else None
        scores = ops.paged_index_score(
            q[rows],
            head_weight[rows],
            cache,
            table,
            inputs.row_seq[rows],
            visible,
            blocks,
            size,
            ratio.max_visible,
            rounding,
        )
        if layer.is_candidate_source:
            candidates.append(
                ops.select_blocks(scores, visible, config.candidate_topk_blocks, size)
            )
        if blocks is None:
            parts.append(ops.select_topk(scores, visible, config.index_topk))
            continue
        if step.columns is None:
            step.columns = torch.full_like(ratio.visible, columns)
        parts.append(ops.select_topk(scores, step.columns[rows], config.index_topk))
    if filtered and step.candidates is not None:
        _keep_columns(step, layer, _joined(parts), step.candidates)
        return
    if candidates:
        step.candidates = _joined(candidates)
        _note_candidates(step, ratio)
    _keep(step, layer, _joined(parts))


def _keep_columns(step: Step, layer: LayerConfig, found: Tensor, blocks: Tensor) -> None:
    """Keep the best columns [T, K] of candidate blocks: in decode, as what attention reads."""
    size, inputs = step.config.candidate_block_size, step.inputs
    if step.trace is not None or layer.kv_source is None or not inputs.decode:
        _keep(step, layer, block_entries(found, blocks, size))
        return
    ratio = inputs.ratios[step.config.layers[layer.kv_source].ratio]
    step.entries[layer.kv_source, layer.layer_id] = flat_entries(
        found, ratio.blocks, inputs.row_seq, ratio.per_block, blocks, size
    )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def _score_groups(step: Step, ratio: RatioInputs) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows and the entries to score for them: [N] of a sequence, or [T, N] row by row.

    Decode scores all rows at once, each against the entries of its own sequence; what lies beyond
    a row's sight is some entry of the padding block.
    """
    inputs = step.inputs
    if inputs.decode:
        table = ratio.table[:, : ratio.max_visible]
        one_each = inputs.num_rows == inputs.num_sequences
        yield slice(0, inputs.num_rows), table if one_each else table[inputs.row_seq]
        return
    for b, entries in enumerate(ratio.entries):
        if inputs.cu_rows[b + 1] > inputs.cu_rows[b]:  # a rank may have no rows of a sequence
            yield slice(inputs.cu_rows[b], inputs.cu_rows[b + 1]), entries


def _keep(step: Step, layer: LayerConfig, topk: Tensor) -> None:
    step.topk[layer.layer_id] = topk
    if step.trace is not None:
        step.note("idx_topk", topk.int())


def _note_all_blocks(step: Step, visible: Tensor, max_visible: int) -> None:
    if step.trace is not None:
        size = step.config.candidate_block_size
        block = torch.arange(-(-max_visible // size), device=visible.device)
        step.note("cand_blocks", (block * size < visible[:, None]).to(torch.uint8))


def gather_selected(step: Step, kv_source: int, index_source: int) -> tuple[Tensor, Tensor]:
    """Return dequantized entries fp32, [T, K, D] or [N, D], and each row's indices [T, K].

    With entries by row an index only tells what is absent (-1).

    Layers that share source and selection share the result. Prefill loads whole sequences when
    that is less than loading every selection.
    """
    kept = step.selected.get((kv_source, index_source))
    if kept is not None:
        return kept
    inputs, topk = step.inputs, step.topk[index_source]
    layer = step.config.layers[kv_source]
    ratio = inputs.ratios[layer.ratio]
    cache = step.caches.main[kv_source]
    absent = topk < 0
    total = sum(ratio.counts)
    if total < topk.numel() and not inputs.decode:  # decode attends faster to entries by row
        bases = ratio.bases
        if bases is None:
            bases = torch.tensor([0, *ratio.counts], device=topk.device).cumsum(0)
        bases = bases[inputs.row_seq]
        loaded = step.ops.cache_load(cache, torch.cat(ratio.entries))
        index = (topk + bases[:, None]).masked_fill(absent, -1)
    else:
        flat = ratio.table[inputs.row_seq].gather(1, topk.clamp(min=0)).masked_fill(absent, -1)
        loaded = step.ops.cache_load(cache, flat.flatten()).view(*topk.shape, cache.dim)
        index = topk
    if not loaded.shape[0]:
        loaded = F.pad(loaded, (0, 0, 0, 1))
    step.selected[kv_source, index_source] = (loaded, index)
    return loaded, index


def selected_entries(step: Step, kv_source: int, index_source: int) -> Tensor:
    """Return each row's selected entries [T, K] as flat entries of the source's cache, -1 padded.

    Layers that share source and selection share the result.
    """
    kept = step.entries.get((kv_source, index_source))
    if kept is not None:
        return kept
    inputs, topk = step.inputs, step.topk[index_source]
    ratio = inputs.ratios[step.config.layers[kv_source].ratio]
    flat = flat_entries(topk, ratio.blocks, inputs.row_seq, ratio.per_block)
    step.entries[kv_source, index_source] = flat
    return flat
