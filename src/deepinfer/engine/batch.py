"""From a StepPlan to device tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.cache.layout import CacheLayout
from deepinfer.engine.plan import RowPlan, StepKind, StepPlan
from deepinfer.model.fast.inputs import ModelInputs, SequenceRows, build_inputs

__all__ = ["Batch", "build_batch", "build_model_inputs"]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step on the device.

    rows         the plan's sampling rows, L of them, in plan order
    inputs       what the model runs on
    logits_rows  [L]  int64, the last token of each sampling row in the flat token order
    slots        L slots
    positions    L absolute positions of the tokens to draw
    """

    rows: tuple[RowPlan, ...]
    inputs: ModelInputs
    logits_rows: Tensor
    slots: list[int]
    positions: list[int]


def build_model_inputs(
    rows: Sequence[RowPlan], kind: StepKind, layout: CacheLayout, device: torch.device
) -> ModelInputs:
    """Lay out the model's part of some rows of a step."""
    sequences = [
        SequenceRows(slot=row.slot, start=row.start, token_ids=row.token_ids, blocks=row.blocks)
        for row in rows
    ]
    return build_inputs(sequences, kind is StepKind.DECODE, layout, device)


def build_batch(plan: StepPlan, layout: CacheLayout, device: torch.device) -> Batch:
    """Turn a plan into model inputs, and say which rows to sample at which positions."""
    ends: list[int] = []
    sampling: list[RowPlan] = []
    end = 0
    for row in plan.rows:
        end += len(row.token_ids)
        if row.samples:
            sampling.append(row)
            ends.append(end - 1)
    return Batch(
        rows=tuple(sampling),
        inputs=build_model_inputs(plan.rows, plan.kind, layout, device),
        logits_rows=torch.tensor(ends, dtype=torch.int64, device=device),
        slots=[row.slot for row in sampling],
        positions=[row.start + len(row.token_ids) for row in sampling],
    )
