"""One step's rows as the index tensors that the layers need.

A step is all prefill or all decode. Every sequence contributes consecutive positions; rows of one
sequence are neighbours. The index arithmetic runs in numpy on the host: it is the same for every
layer. Flat entry ids are `block * entries + offset`, for rings `slot * length + position % length`;
-1 means absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.cache.layout import CacheLayout
from deepinfer.errors import ShapeError

__all__ = ["History", "ModelInputs", "RatioInputs", "SequenceRows", "build_inputs"]

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's part of a step.

    slot       state slot, fixed for the sequence's life
    start      absolute position of the first row
    token_ids  the rows' tokens
    blocks     block table that covers positions 0..start+len-1
    """

    slot: int
    start: int
    token_ids: Sequence[int]
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class History:
    """Short look-back over ring and step: the last `depth` tokens of a sequence before this step,
    then its rows.

    load        [B*depth]  flat ring entries of the tokens before the step, -1 before position 0
    rows        [T, 1+depth] indices into [B*depth loaded | T new]: the row, then 1.. back
    store_rows  [n] rows whose values enter the ring
    store       [n] their flat ring entries
    """

    load: Tensor
    rows: Tensor
    store_rows: Tensor
    store: Tensor


@dataclass(frozen=True, slots=True)
class RatioInputs:
    """What the layers of one compression ratio need.

    visible       [T]  entries each row sees, (p+1) // ratio
    emit_rows     [n]  rows that complete a group
    emit_entries  [n]  flat entries that they write
    emit_starts   [n]  position of the first token of each group
    entries       per sequence: flat ids of its entries 0..visible-1 of the last row
    table         [B, blocks * entries per block] flat id of every entry the block table covers
    max_visible   largest of `visible`
    """

    visible: Tensor
    emit_rows: Tensor
    emit_entries: Tensor
    emit_starts: Tensor
    entries: tuple[Tensor, ...]
    table: Tensor
    max_visible: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """A step on the device: T rows of B sequences.

    cu_rows       [B+1] host, rows of sequence b are cu_rows[b]..cu_rows[b+1]-1
    row_seq       [T] sequence of each row
    window_store  [T] flat ring entry, -1 for rows that later rows of the same step overwrite
    window_load   [B*W] prefill: flat ring entries of the W positions before the step
    window_slots  [T, W] prefill: indices into each sequence's [W loaded | its rows], one after the
                  other; decode: flat ring entries
    tail          look-back of the ratio-2 compressors, None without them
    engram        look-back of Engram, None without it
    """

    decode: bool
    num_rows: int
    num_sequences: int
    token_ids: Tensor
    positions: Tensor
    row_seq: Tensor
    cu_rows: tuple[int, ...]
    window_store: Tensor
    window_load: Tensor
    window_slots: Tensor
    ratios: Mapping[int, RatioInputs]
    tail: History | None
    engram: History | None


def build_inputs(
    sequences: Sequence[SequenceRows],
    decode: bool,
    layout: CacheLayout,
    device: torch.device | str = "cpu",
) -> ModelInputs:
    """Lay out a step.

    decode  rows read the rings after storing; needs at most 1 + max_rollback rows per sequence
    Raises ShapeError for an empty step, a sequence without rows, a decode step with too many rows
    or a block table that does not cover the rows.
    """
    counts = np.array([len(s.token_ids) for s in sequences], dtype=np.int64)
    _check(sequences, counts, decode, layout)
    num_sequences, num_rows = len(sequences), int(counts.sum())
    cu_rows = np.concatenate([[0], np.cumsum(counts)])
    slots = np.array([s.slot for s in sequences], dtype=np.int64)
    starts = np.array([s.start for s in sequences], dtype=np.int64)
    row_seq = np.repeat(np.arange(num_sequences), counts)
    offset = np.arange(num_rows) - cu_rows[row_seq]
    positions = starts[row_seq] + offset
    token_ids = np.concatenate([np.asarray(s.token_ids, dtype=np.int64) for s in sequences])

    def put(array: IntArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    window, ring = layout.window, layout.ring_length
    first = np.maximum(positions - window + 1, 0)
    held = first[:, None] + np.arange(window)
    absent = held > positions[:, None]
    back = starts[:, None] - window + np.arange(window)
    load = np.where(back >= 0, slots[:, None] * ring + back % ring, -1).ravel()
    if decode:
        window_slots = np.where(absent, -1, slots[row_seq][:, None] * ring + held % ring)
    else:
        into = held - starts[row_seq][:, None]  # below 0: loaded, else a row of this step
        origin = cu_rows[row_seq] + (row_seq + 1) * window  # of each sequence's first row
        window_slots = np.where(absent, -1, origin[:, None] + into)
    last = offset >= counts[row_seq] - ring
    store = np.where(last, slots[row_seq] * ring + positions % ring, -1)

    def history(depth: int, length: int) -> History:
        """Look `depth` tokens back through a ring of `length`."""
        before = starts[:, None] - depth + np.arange(depth)
        loads = np.where(before >= 0, slots[:, None] * length + before % length, -1).ravel()
        steps = offset[:, None] - np.arange(depth + 1)
        inside = num_sequences * depth + cu_rows[row_seq][:, None] + steps
        rows = np.where(steps >= 0, inside, row_seq[:, None] * depth + depth + steps)
        kept = np.nonzero(offset >= counts[row_seq] - length)[0]
        target = slots[row_seq[kept]] * length + positions[kept] % length
        return History(put(loads), put(rows), put(kept), put(target))

    ratios = {
        ratio: _ratio_inputs(ratio, sequences, positions, row_seq, cu_rows, layout, device)
        for ratio in layout.ratios
    }
    engram = layout.engram_tail
    return ModelInputs(
        decode=decode,
        num_rows=num_rows,
        num_sequences=num_sequences,
        token_ids=put(token_ids),
        positions=put(positions),
        row_seq=put(row_seq),
        cu_rows=tuple(cu_rows.tolist()),
        window_store=put(store),
        window_load=put(load),
        window_slots=put(window_slots),
        ratios=ratios,
        tail=history(1, layout.tails[0][1].length) if layout.tails else None,
        engram=None if engram is None else history(layout.engram_history, engram.length),
    )


def _check(
    sequences: Sequence[SequenceRows], counts: IntArray, decode: bool, layout: CacheLayout
) -> None:
    if not len(sequences) or int(counts.min()) < 1:
        raise ShapeError("a step needs at least one sequence and one row for each")
    if decode and int(counts.max()) > layout.max_rollback + 1:
        raise ShapeError(
            f"a decode step of {int(counts.max())} rows needs rings that can step back: the caches "
            f"were laid out for max_rollback {layout.max_rollback}"
        )
    for sequence, count in zip(sequences, counts, strict=True):
        needed = -(-(sequence.start + int(count)) // layout.tokens_per_block)
        if len(sequence.blocks) < needed:
            raise ShapeError(
                f"{sequence.start + int(count)} positions need {needed} blocks of "
                f"{layout.tokens_per_block}, the block table has {len(sequence.blocks)}"
            )


def _ratio_inputs(
    ratio: int,
    sequences: Sequence[SequenceRows],
    positions: IntArray,
    row_seq: IntArray,
    cu_rows: IntArray,
    layout: CacheLayout,
    device: torch.device | str,
) -> RatioInputs:
    """Lay out the compressed entries of one ratio."""
    per_block = layout.tokens_per_block // ratio
    width = max(len(s.blocks) for s in sequences)
    blocks = np.zeros((len(sequences), width), dtype=np.int64)
    for row, sequence in enumerate(sequences):
        blocks[row, : len(sequence.blocks)] = sequence.blocks
    table = (blocks[:, :, None] * per_block + np.arange(per_block)).reshape(len(sequences), -1)
    visible = (positions + 1) // ratio
    emit = np.nonzero((positions + 1) % ratio == 0)[0]
    number = positions[emit] // ratio

    def put(array: IntArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    device_table = put(table)
    counts = visible[cu_rows[1:] - 1].tolist()
    return RatioInputs(
        visible=put(visible),
        emit_rows=put(emit),
        emit_entries=put(table[row_seq[emit], number]),
        emit_starts=put(number * ratio),
        entries=tuple(device_table[b, :count] for b, count in enumerate(counts)),
        table=device_table,
        max_visible=int(visible.max()),
    )
