"""From a StepPlan and the slots' state to device tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.cache.layout import CacheLayout
from deepinfer.engine.plan import RowPlan, StepKind, StepPlan
from deepinfer.engine.state import SlotState
from deepinfer.model.fast.inputs import ModelInputs, ReplayMode, SequenceRows, build_inputs
from deepinfer.sampling.speculative import Windows, split_budget

__all__ = ["Batch", "build_batch", "sequence_rows"]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step on the device.

    rows         the plan's rows that run, in plan order: those of ended sequences are left out
    sequences    what of each sequence runs
    inputs       what the model runs on, None when nothing does
    sampling     indices into `rows` of the L rows that draw
    windows      their last committed tokens and verified drafts, T flat rows in all
    proposed     drafts that each of the L had
    scoring      indices into `rows` of those whose prompt tokens are scored
    logits_rows  [T + S]  int64, rows of the step: those of the windows, then those whose next
                 token is scored
    slots        [L]  int64
    first        flat row at which each of the L windows begins
    row_slots    T slots
    positions    T absolute positions of the tokens to draw
    """

    rows: tuple[RowPlan, ...]
    sequences: tuple[SequenceRows, ...]
    inputs: ModelInputs | None
    sampling: tuple[int, ...]
    windows: Windows
    proposed: tuple[int, ...]
    scoring: tuple[int, ...]
    logits_rows: Tensor
    slots: Tensor
    first: list[int]
    row_slots: list[int]
    positions: list[int]


def sequence_rows(
    plan: StepPlan, state: SlotState, tokens_per_block: int
) -> list[SequenceRows | None]:
    """Say what each row runs: the tokens it names, or the last one of its slot and its drafts; None
    when ended.
    """
    rows = plan.rows
    device = state.length.device
    slots = torch.tensor([row.slot for row in rows], dtype=torch.int64, device=device)
    alive = state.alive[slots].tolist()
    length = state.length[slots]
    starts = (length - 1).tolist()
    last = state.last_token[slots].tolist()
    drafts: list[list[int]] = []
    if state.drafts.shape[1] and plan.kind is StepKind.DECODE:
        asked = torch.tensor([row.num_drafts for row in rows], dtype=torch.int64, device=device)
        # The last token of the limit is never fed, and the row before it draws it.
        room = state.limit[slots] - length - 1
        valid = torch.minimum(torch.minimum(asked, state.num_drafts[slots]), room)
        valid = torch.where(state.alive[slots], valid, 0).clamp_(min=0)
        if plan.draft_budget is not None:
            budget = torch.tensor(plan.draft_budget)
            valid = split_budget(state.confidences[slots], valid, budget)
        counts = valid.tolist()
        drafts = [
            own[:count] for own, count in zip(state.drafts[slots].tolist(), counts, strict=True)
        ]
    if plan.kind is StepKind.DECODE and not drafts:
        return [
            SequenceRows(row.slot, start, (token_id,), row.blocks[: start // tokens_per_block + 1])
            if runs
            else None
            for row, runs, start, token_id in zip(rows, alive, starts, last, strict=True)
        ]
    found: list[SequenceRows | None] = []
    for idx, row in enumerate(rows):
        if not alive[idx]:
            found.append(None)
            continue
        start, token_ids = row.start, row.token_ids
        if row.from_slot:
            start, token_ids = starts[idx], (last[idx], *(drafts[idx] if drafts else ()))
        # The plan's table covers what the sequence may reach, the model wants what it has.
        held = -(-(start + len(token_ids)) // tokens_per_block)
        blocks = row.blocks[:held]
        found.append(SequenceRows(row.slot, start, token_ids, blocks, row.floor, row.saves))
    return found


def build_batch(
    plan: StepPlan,
    state: SlotState,
    layout: CacheLayout,
    device: torch.device,
    replay: ReplayMode = "off",
) -> Batch:
    """Turn a plan into model inputs, and say which rows to sample at which positions."""
    found = sequence_rows(plan, state, layout.tokens_per_block)
    if plan.kind is StepKind.DECODE:
        return _decode_batch(plan, found, state, layout, device)
    drawn: list[int] = []
    rows: list[RowPlan] = []
    sequences: list[SequenceRows] = []
    sampling: list[int] = []
    first: list[int] = []
    scoring: list[int] = []
    scored: list[int] = []
    row_slots: list[int] = []
    positions: list[int] = []
    end = 0
    for row, sequence in zip(plan.rows, found, strict=True):
        if sequence is None:
            continue
        if row.scored_ids:
            scoring.append(len(rows))
            scored += range(end, end + len(row.scored_ids))
        num_tokens = len(sequence.token_ids)
        end += num_tokens
        if row.samples:
            sampling.append(len(rows))
            first.append(len(drawn))
            drawn.append(end - 1)
            row_slots.append(row.slot)
            positions.append(sequence.start + num_tokens)
        rows.append(row)
        sequences.append(sequence)

    def put(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    slots = put(row_slots)
    return Batch(
        rows=tuple(rows),
        sequences=tuple(sequences),
        inputs=build_inputs(sequences, False, layout, device, replay) if sequences else None,
        sampling=tuple(sampling),
        windows=Windows(put(first), state.drafts[slots], torch.zeros_like(slots)),
        proposed=(0,) * len(sampling),
        scoring=tuple(scoring),
        logits_rows=put(drawn + scored),
        slots=slots,
        first=first,
        row_slots=row_slots,
        positions=positions,
    )


def _decode_batch(
    plan: StepPlan,
    found: list[SequenceRows | None],
    state: SlotState,
    layout: CacheLayout,
    device: torch.device,
) -> Batch:
    """Lay out a step in which every row continues from its slot and draws behind each token."""
    sequences = [sequence for sequence in found if sequence is not None]
    rows = plan.rows
    if len(sequences) < len(rows):
        rows = tuple(row for row, runs in zip(rows, found, strict=True) if runs is not None)
    slots = np.array([s.slot for s in sequences], dtype=np.int64)
    positions = np.array([s.start for s in sequences], dtype=np.int64)
    flat = first = np.arange(len(sequences))
    row_slots, drafted = slots, np.zeros_like(slots)
    if state.drafts.shape[1]:
        drafted = np.array([len(s.token_ids) - 1 for s in sequences], dtype=np.int64)
        first = np.cumsum(drafted + 1) - drafted - 1
        flat = np.arange(len(sequences) + int(drafted.sum()))
        positions = np.repeat(positions - first, drafted + 1) + flat
        row_slots = np.repeat(slots, drafted + 1)

    def put(values: NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor if device.type == "cpu" else tensor.to(device)

    device_slots = put(slots)
    return Batch(
        rows=rows,
        sequences=tuple(sequences),
        inputs=build_inputs(sequences, True, layout, device, "off") if sequences else None,
        sampling=tuple(range(len(sequences))),
        windows=Windows(put(first), state.drafts[device_slots], put(drafted)),
        proposed=tuple(state.num_drafts[device_slots].tolist()),
        scoring=(),
        logits_rows=put(flat),
        slots=device_slots,
        first=first.tolist(),
        row_slots=row_slots.tolist(),
        positions=(positions + 1).tolist(),
    )
