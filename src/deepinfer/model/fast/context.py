"""One rank's part of a prefill step that several ranks share.

The step is laid out as for one rank and then cut: a rank runs the rows that it owns and knows where
to get what it reads of others. `all` gathers window entries and the compressors' inputs of every
row; `entries` only the rows near borders and ends, and finished compressed entries. Caches end up
the same on every rank, byte for byte those of a single one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.cache.layout import CacheLayout
from deepinfer.model.fast.gather import ContextRows, Gather, Gatherer
from deepinfer.model.fast.inputs import (
    History,
    ModelInputs,
    RatioInputs,
    Replay,
    ReplayMode,
    SequenceRows,
    build_inputs,
)
from deepinfer.parallel.context import Exchange, borders, exchange_of, split_rows

__all__ = ["ContextShare", "Scheme", "share_inputs"]

Ints = NDArray[np.int64]

Scheme = Literal["all", "entries"]
"""What travels: everything that later rows read, or only what they need."""


@dataclass(frozen=True, slots=True)
class ContextShare:
    """Who shares prompts, and what they exchange."""

    group: Gatherer
    scheme: Scheme


def share_inputs(
    sequences: Sequence[SequenceRows],
    layout: CacheLayout,
    device: torch.device | str,
    replay: ReplayMode,
    share: ContextShare,
    logits_rows: Sequence[int],
) -> ModelInputs:
    """Lay out this rank's part of a prefill step; every rank of the group is given the same.

    logits_rows  rows of the whole step
    A rank that owns no row runs a stand-in whose values nobody takes. Raises ShapeError as
    `build_inputs` does.
    """
    whole = build_inputs(sequences, False, layout, "cpu", replay)
    starts, counts = [s.start for s in sequences], [len(s.token_ids) for s in sequences]
    owner = split_rows(starts, counts, share.group.size, max(layout.ratios, default=1))
    wanted = np.asarray(logits_rows, np.int64)
    cut = _Cut(share, layout, owner, whole, torch.device(device))
    inner = whole.replay
    if inner is None:
        return cut.inputs(wanted)
    local = cut.inputs(wanted[:0])
    if inner.inputs is None:
        return replace(local, replay=inner)
    if inner.rows is None:
        masked = _Cut(share, layout, owner, inner.inputs, torch.device(device))
        return replace(local, replay=Replay(masked.inputs(wanted), None, None))
    assert inner.places is not None
    rows = inner.rows.numpy()
    compact = _Cut(share, layout, owner[rows], inner.inputs, torch.device(device))
    mine = cut.local[rows[compact.owner == share.group.place]]
    if not mine.size:
        mine = np.zeros(1, np.int64)  # some row: its place in the decoder half is a stand-in
    inputs = compact.inputs(inner.places.numpy()[wanted])
    return replace(local, replay=Replay(inputs, cut.put(mine), None))


class _Cut:
    """Cuts a step, or its decoder half, to the rows of one rank.

    owner  [T] rank of each row
    rows   the rows that run here, ascending
    local  [T] place of each row among these, -1 elsewhere
    """

    def __init__(
        self,
        share: ContextShare,
        layout: CacheLayout,
        owner: Ints,
        whole: ModelInputs,
        device: torch.device,
    ) -> None:
        self.owner = owner
        self._share, self._layout, self._whole, self._device = share, layout, whole, device
        self._rank = share.group.place
        own = np.flatnonzero(owner == self._rank)
        self.rows = own if own.size else np.zeros(1, np.int64)
        self.local = np.full(len(owner), -1)
        self.local[self.rows] = np.arange(len(self.rows))
        self._pools_all = share.scheme == "all"
        self._first = np.asarray(whole.cu_rows, np.int64)

    def put(self, values: NDArray[np.generic]) -> Tensor:
        """Take an array to the device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

    def inputs(self, wanted: Ints) -> ModelInputs:
        """Return the rank's part; `wanted` are the rows of this half whose logits are asked for."""
        whole, rows, put = self._whole, self.rows, self.put
        seq = whole.row_seq.numpy()
        held, window = self._window()
        entries: dict[int, Gather] = {}
        ratios = {r: self._ratio(r, part, entries) for r, part in whole.ratios.items()}
        tails, tail = self._tail()
        save = whole.window_save
        if save is not None:
            save = (put(np.searchsorted(held, save[0].numpy())), save[1].to(self._device))
        engram = whole.engram
        if engram is not None:
            engram = replace(_on(engram, self._device), rows=put(engram.rows.numpy()[rows]))
        every = np.arange(len(self.owner))
        return replace(
            whole,
            num_rows=len(rows),
            token_ids=put(whole.token_ids.numpy()[rows]),
            positions=put(whole.positions.numpy()[rows]),
            row_seq=put(seq[rows]),
            cu_rows=tuple(np.searchsorted(rows, self._first).tolist()),
            window_store=put(whole.window_store.numpy()[held]),
            window_load=whole.window_load.to(self._device),
            window_slots=put(self._slots(held)),
            window_rows=put(whole.num_sequences * self._layout.window + np.arange(len(held))),
            window_save=save,
            ratios=ratios,
            tail=tail,
            engram=engram,
            replay=None,
            context=ContextRows(
                token_ids=whole.token_ids.to(self._device),
                window=window,
                projections=self._gather(every) if self._pools_all and whole.tail else None,
                entries=entries,
                tails=tails,
                logits=self._gather(wanted),
            ),
        )

    def _gather(self, items: Ints) -> Gather:
        """Return how rows of the half (or some, in any order) come to all ranks."""
        return self._made(exchange_of(self.owner[items], self.local[items], self._size, self._rank))

    @property
    def _size(self) -> int:
        return self._share.group.size

    def _made(self, exchange: Exchange) -> Gather:
        send, index = self.put(exchange.send), self.put(exchange.index)
        return Gather(self._share.group, send, exchange.most, index)

    def _window(self) -> tuple[Ints, Gather]:
        """Return the rows whose window entries this rank has, ascending, and how they come."""
        needed = np.ones(len(self.owner), bool)
        if not self._pools_all:
            counts = np.diff(self._first).tolist()
            ring = self._layout.ring_length
            needed = borders(self.owner, counts, self._layout.window, ring)
            if self._whole.window_save is not None:
                needed[self._whole.window_save[0].numpy()] = True
        travel = np.flatnonzero(needed)
        mine = self.owner == self._rank
        exchange = exchange_of(self.owner[travel], self.local[travel], self._size, self._rank)
        index = np.where(mine, self.local, 0)
        theirs = np.flatnonzero(needed & ~mine)
        index[theirs] = len(self.rows) + exchange.index[np.searchsorted(travel, theirs)]
        held = np.flatnonzero(needed | mine)
        send = self.put(exchange.send)
        gather = Gather(self._share.group, send, exchange.most, self.put(index[held]), own=True)
        return held, gather

    def _slots(self, held: Ints) -> Ints:
        """Return the rows' windows as indices into [loaded | held rows]."""
        loaded = self._whole.num_sequences * self._layout.window
        slots = self._whole.window_slots.numpy()[self.rows]
        there = np.minimum(np.searchsorted(held, slots - loaded), len(held) - 1)
        return np.asarray(np.where(slots < loaded, slots, loaded + there), np.int64)

    def _ratio(self, ratio: int, part: RatioInputs, entries: dict[int, Gather]) -> RatioInputs:
        emits = part.emit_rows.numpy()
        emit_rows = emits
        if ratio == 1 or not self._pools_all:
            mine = self.owner[emits] == self._rank
            emit_rows = self.local[emits[mine]]
            place = np.cumsum(mine) - 1
            entries[ratio] = self._made(
                exchange_of(self.owner[emits], place, self._size, self._rank)
            )
        return replace(
            part,
            visible=self.put(part.visible.numpy()[self.rows]),
            emit_rows=self.put(emit_rows),
            emit_entries=part.emit_entries.to(self._device),
            emit_starts=part.emit_starts.to(self._device),
            blocks=part.blocks.to(self._device),
            bases=None if part.bases is None else part.bases.to(self._device),
        )

    def _tail(self) -> tuple[Gather | None, History | None]:
        """Return how the rows that the tail rings keep come, and the look-back of this rank."""
        tail = self._whole.tail
        if tail is None:
            return None, None
        if self._pools_all:
            return None, _on(tail, self._device)
        loaded = tail.load.shape[0]
        looked = tail.rows.numpy()[self.rows]
        new = self.local[np.maximum(looked - loaded, 0)]
        # A row's partner is on its rank, or loaded; other rows look back at nothing that counts.
        moved = np.where(looked < loaded, looked, loaded + np.maximum(new, 0))
        return self._gather(tail.store_rows.numpy()), History(
            tail.load.to(self._device),
            self.put(moved),
            self.put(np.empty(0, np.int64)),
            tail.store.to(self._device),
        )


def _on(history: History, device: torch.device) -> History:
    return History(*(getattr(history, name).to(device) for name in _HISTORY))


_HISTORY: Final = ("load", "rows", "store_rows", "store")
