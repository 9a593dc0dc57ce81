"""One step's rows as the index tensors that the layers need.

A step is all prefill or all decode. Every sequence contributes consecutive positions; rows of one
sequence are neighbours. The index arithmetic runs in numpy on the host: it is the same for every
layer. Flat entry ids are `block * entries + offset`, for rings `slot * length + position % length`;
-1 means absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.cache.layout import CacheLayout
from deepinfer.device.packer import Packer
from deepinfer.errors import ShapeError
from deepinfer.kernels.rows import ROW_BLOCK
from deepinfer.model.fast.gather import ContextRows

__all__ = [
    "DecodeRows",
    "History",
    "ModelInputs",
    "RatioInputs",
    "Replay",
    "ReplayMode",
    "SequenceRows",
    "build_inputs",
    "decode_inputs",
]

IntArray = NDArray[np.int64]

ReplayMode = Literal["off", "mask", "compact"]
"""Which rows of a prompt the decoder half runs; `docs/replay.md`."""


class SequenceRows(NamedTuple):
    """One sequence's part of a step.

    slot       state slot, fixed for the sequence's life
    start      absolute position of the first row
    token_ids  the rows' tokens
    blocks     block table that covers positions 0..start+len-1
    floor      in the decoder half, windows see no position below this one (bounded replay)
    saves      (end, slot): that slot gets the rings and tails as they stand after `end` tokens;
               start < end <= start+len, and it holds those of `start` tokens already. `end` is a
               multiple of every compression ratio
    """

    slot: int
    start: int
    token_ids: Sequence[int]
    blocks: Sequence[int]
    floor: int = 0
    saves: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """A decode step of B sequences as arrays.

    slots      [B]         state slots
    starts     [B]         position of each sequence's first row
    counts     [B]         rows of each; None = one each
    token_ids  [T]         the rows' tokens
    blocks     [B, width]  block tables
    held       [B]         how many of a table's blocks are meant
    """

    slots: IntArray
    starts: IntArray
    counts: IntArray | None
    token_ids: IntArray
    blocks: IntArray
    held: IntArray


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


@dataclass(frozen=True)
class RatioInputs:
    """What the layers of one compression ratio need.

    visible       [T]  entries each row sees, (p+1) // ratio
    emit_rows     [n]  rows that complete a group
    emit_entries  [n]  flat entries that they write
    emit_starts   [n]  position of the first token of each group
    counts        per sequence: entries that its last row sees
    blocks        [B, width]  block tables, padded with 0
    per_block     entries of one block
    max_visible   largest of `visible`, or a number that it does not exceed
    bases         per sequence: entries of those before it; None = not laid out
    """

    visible: Tensor
    emit_rows: Tensor
    emit_entries: Tensor
    emit_starts: Tensor
    counts: tuple[int, ...]
    blocks: Tensor
    per_block: int
    max_visible: int
    bases: Tensor | None = None

    @cached_property
    def table(self) -> Tensor:
        """[B, width * per_block] flat id of every entry that the block tables cover."""
        inside = torch.arange(self.per_block, device=self.blocks.device)
        return (self.blocks.unsqueeze(2) * self.per_block + inside).flatten(1)

    @cached_property
    def entries(self) -> tuple[Tensor, ...]:
        """Per sequence: flat ids of its entries 0..counts-1."""
        return tuple(self.table[b, :count] for b, count in enumerate(self.counts))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """A step on the device: T rows of B sequences.

    cu_rows       [B+1] host, rows of sequence b are cu_rows[b]..cu_rows[b+1]-1
    row_seq       [T] sequence of each row
    window_store  [T] flat ring entry, -1 for rows that later rows of the same step overwrite
    window_load   [B*W] prefill: flat ring entries of the W positions before the step
    window_slots  [T, W] prefill: indices into [B*W loaded | the step's rows]; decode: flat ring
                  entries
    window_runs   [T, W] decode of up to ROW_BLOCK rows: the same in rings that are kept twice in a
                  row, where each row's entries are neighbours
    window_save   rows and ring entries of other slots that also get their values: [n] and [n], None
                  without saves
    tail          look-back of the ratio-2 compressors, None without them
    engram        look-back of Engram, None without it
    replay        what the decoder half runs instead, None = the same
    context       what comes from ranks that share the step, None when there are none; then rows are
                  this rank's, and what is stored may be more
    paged         layers read compressed entries through the block tables, whose row `row_seq` is a
                  row's own; nothing is brought together by sequence
    live          [T] bool, rows that count; the others are padding that no layer needs to compute.
                  None = all
    window_rows   prefill: where `window_slots` finds each row's own entry
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
    window_runs: Tensor | None
    window_save: tuple[Tensor, Tensor] | None
    ratios: Mapping[int, RatioInputs]
    tail: History | None
    engram: History | None
    replay: Replay | None = None
    context: ContextRows | None = None
    paged: bool = False
    live: Tensor | None = None
    window_rows: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """The decoder half's part of a step under bounded replay.

    inputs  its rows; None when it has none
    rows    [n] which rows of the step these are, None = all of them
    places  [T] where each row of the step is among them, -1 = nowhere; None = in its own place
    """

    inputs: ModelInputs | None
    rows: Tensor | None
    places: Tensor | None


def build_inputs(
    sequences: Sequence[SequenceRows],
    decode: bool,
    layout: CacheLayout,
    device: torch.device | str = "cpu",
    replay: ReplayMode = "off",
) -> ModelInputs:
    """Lay out a step.

    decode  rows read the rings after storing; needs at most 1 + max_rollback rows per sequence
    replay  what the decoder half does about positions below a sequence's `floor`: nothing, hide
            them from its windows, or drop their rows as well. Decode steps have no floor
    Raises ShapeError for an empty step, a sequence without rows, a decode step with too many rows
    or a block table that does not cover the rows.
    """
    if decode:
        return decode_inputs(_decode_rows(sequences), layout, device)
    whole = _build(sequences, layout, device, floors=False)
    if replay == "off" or all(s.floor <= s.start - layout.window for s in sequences):
        return whole
    if replay == "mask":
        masked = _build(sequences, layout, device, floors=True)
        return replace(whole, replay=Replay(masked, None, None))
    kept: list[SequenceRows] = []
    rows: list[IntArray] = []
    for first, s in zip(whole.cu_rows, sequences, strict=False):
        count = len(s.token_ids)
        skipped = min(max(s.floor - s.start, 0), count)
        if skipped < count:
            ids = s.token_ids[skipped:]
            kept.append(SequenceRows(s.slot, s.start + skipped, ids, s.blocks, s.floor))
            rows.append(np.arange(first + skipped, first + count))
    if not kept:
        return replace(whole, replay=Replay(None, None, None))
    index = np.concatenate(rows)
    places = np.full(whole.num_rows, -1, dtype=np.int64)
    places[index] = np.arange(index.shape[0])
    compact = _build(kept, layout, device, floors=True)
    put = Packer(device)
    found = replace(whole, replay=Replay(compact, put(index), put(places)))
    put.flush()
    return found


def decode_inputs(
    rows: DecodeRows, layout: CacheLayout, device: torch.device | str = "cpu"
) -> ModelInputs:
    """Lay out a decode step; errors as in `build_inputs`."""
    slots, starts, counts = rows.slots, rows.starts, rows.counts
    num_sequences, num_rows = len(slots), len(rows.token_ids)
    put = Packer(device)
    if counts is None:
        cu_rows = last_rows = None
        positions, row_slots = starts, slots
        row_seq, device_row_seq = _ascending(num_sequences, device)
    else:
        cu_rows = np.concatenate([[0], np.cumsum(counts)])
        last_rows = cu_rows[1:] - 1
        row_seq = np.repeat(np.arange(num_sequences), counts)
        device_row_seq = put(row_seq)
        positions = starts[row_seq] + np.arange(num_rows) - cu_rows[row_seq]
        row_slots = slots[row_seq]
    needed = _check(counts, starts, rows.held, layout, decode=True)
    width = int(needed.max())
    blocks = np.where(np.arange(width) < needed[:, None], rows.blocks[:, :width], 0)

    window, ring = layout.window, layout.ring_length
    first = positions - (window - 1)
    early = np.flatnonzero(first < 0)  # rows whose window begins before position 0
    if early.size:
        first[early] = 0
        absent = np.arange(window) > positions[early, None]
    first %= ring
    window_slots = _turns(window, ring).take(first, axis=0)
    window_slots += (row_slots * ring)[:, None]
    window_runs = None
    if num_rows <= ROW_BLOCK:
        window_runs = np.arange(window) + (first + row_slots * (2 * ring))[:, None]
    if early.size:
        window_slots[early] = np.where(absent, -1, window_slots[early])
        if window_runs is not None:
            window_runs[early] = np.where(absent, -1, window_runs[early])

    def history(depth: int, length: int) -> History:
        """Look `depth` tokens back through a ring of `length`, which holds all rows."""
        before = starts[:, None] - np.arange(depth, 0, -1)
        loads = before % length + slots[:, None] * length
        loads[before < 0] = -1
        if cu_rows is None:
            look_back = _look_back_one(num_sequences, depth, device)
        else:
            look_back = put(_look_back(cu_rows, row_seq, depth))
        store = put(row_slots * length + positions % length)
        return History(put(loads.ravel()), look_back, _ascending(num_rows, device)[1], store)

    device_blocks = put(blocks)
    after = positions + 1
    ratios: dict[int, RatioInputs] = {}
    for ratio in layout.ratios:
        per_block = layout.tokens_per_block // ratio
        visible = after // ratio
        emit = np.flatnonzero(visible * ratio == after)
        number = visible[emit] - 1
        place = number // per_block
        entries = blocks[row_seq[emit], place] * per_block + (number - place * per_block)
        seen = visible if last_rows is None else visible[last_rows]
        per_sequence = tuple(seen.tolist())
        ratios[ratio] = RatioInputs(
            visible=put(visible),
            emit_rows=put(emit),
            emit_entries=put(entries),
            emit_starts=put(number * ratio),
            counts=per_sequence,
            blocks=device_blocks,
            per_block=per_block,
            max_visible=max(per_sequence),
        )
    engram = layout.engram_tail
    found = ModelInputs(
        decode=True,
        num_rows=num_rows,
        num_sequences=num_sequences,
        token_ids=put(rows.token_ids),
        positions=put(positions),
        row_seq=device_row_seq,
        cu_rows=tuple(range(num_rows + 1)) if cu_rows is None else tuple(cu_rows.tolist()),
        window_store=put(row_slots * ring + positions % ring),
        window_load=put(np.empty(0, dtype=np.int64)),
        window_slots=put(window_slots),
        window_runs=None if window_runs is None else put(window_runs),
        window_save=None,
        ratios=ratios,
        tail=history(1, layout.tails[0][1].length) if layout.tails else None,
        engram=None if engram is None else history(layout.engram_history, engram.length),
        paged=torch.device(device).type != "cpu",
    )
    put.flush()
    return found


def _decode_rows(sequences: Sequence[SequenceRows]) -> DecodeRows:
    counts = np.array([len(s.token_ids) for s in sequences], dtype=np.int64)
    return DecodeRows(
        slots=np.array([s.slot for s in sequences], dtype=np.int64),
        starts=np.array([s.start for s in sequences], dtype=np.int64),
        counts=None if bool((counts == 1).all()) else counts,
        token_ids=np.fromiter(
            chain.from_iterable(s.token_ids for s in sequences), np.int64, int(counts.sum())
        ),
        blocks=_block_tables(sequences),
        held=np.array([len(s.blocks) for s in sequences], dtype=np.int64),
    )


def _putter(device: torch.device | str) -> Callable[[IntArray], Tensor]:
    """Return what takes an array to a device; on a CPU the tensor shares its memory."""
    if torch.device(device).type == "cpu":
        return torch.from_numpy
    return lambda array: torch.from_numpy(array).to(device)


@lru_cache(maxsize=256)
def _ascending(count: int, device: torch.device | str) -> tuple[IntArray, Tensor]:
    """Return 0, 1, ... on host and device; both are shared."""
    found = np.arange(count)
    return found, _putter(device)(found)


@lru_cache(maxsize=256)
def _look_back_one(num_sequences: int, depth: int, device: torch.device | str) -> Tensor:
    """Return the `rows` of a History in which every sequence has one row."""
    row_seq = np.arange(num_sequences)
    return _putter(device)(_look_back(np.arange(num_sequences + 1), row_seq, depth))


@lru_cache(maxsize=8)
def _turns(window: int, ring: int) -> IntArray:
    """Return [ring, window]: the places of a window that begins at each place of a ring."""
    return (np.arange(ring)[:, None] + np.arange(window)) % ring


def _look_back(cu_rows: IntArray, row_seq: IntArray, depth: int) -> IntArray:
    """Return the `rows` of a History."""
    before = len(cu_rows) - 1
    offset = np.arange(len(row_seq)) - cu_rows[row_seq]
    steps = offset[:, None] - np.arange(depth + 1)
    inside = before * depth + cu_rows[row_seq][:, None] + steps
    return np.where(steps >= 0, inside, row_seq[:, None] * depth + depth + steps)


def _build(
    sequences: Sequence[SequenceRows],
    layout: CacheLayout,
    device: torch.device | str,
    floors: bool,
) -> ModelInputs:
    """Lay out the rows of one half of a prefill step.

    floors  hide positions below each sequence's floor from the windows
    """
    counts = np.array([len(s.token_ids) for s in sequences], dtype=np.int64)
    slots = np.array([s.slot for s in sequences], dtype=np.int64)
    starts = np.array([s.start for s in sequences], dtype=np.int64)
    _check(counts, starts, np.array([len(s.blocks) for s in sequences], dtype=np.int64), layout)
    num_sequences, num_rows = len(sequences), int(counts.sum())
    cu_rows = np.concatenate([[0], np.cumsum(counts)])
    row_seq = np.repeat(np.arange(num_sequences), counts)
    offset = np.arange(num_rows) - cu_rows[row_seq]
    positions = starts[row_seq] + offset
    token_ids = np.fromiter(chain.from_iterable(s.token_ids for s in sequences), np.int64, num_rows)
    any_saves = any(s.saves for s in sequences)

    put = Packer(device)
    window, ring = layout.window, layout.ring_length
    first = np.maximum(positions - window + 1, 0)
    held = first[:, None] + np.arange(window)
    absent = held > positions[:, None]
    back = starts[:, None] - window + np.arange(window)
    floor = np.array([s.floor if floors else 0 for s in sequences], dtype=np.int64)
    absent |= held < floor[row_seq][:, None]
    load = np.where(back >= floor[:, None], slots[:, None] * ring + back % ring, -1).ravel()
    into = held - starts[row_seq][:, None]  # below 0: loaded, else a row of this step
    loaded = (row_seq + 1) * window  # where each sequence's loaded entries end
    new = num_sequences * window + cu_rows[row_seq]
    window_slots = np.where(absent, -1, np.where(into < 0, loaded[:, None], new[:, None]) + into)
    last = offset >= counts[row_seq] - ring
    store = np.where(last, slots[row_seq] * ring + positions % ring, -1)

    def history(depth: int, length: int) -> History:
        """Look `depth` tokens back through a ring of `length`."""
        before = starts[:, None] - depth + np.arange(depth)
        loads = np.where(before >= 0, slots[:, None] * length + before % length, -1).ravel()
        rows = _look_back(cu_rows, row_seq, depth)
        kept = np.nonzero(offset >= counts[row_seq] - length)[0]
        target = slots[row_seq[kept]] * length + positions[kept] % length
        if any_saves:
            more, places = _saved(sequences, cu_rows, depth, length)
            kept, target = np.concatenate([kept, more]), np.concatenate([target, places])
        return History(put(loads), put(rows), put(kept), put(target))

    blocks = _block_tables(sequences)
    device_blocks = put(blocks)
    ratios: dict[int, RatioInputs] = {}
    for ratio in layout.ratios:
        per_block = layout.tokens_per_block // ratio
        visible = (positions + 1) // ratio
        emit = np.nonzero((positions + 1) % ratio == 0)[0]
        number = positions[emit] // ratio
        block = blocks[row_seq[emit], number // per_block]
        ratios[ratio] = RatioInputs(
            visible=put(visible),
            emit_rows=put(emit),
            emit_entries=put(block * per_block + number % per_block),
            emit_starts=put(number * ratio),
            counts=tuple(visible[cu_rows[1:] - 1].tolist()),
            blocks=device_blocks,
            per_block=per_block,
            max_visible=int(visible.max()),
            bases=put(np.concatenate([[0], np.cumsum(visible[cu_rows[1:] - 1])])),
        )
    engram = layout.engram_tail
    saved = _saved(sequences, cu_rows, window, ring) if any_saves else None
    found = ModelInputs(
        decode=False,
        num_rows=num_rows,
        num_sequences=num_sequences,
        token_ids=put(token_ids),
        positions=put(positions),
        row_seq=put(row_seq),
        cu_rows=tuple(cu_rows.tolist()),
        window_store=put(store),
        window_load=put(load),
        window_slots=put(window_slots),
        window_runs=None,
        window_save=(put(saved[0]), put(saved[1])) if saved is not None else None,
        ratios=ratios,
        tail=history(1, layout.tails[0][1].length) if layout.tails else None,
        engram=None if engram is None else history(layout.engram_history, engram.length),
        paged=torch.device(device).type != "cpu",
        window_rows=put(num_sequences * window + np.arange(num_rows)),
    )
    put.flush()
    return found


def _saved(
    sequences: Sequence[SequenceRows], cu_rows: IntArray, depth: int, length: int
) -> tuple[IntArray, IntArray]:
    """Return which rows a checkpoint's ring of `length` keeps as its last `depth`, and where."""
    rows: list[IntArray] = [np.empty(0, dtype=np.int64)]
    entries: list[IntArray] = [np.empty(0, dtype=np.int64)]
    for first, sequence in zip(cu_rows, sequences, strict=False):
        for end, slot in sequence.saves:
            held = np.arange(max(end - depth, sequence.start), end)
            rows.append(first + held - sequence.start)
            entries.append(slot * length + held % length)
    return np.concatenate(rows), np.concatenate(entries)


def _check(
    counts: IntArray | None,
    starts: IntArray,
    held: IntArray,
    layout: CacheLayout,
    decode: bool = False,
) -> IntArray:
    """Refuse steps that cannot be laid out; return how many blocks each sequence needs."""
    if not len(starts) or (counts is not None and int(counts.min()) < 1):
        raise ShapeError("a step needs at least one sequence and one row for each")
    if decode and counts is not None and int(counts.max()) > layout.max_rollback + 1:
        raise ShapeError(
            f"a decode step of {int(counts.max())} rows needs rings that can step back: the caches "
            f"were laid out for max_rollback {layout.max_rollback}"
        )
    ends = starts + (1 if counts is None else counts)
    needed = (ends + (layout.tokens_per_block - 1)) // layout.tokens_per_block
    short = np.flatnonzero(held < needed)
    if short.size:
        b = short[0]
        raise ShapeError(
            f"{ends[b]} positions need {needed[b]} blocks of {layout.tokens_per_block}, the block "
            f"table has {held[b]}"
        )
    return needed


def _block_tables(sequences: Sequence[SequenceRows]) -> IntArray:
    """Return the block tables [B, width], padded with 0."""
    widths = np.array([len(s.blocks) for s in sequences], dtype=np.int64)
    tables = np.zeros((len(sequences), int(widths.max(initial=0))), dtype=np.int64)
    flat = np.fromiter(
        chain.from_iterable(s.blocks for s in sequences), np.int64, int(widths.sum())
    )
    tables[np.arange(tables.shape[1]) < widths[:, None]] = flat
    return tables
