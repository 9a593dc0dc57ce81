"""A decode step's inputs from slot state, without the host (`kernels/decode_rows`)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.cache.layout import CacheLayout
from deepinfer.kernels.decode_rows import LayoutForm, lay_out
from deepinfer.model.fast.inputs import History, ModelInputs, RatioInputs

__all__ = ["device_inputs", "layout_form"]


def layout_form(layout: CacheLayout) -> LayoutForm:
    """Return the sizes that rows are laid out for."""
    engram = layout.engram_tail
    return LayoutForm(
        window=layout.window,
        ring=layout.ring_length,
        ratios=layout.ratios,
        tokens_per_block=layout.tokens_per_block,
        tail=layout.tails[0][1].length if layout.tails else 0,
        depth=layout.engram_history,
        engram=0 if engram is None else engram.length,
    )


def device_inputs(
    slots: Tensor,
    places: Tensor,
    length: Tensor,
    last_token: Tensor,
    drafts: Tensor,
    table: Tensor,
    form: LayoutForm,
    most_tokens: int,
) -> ModelInputs:
    """Lay out the rows of a decode step; arguments as of `lay_out`.

    most_tokens  no row's position is as large: bounds what is scored, whatever the lengths are
    Every row completes an entry as far as shapes go; where it does not, nothing is stored.
    """
    rows = lay_out(slots, places, length, last_token, drafts, table, form)
    num, every = slots.shape[0], torch.arange(slots.shape[0], device=slots.device)
    ratios = {
        ratio: RatioInputs(
            visible=rows.visible[i],
            emit_rows=every,
            emit_entries=rows.emit_entries[i],
            emit_starts=rows.emit_starts[i],
            counts=(),
            blocks=table,
            per_block=form.tokens_per_block // ratio,
            max_visible=most_tokens // ratio,
        )
        for i, ratio in enumerate(form.ratios)
    }
    return ModelInputs(
        decode=True,
        num_rows=num,
        num_sequences=num,
        token_ids=rows.token_ids,
        positions=rows.positions,
        row_seq=slots,
        cu_rows=(),
        window_store=rows.window_store,
        window_load=every[:0],
        window_slots=rows.window_slots,
        window_runs=None,
        window_save=None,
        ratios=ratios,
        tail=History(rows.tail_load, rows.tail_rows, every, rows.tail_store) if form.tail else None,
        engram=History(rows.engram_load, rows.engram_rows, every, rows.engram_store)
        if form.engram
        else None,
        paged=True,
        live=slots > 0,
    )
