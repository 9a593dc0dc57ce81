"""Experts that move while requests run: count loads, plan aside, copy weights between steps.

Everything happens between two steps, on the thread that runs them, and at the same step on every
rank of an expert group: steps are counted, and whatever can take longer on one rank (a plan) is
waited for by asking all. So maps change on all ranks at once, and a step sees one placement.

    collect   a row of loads for every step; after `interval` of a kind all ranks add theirs up
    plan      aside, the same on every rank; ranks compare what came out before anything moves
    move      stage by stage: weights travel into spare memory while a step runs, and at the next
              step every rank copies them into their slots and installs the maps; stages are as far
              apart as a limit on what a rank receives a second asks for

Source: parallelism specification, 4.2 and 4.4.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.errors import DeepInferError
from deepinfer.parallel.balance import LoadWindow
from deepinfer.parallel.comm import Group, Waitable
from deepinfer.parallel.experts import LayerExperts
from deepinfer.parallel.migrate import Stage, apply_stage
from deepinfer.parallel.moves import Moves, plan_all
from deepinfer.parallel.placement import Placement, initial_placement

__all__ = ["BalancedLayer", "LiveBalancer"]

_ASK_STEPS: Final = 4
"""Steps between two questions whether every rank has planned."""
_MOST_PAUSE: Final = 1000
"""Most steps between two stages."""
_RAREST: Final = 8
"""By how much plans that brought nothing put the next one off, at most."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class BalancedLayer:
    """One layer's experts on this rank.

    parts    tensors [n, ...] of the rank's n slots: what has to travel
    derived  called with a slot whose parts have changed: brings up to date what is kept beside them
    """

    experts: LayerExperts
    parts: tuple[Tensor, ...]
    derived: Callable[[int], None]


class _Balanced:
    """Layers of equally many experts: the backbone's, or those of the draft blocks."""

    def __init__(self, layers: Sequence[BalancedLayer], num_ranks: int, window: int) -> None:
        self.layers = layers
        first = layers[0].experts
        self.num_experts = int(first.counts.shape[0])
        slots = int(first.maps.phy2log.shape[0])
        extra = slots - self.num_experts
        self.placement = initial_placement(len(layers), self.num_experts, num_ranks, extra)
        # One table for all layers, which steps add to, and rings of the last decode steps and the
        # last prefill steps: their loads differ.
        table = first.counts.new_zeros(len(layers), self.num_experts)
        for row, layer in zip(table, layers, strict=True):
            layer.experts.counts = row
        self.table = table
        self.rings = {kind: table.new_zeros(window, *table.shape) for kind in (True, False)}

    def install(self, stage: Stage) -> None:
        """Change the maps of a stage's layers, in place."""
        self.placement = placement = apply_stage(self.placement, stage)
        for number in sorted({move.layer for move in stage}):
            maps = self.layers[number].experts.maps
            maps.install(
                placement.slots[number], placement.physical[number], placement.counts[number]
            )


class LiveBalancer:
    """One rank's part of moving experts. `between` is called before every step that ranks take
    together, on all of them.

    window    steps that a plan is made from: of decode or of prefill, which differ
    interval  steps of either kind between two plans; the first comes after a window. The kind that
              has that many first is planned for. A plan that moves nothing doubles it, up to 8
              times, and one that does sets it back
    horizon   steps within which moves must pay
    spare     experts for which a rank keeps spare memory
    bytes_s   bytes a second that a rank receives at most while experts move, on average; 0 = no
              limit
    control   ranks of the expert group, on the host; data  the same, where weights are
    """

    def __init__(
        self,
        layers: Sequence[BalancedLayer],
        control: Group,
        data: Group,
        *,
        window: int = 128,
        interval: int = 2000,
        horizon: int = 2000,
        spare: int = 1,
        bytes_s: float = 0.0,
    ) -> None:
        self._control, self._data = control, data
        self._window, self._interval = window, max(interval, window)
        self._horizon, self._spare, self._bytes_s = horizon, spare, bytes_s
        self._rarer = 1
        self._pause = 0  # steps until the next stage
        self._since = time.monotonic(), 0  # when the last plan began, and at which step
        self._step_s = 0.0
        by_size: dict[tuple[int, int, bool], list[BalancedLayer]] = {}
        for layer in layers:
            maps = layer.experts.maps
            size = int(layer.experts.counts.shape[0]), int(maps.phy2log.shape[0])
            by_size.setdefault((*size, layer.experts.drafts), []).append(layer)
        self._groups = [_Balanced(part, control.size, window) for part in by_size.values()]
        self._counted = {True: 0, False: 0}  # decode and prefill steps since the last plan
        self._recorded = {True: 0, False: 0}
        self._steps = 0
        self._thread: threading.Thread | None = None
        self._plans: list[Moves] | None = None
        self._failure: BaseException | None = None
        self._stages: list[tuple[_Balanced, Stage]] = []
        self._under_way: list[tuple[BalancedLayer, int, Tensor, Waitable]] = []
        self._sending: list[tuple[Tensor, Waitable]] = []
        self._buffers: list[Tensor] = []
        self.num_plans = self.num_moves = self.num_adopted = 0
        self._last: list[tuple[float, float]] = []

    def summary(self) -> dict[str, object]:
        """Return what has happened so far, ready for JSON."""
        return {
            "plans": self.num_plans,
            "adopted": self.num_adopted,
            "moves": self.num_moves,
            "stages_left": len(self._stages),
            "placements": [group.placement.digest for group in self._groups],
            "rows_of_the_busiest_rank": [list(pair) for pair in self._last],
        }

    @property
    def placements(self) -> list[Placement]:
        """The placements in use, the backbone's first."""
        return [group.placement for group in self._groups]

    def between(self, was_decode: bool) -> None:
        """Do what is due between two steps.

        was_decode  the step before extended sequences, it did not fill from prompts
        Raises DeepInferError when ranks have planned differently, before anything moves.
        """
        self._steps += 1
        self._record(was_decode)
        if self._under_way or self._sending or self._stages:
            self._move()
        elif self._thread is not None:
            if self._steps % _ASK_STEPS == 0:
                self._ask()
        else:
            wanted = self._interval * self._rarer if self.num_plans else self._window
            for kind in (True, False):
                if self._counted[kind] >= wanted and self._thread is None:
                    self._start_planning(kind)

    def _record(self, was_decode: bool) -> None:
        """Keep the counts of the step before."""
        is_step = self._steps > 1  # before the first one only rehearsals have counted
        for group in self._groups:
            if is_step:
                at = self._recorded[was_decode] % self._window
                group.rings[was_decode][at].copy_(group.table)
            group.table.zero_()
        if not is_step:
            return
        self._recorded[was_decode] += 1
        self._counted[was_decode] += 1

    def _start_planning(self, kind: bool) -> None:
        """Add the counts of all ranks up, of decode steps or of prefill steps, and plan aside."""
        self._counted = {True: 0, False: 0}
        self._since = time.monotonic(), self._steps
        self.num_plans += 1
        work: list[tuple[Placement, LoadWindow]] = []
        for group in self._groups:
            rings = group.rings[kind].cpu()
            self._control.all_reduce(rings)
            window = LoadWindow(self._window, len(group.layers), group.num_experts)
            loads: NDArray[np.int64] = rings.numpy()
            oldest = self._recorded[kind] % self._window
            for step in range(self._window):
                window.add(loads[(oldest + step) % self._window])
            work.append((group.placement, window))

        def plan() -> None:
            try:
                self._plans = plan_all(work, self._horizon, self._spare)
            except BaseException as error:
                self._failure = error

        self._thread = threading.Thread(target=plan, name="expert plans", daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        """Ask whether every rank has planned; begin to move when all have planned the same."""
        if self._failure is not None:
            raise self._failure
        done = self._thread is not None and not self._thread.is_alive()
        plans = self._plans if done else None
        digest = 0 if plans is None else _digest(plans)
        began, at = self._since
        step_ns = round(1e9 * (time.monotonic() - began) / max(1, self._steps - at))
        mine = torch.tensor([int(done), digest, step_ns], dtype=torch.int64)
        told = self._control.all_gather(mine)
        if not bool(told[:, 0].all()):
            return
        assert plans is not None
        self._thread = self._plans = None
        if len({int(value) for value in told[:, 1]}) > 1:
            raise DeepInferError(
                "ranks have planned the placement of experts differently, nothing was moved: their "
                f"plans are {[f'{int(value):x}' for value in told[:, 1]]}"
            )
        self._step_s = 1e-9 * int(told[:, 2].min())  # the same everywhere
        self._last = [(plan.rows_now, plan.rows_planned) for plan in plans]
        for group, plan in zip(self._groups, plans, strict=True):
            self._stages += [(group, stage) for stage in plan.stages]
        adopted = any(plan.stages for plan in plans)
        self.num_adopted += adopted
        self._rarer = 1 if adopted else min(_RAREST, 2 * self._rarer)
        for number, plan in enumerate(plans):
            _log.info(
                "experts, group %d: the busiest rank has %.0f rows a step, planned %.0f; %d stages",
                number, plan.rows_now, plan.rows_planned, len(plan.stages),
            )  # fmt: skip

    def _move(self) -> None:
        """Commit the stage that has travelled, and send the next."""
        if self._under_way or self._sending:
            group, stage = self._stages.pop(0)
            for layer, slot, buffer, work in self._under_way:
                work.wait()
                _unpack(buffer, layer.parts, slot)
                layer.derived(slot)
            for _, work in self._sending:
                work.wait()
            self._under_way, self._sending = [], []
            group.install(stage)
            self.num_moves += len(stage)
            self._pause = self._pause_behind(group, stage)
        if not self._stages:
            return
        if self._pause:
            self._pause -= 1
            return
        group, stage = self._stages[0]
        place, size = self._data.place, group.placement.slots_per_rank
        idle = True
        taken = 0
        for move in stage:
            source, target = move.source // size, move.target // size
            layer = group.layers[move.layer]
            if source == place:
                packed = _pack(layer.parts, move.source % size)
                self._sending.append((packed, self._data.send(packed, target)))
                idle = False
            if target == place:
                buffer = self._buffer(taken, layer.parts)
                taken += 1
                work = self._data.receive(buffer, source)
                self._under_way.append((layer, move.target % size, buffer, work))
                idle = False
        if idle:  # others move in this stage: its maps change here at the same step
            self._sending.append((torch.empty(0), _NOTHING))

    def _pause_behind(self, group: _Balanced, stage: Stage) -> int:
        """Return how many steps pass without a stage, the same on every rank."""
        if not self._bytes_s or not self._step_s:
            return 0
        received: dict[int, int] = {}
        for move in stage:
            rank = move.target // group.placement.slots_per_rank
            size = _slot_bytes(group.layers[move.layer].parts)
            received[rank] = received.get(rank, 0) + size
        steps = math.ceil(max(received.values()) / (self._bytes_s * self._step_s))
        return min(_MOST_PAUSE, max(0, steps - 1))

    def _buffer(self, number: int, parts: Sequence[Tensor]) -> Tensor:
        """Return spare memory for one expert."""
        size = _slot_bytes(parts)
        while len(self._buffers) <= number:
            self._buffers.append(parts[0].new_empty(0, dtype=torch.uint8))
        if self._buffers[number].shape[0] < size:
            self._buffers[number] = parts[0].new_empty(size, dtype=torch.uint8)
        return self._buffers[number][:size]


def _digest(plans: Sequence[Moves]) -> int:
    """Return 60 bits of what is planned."""
    told = repr([(plan.after.digest, plan.stages) for plan in plans])
    return int(hashlib.blake2b(told.encode(), digest_size=8).hexdigest()[:15], 16)


class _Nothing:
    def wait(self) -> None:
        """Return."""


_NOTHING: Final = _Nothing()


def _slot_bytes(parts: Sequence[Tensor]) -> int:
    return sum(part[0].numel() * part.element_size() for part in parts)


def _pack(parts: Sequence[Tensor], slot: int) -> Tensor:
    """Return one slot's bytes."""
    return torch.cat([part[slot].contiguous().view(-1).view(torch.uint8) for part in parts])


def _unpack(buffer: Tensor, parts: Sequence[Tensor], slot: int) -> None:
    """Put bytes into a slot, in place."""
    begin = 0
    for part in parts:
        target = part[slot]
        size = target.numel() * target.element_size()
        piece = buffer[begin : begin + size]
        target.copy_(piece.clone().view(target.dtype).view(target.shape))
        begin += size
