"""From a StepPlan and the slots' state to device tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.cache.layout import CacheLayout
from deepinfer.engine.plan import RowPlan, StepKind, StepPlan
from deepinfer.engine.state import SlotState
from deepinfer.model.fast.inputs import ModelInputs, SequenceRows, build_inputs

__all__ = ["Batch", "build_batch", "sequence_rows"]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step on the device.

    rows         the plan's rows that run, in plan order: those of ended sequences are left out
    sequences    what of each sequence runs
    inputs       what the model runs on, None when nothing does
    sampling     indices into `rows` of the L rows that draw
    scoring      indices into `rows` of those whose prompt tokens are scored
    logits_rows  [L + S]  int64, rows of the step: the last one of each drawing row, then those
                 whose next token is scored
    slots        [L]  int64
    positions    L absolute positions of the tokens to draw
    """

    rows: tuple[RowPlan, ...]
    sequences: tuple[SequenceRows, ...]
    inputs: ModelInputs | None
    sampling: tuple[int, ...]
    scoring: tuple[int, ...]
    logits_rows: Tensor
    slots: Tensor
    positions: list[int]


def sequence_rows(
    rows: Sequence[RowPlan], state: SlotState, tokens_per_block: int
) -> list[SequenceRows | None]:
    """Say what each row runs: the tokens it names, or the last one of its slot; None when ended."""
    slots = torch.tensor([row.slot for row in rows], dtype=torch.int64)
    alive = state.alive[slots].tolist()
    starts = (state.length[slots] - 1).tolist()
    last = state.last_token[slots].tolist()
    found: list[SequenceRows | None] = []
    for idx, row in enumerate(rows):
        if not alive[idx]:
            found.append(None)
            continue
        start = starts[idx] if row.from_slot else row.start
        token_ids = (last[idx],) if row.from_slot else row.token_ids
        # The plan's table covers what the sequence may reach, the model wants what it has.
        held = -(-(start + len(token_ids)) // tokens_per_block)
        found.append(SequenceRows(row.slot, start, token_ids, row.blocks[:held]))
    return found


def build_batch(
    plan: StepPlan, state: SlotState, layout: CacheLayout, device: torch.device
) -> Batch:
    """Turn a plan into model inputs, and say which rows to sample at which positions."""
    ends: list[int] = []
    rows: list[RowPlan] = []
    sequences: list[SequenceRows] = []
    sampling: list[int] = []
    scoring: list[int] = []
    scored: list[int] = []
    positions: list[int] = []
    end = 0
    found = sequence_rows(plan.rows, state, layout.tokens_per_block)
    for row, sequence in zip(plan.rows, found, strict=True):
        if sequence is None:
            continue
        if row.scored_ids:
            scoring.append(len(rows))
            scored += range(end, end + len(row.scored_ids))
        end += len(sequence.token_ids)
        if row.samples:
            sampling.append(len(rows))
            ends.append(end - 1)
            positions.append(sequence.start + len(sequence.token_ids))
        rows.append(row)
        sequences.append(sequence)
    decode = plan.kind is StepKind.DECODE
    return Batch(
        rows=tuple(rows),
        sequences=tuple(sequences),
        inputs=build_inputs(sequences, decode, layout, device) if sequences else None,
        sampling=tuple(sampling),
        scoring=tuple(scoring),
        logits_rows=torch.tensor(ends + scored, dtype=torch.int64, device=device),
        slots=torch.tensor([rows[idx].slot for idx in sampling], dtype=torch.int64, device=device),
        positions=positions,
    )
