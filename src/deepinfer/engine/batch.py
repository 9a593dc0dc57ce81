"""From a StepPlan and the slots' state to device tensors.

Decode steps are laid out from arrays: what a row names (slot, block table) is kept from step to
step, what changes with every step is read from the state of all slots at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.cache.layout import CacheLayout
from deepinfer.engine.plan import FROM_SLOT, RowPlan, StepKind, StepPlan
from deepinfer.engine.state import SlotState
from deepinfer.model.fast.context import ContextShare, share_inputs
from deepinfer.model.fast.inputs import (
    DecodeRows,
    ModelInputs,
    ReplayMode,
    SequenceRows,
    build_inputs,
    decode_inputs,
)
from deepinfer.sampling.speculative import Windows, split_budget

__all__ = ["Batch", "BatchBuilder"]

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step on the device.

    rows         the plan's rows that run, in plan order: those of ended sequences are left out
    running      what of each sequence runs
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
    running: Sequence[SequenceRows] | DecodeRows
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

    def sequence(self, place: int) -> SequenceRows:
        """Return what runs of a row."""
        if not isinstance(self.running, DecodeRows):
            return self.running[place]
        rows, begin, count = self.running, place, 1
        if rows.counts is not None:
            begin, count = int(rows.counts[:place].sum()), int(rows.counts[place])
        return SequenceRows(
            slot=int(rows.slots[place]),
            start=int(rows.starts[place]),
            token_ids=rows.token_ids[begin : begin + count].tolist(),
            blocks=self.rows[place].blocks,
        )


class BatchBuilder:
    """Turns plans into batches. Keeps the block tables of decoding sequences as one array, in which
    a step changes the rows that its plan changes.

    share  the ranks that share prefill steps, None when there are none
    """

    def __init__(
        self, layout: CacheLayout, device: torch.device, replay: ReplayMode = "off"
    ) -> None:
        self._layout = layout
        self._device = device
        self._replay: ReplayMode = replay
        self.share: ContextShare | None = None
        self._tables: dict[int, RowPlan] = {}  # slot -> the row whose table it has
        self._blocks = np.zeros((1, 1), dtype=np.int64)  # [slots, width]
        self._held = np.zeros(1, dtype=np.int64)
        self._asked = np.zeros(1, dtype=np.int64)
        self._rows: tuple[RowPlan, ...] = ()
        self._slots = np.zeros(0, dtype=np.int64)

    def build(self, plan: StepPlan, state: SlotState) -> Batch:
        """Return what the model runs on, and which rows to sample at which positions.

        Rows whose sequence has ended on the device are left out.
        """
        if plan.kind is StepKind.DECODE:
            return self._decode(plan, state)
        return self._prefill(plan, state)

    def _prefill(self, plan: StepPlan, state: SlotState) -> Batch:
        device = self._device
        alive = _host(state.alive)
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
        for row in plan.rows:
            if not alive[row.slot]:
                continue
            num_tokens = len(row.token_ids)
            if row.scored_ids:
                scoring.append(len(rows))
                scored += range(end, end + len(row.scored_ids))
            end += num_tokens
            if row.samples:
                sampling.append(len(rows))
                first.append(len(drawn))
                drawn.append(end - 1)
                row_slots.append(row.slot)
                positions.append(row.start + num_tokens)
            # The plan's table covers what the sequence may reach, the model wants what it has.
            held = -(-(row.start + num_tokens) // self._layout.tokens_per_block)
            sequences.append(
                SequenceRows(
                    row.slot, row.start, row.token_ids, row.blocks[:held], row.floor, row.saves
                )
            )
            rows.append(row)

        def put(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        slots = put(row_slots)
        inputs = None
        if sequences:
            inputs = self._prefill_inputs(sequences, drawn + scored)
        return Batch(
            rows=tuple(rows),
            running=sequences,
            inputs=inputs,
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

    def _prefill_inputs(
        self, sequences: Sequence[SequenceRows], logits_rows: Sequence[int]
    ) -> ModelInputs:
        layout, device, replay = self._layout, self._device, self._replay
        if self.share is None:
            return build_inputs(sequences, False, layout, device, replay)
        return share_inputs(sequences, layout, device, replay, self.share, logits_rows)

    def _decode(self, plan: StepPlan, state: SlotState) -> Batch:
        """Lay out a step in which every row continues from its slot and draws behind each token."""
        rows, slots = plan.rows, self._slots_of(plan.rows)
        alive = _host(state.alive)[slots]
        if not alive.all():
            kept = np.flatnonzero(alive)
            rows, slots = tuple(rows[idx] for idx in kept.tolist()), slots[kept]
        num = len(rows)
        lengths = _host(state.length)[slots]
        starts, token_ids = lengths - 1, _host(state.last_token)[slots]
        counts = None
        flat = first = np.arange(num)
        drafted, row_slots, positions = np.zeros_like(slots), slots, lengths
        device_slots = self._put(slots)
        if state.drafts.shape[1] and num:
            drafted = self._drafted(plan, state, device_slots, slots)
        if drafted.any():
            counts = drafted + 1
            ends = np.cumsum(counts)
            first, flat = ends - counts, np.arange(ends[-1])
            drafts = _host(state.drafts)[slots]
            last, token_ids = token_ids, np.empty_like(flat)
            is_draft = np.ones(len(flat), dtype=np.bool_)
            is_draft[first] = False
            token_ids[first] = last
            token_ids[is_draft] = drafts[np.arange(drafts.shape[1]) < drafted[:, None]]
            row_slots = np.repeat(slots, counts)
            positions = np.repeat(lengths - first, counts) + flat
        # The plan's tables cover what a sequence may reach, the model wants what it has.
        width = -(-int((starts + drafted).max(initial=-1) + 1) // self._layout.tokens_per_block)
        running = DecodeRows(
            slots, starts, counts, token_ids, self._blocks[slots, :width], self._held[slots]
        )
        proposed = (0,) * num
        if state.drafts.shape[1]:
            proposed = tuple(_host(state.num_drafts)[slots].tolist())
        return Batch(
            rows=rows,
            running=running,
            inputs=decode_inputs(running, self._layout, self._device) if num else None,
            sampling=tuple(range(num)),
            windows=Windows(self._put(first), state.drafts[device_slots], self._put(drafted)),
            proposed=proposed,
            scoring=(),
            logits_rows=self._put(flat),
            slots=device_slots,
            first=first.tolist(),
            row_slots=row_slots.tolist(),
            positions=positions.tolist(),
        )

    def _drafted(
        self, plan: StepPlan, state: SlotState, device_slots: Tensor, slots: IntArray
    ) -> IntArray:
        """Return how many drafts each sequence verifies."""
        asked = self._put(self._asked[slots])
        # The last token of the limit is never fed, and the row before it draws it.
        room = state.limit[device_slots] - state.length[device_slots] - 1
        valid = torch.minimum(torch.minimum(asked, state.num_drafts[device_slots]), room)
        valid = valid.clamp_(min=0)
        if plan.draft_budget is not None:
            budget = torch.tensor(plan.draft_budget)
            valid = split_budget(state.confidences[device_slots], valid, budget)
        return _host(valid)

    def _slots_of(self, rows: tuple[RowPlan, ...]) -> IntArray:
        """Return the rows' slots, after taking over the tables of those that are new."""
        if rows == self._rows:  # identical rows compare fast
            return self._slots
        slots = [row.slot for row in rows]
        tables = self._tables
        for slot, row in zip(slots, rows, strict=True):
            before = tables.get(slot)
            if before is row:
                continue
            assert row.start == FROM_SLOT, "a row of a decode step continues from its slot"
            tables[slot] = row
            if before is None or before.blocks is not row.blocks:
                self._take(slot, row.blocks)
            self._asked[slot] = row.num_drafts
        self._rows, self._slots = rows, np.array(slots, dtype=np.int64)
        return self._slots

    def _take(self, slot: int, table: Sequence[int]) -> None:
        num_slots, width = self._blocks.shape
        held = len(table)
        if slot >= num_slots or held > width:
            more = max(slot + 1, num_slots), max(2 * width if held > width else width, held)
            blocks = np.zeros(more, dtype=np.int64)
            blocks[:num_slots, :width] = self._blocks
            self._blocks = blocks
            self._held = np.pad(self._held, (0, more[0] - num_slots))
            self._asked = np.pad(self._asked, (0, more[0] - num_slots))
        self._blocks[slot, :held] = table
        self._held[slot] = held

    def _put(self, values: IntArray) -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)


def _host(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor as an array, which on a CPU shares its memory."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor.cpu().numpy()
