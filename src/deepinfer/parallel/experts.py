"""Expert parallelism: rows to the ranks that hold their experts, and back.

Every layer has P physical slots, P / N on each of N ranks. `dispatch` sends a row once to each rank
that needs it, with its slots and weights; `combine` returns one output row for every choice,
unsummed, so that the sum is formed at home in an order that no placement changes. Back ends differ
in how they move bytes and in nothing else.

Source: parallelism specification, 3.1 and 3.5.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from deepinfer.errors import ConfigError, UnsupportedError
from deepinfer.kernels.grouping import group as group_choices
from deepinfer.kernels.linear import DenseWeight
from deepinfer.kernels.ops import Ops
from deepinfer.kernels.quantize import act8, decode_e4m3, decode_ue8m0, repeat_groups
from deepinfer.parallel.comm import Group, Waitable
from deepinfer.parallel.placement import Placement, initial_placement

__all__ = [
    "BackEnd",
    "Exact",
    "ExpertExchange",
    "ExpertMaps",
    "ExpertRanks",
    "Fixed",
    "Gathered",
    "LayerExperts",
    "Pending",
    "Received",
    "RowShape",
    "Wire",
    "make_exchange",
]

_log = logging.getLogger(__name__)

SPREAD: Final = 23333  # a row's copy of an expert: neighbouring rows take different ones
_ALIGN: Final = 16  # bytes of a wire row


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMaps:
    """Which slot holds which expert of one layer, changed in place between two steps.

    phy2log    [P]     int64 expert of each slot
    log2phy    [E, X]  int64 slots of each expert, ascending, padded with -1
    copies     [E]     int64, at least 1
    num_local  slots of a rank; slots [place * num_local, (place + 1) * num_local) are its own
    place      of this rank in its expert group
    """

    phy2log: Tensor
    log2phy: Tensor
    copies: Tensor
    num_local: int
    place: int

    @classmethod
    def of(cls, placement: Placement, layer: int, place: int, device: torch.device) -> ExpertMaps:
        """Return a layer's maps; there is room for a copy on every rank."""
        num_slots, num_ranks = placement.num_slots, placement.num_ranks
        width = min(num_ranks, num_slots - placement.num_experts + 1)
        maps = cls(
            phy2log=torch.zeros(num_slots, dtype=torch.int64, device=device),
            log2phy=torch.zeros(placement.num_experts, width, dtype=torch.int64, device=device),
            copies=torch.zeros(placement.num_experts, dtype=torch.int64, device=device),
            num_local=placement.slots_per_rank,
            place=place,
        )
        maps.install(placement.slots[layer], placement.physical[layer], placement.counts[layer])
        return maps

    def install(self, phy2log: ArrayLike, log2phy: ArrayLike, copies: ArrayLike) -> None:
        """Replace the maps' values, padding `log2phy` to the room there is."""
        slots = torch.tensor(np.asarray(log2phy), dtype=torch.int64)
        self.phy2log.copy_(torch.tensor(np.asarray(phy2log)))
        self.log2phy.fill_(-1)
        self.log2phy[:, : slots.shape[1]].copy_(slots)
        self.copies.copy_(torch.tensor(np.asarray(copies)))

    @property
    def local_experts(self) -> list[int]:
        """The experts of this rank's slots."""
        first = self.place * self.num_local
        return [int(e) for e in self.phy2log[first : first + self.num_local].tolist()]

    def slots(self, chosen: Tensor) -> Tensor:
        """Return a slot for each choice [T, k]; -1 stays.

        Copies hold the same bytes, so which one serves changes no bit.
        """
        if self.log2phy.shape[1] == 1:
            found = self.log2phy[:, 0][chosen.clamp(min=0)]
        else:
            safe = chosen.clamp(min=0)
            rows = torch.arange(chosen.shape[0], device=chosen.device).unsqueeze(1)
            found = self.log2phy[safe, (self.place + rows * SPREAD) % self.copies[safe]]
        return torch.where(chosen < 0, -1, found)


class Received(NamedTuple):
    """Rows for this rank's experts, and which of its slots each is for.

    values   [U, C] rows as they came, dtype of activations; those that nothing points to hold
             anything
    rows     [R] int64, the row of each choice, sorted by local slot; those behind the last run are
             of no slot and count for nothing
    weight   [R] fp32
    offsets  [n+1] int64: choices of slot i are offsets[i]..offsets[i+1]-1
    """

    values: Tensor
    rows: Tensor
    weight: Tensor
    offsets: Tensor


class Pending(Protocol):
    """A dispatch under way."""

    def wait(self) -> Received:
        """Return this rank's rows; asked once."""
        ...


class ExpertExchange(Protocol):
    """Moves rows between the ranks of an expert group; every rank calls it in the same order.

    flows  whether the host waits for nothing, and shapes depend on `begin` alone, which need not be
           the same everywhere
    """

    @property
    def flows(self) -> bool:
        """See above."""
        ...

    def begin(self, most_rows: int) -> None:
        """Say how many rows the fullest rank has in the layers to come."""
        ...

    def check(self) -> None:
        """Raise GroupBroken if a rank did not come in what has ended on the device."""
        ...

    def dispatch(self, x: Tensor, slots: Tensor, weight: Tensor, num_local: int) -> Pending:
        """Start sending rows.

        x      [T, C] bf16 or fp32; T may be 0
        slots  [T, k] int64, -1 sends nothing; weight [T, k] fp32
        """
        ...

    def combine(self, pending: Pending, outputs: Tensor) -> Tensor:
        """Return the outputs [T, k, C] of this rank's own rows; `outputs` [R, C] are of the rows
        received. Choices of -1 have zeros.
        """
        ...


@dataclass(slots=True, eq=False)
class LayerExperts:
    """What a layer of experts needs to know about ranks.

    counts   [E] int64 rows that chose each expert here since they were last set to zero
    drafts   whether the layer is a draft block's
    """

    maps: ExpertMaps
    exchange: ExpertExchange
    counts: Tensor
    drafts: bool = False

    def dispatch(self, x: Tensor, slots: Tensor, weight: Tensor) -> Pending:
        """Start sending x [T, C] to slots [T, k], as `choose` or `route` returns them."""
        return self.exchange.dispatch(x, slots, weight, self.maps.num_local)

    def route(
        self,
        ops: Ops,
        x: Tensor,
        gate: DenseWeight,
        bias: Tensor,
        num_active: int,
        scaling: float,
        live: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Equal `ops.route` and `choose`, in one launch where the router's kernel takes a call."""
        if ops.choices["route"].name == "cuda":
            from deepinfer.kernels.router import sm90

            if sm90.accepts(x, gate, bias, num_active):
                maps = self.maps
                slots = sm90.SlotMaps(maps.log2phy, maps.copies, self.counts, maps.place, SPREAD)
                return sm90.route_slots(x, gate, bias, num_active, scaling, slots, live)
        return self.choose(*ops.route(x, gate, bias, num_active, scaling), live)

    def choose(
        self, chosen: Tensor, weight: Tensor, live: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Count the choices [T, k]; return their slots, weights and places [T, k].

        live  [T] bool: rows that are sent, None = all
        Choices come out in ascending order of experts, and a row's terms come back in it. Places
        are where those add up, as `grouping.combine` takes it.
        """
        maps = self.maps
        if chosen.device.type == "cuda" and find_spec("triton"):
            from deepinfer.kernels.expert_exchange import triton as kernels

            return kernels.choose_slots(
                chosen, weight, live, maps.log2phy, maps.copies, self.counts, maps.place, SPREAD
            )
        if live is not None:
            chosen = chosen.masked_fill(~live.unsqueeze(1), -1)
        if chosen.shape[0]:
            real = (chosen >= 0).to(torch.int64)
            self.counts.index_add_(0, chosen.clamp(min=0).flatten(), real.flatten())
        chosen, order = chosen.sort(dim=1)
        places = torch.arange(chosen.numel(), device=chosen.device).view(chosen.shape)
        places = places.masked_fill(chosen < 0, -1)
        return maps.slots(chosen), weight.gather(1, order), places


class ExpertRanks:
    """What the layers of one rank's model need: the exchange, and maps for each, made as they load.

    copies  experts of a layer held twice, rounded up so that ranks hold equally many
    layers  in the order of loading: the backbone's, then the draft blocks'
    """

    def __init__(
        self, group: Group, device: torch.device, exchange: ExpertExchange, copies: int = 0
    ) -> None:
        self.group = group
        self.device = device
        self.exchange = exchange
        self.copies = copies
        self.layers: list[LayerExperts] = []

    def layer(self, num_experts: int, drafts: bool) -> LayerExperts:
        """Return what the next layer needs: experts in order, then copies of 0, 1, ..."""
        placement = initial_placement(1, num_experts, self.group.size, self.copies)
        maps = ExpertMaps.of(placement, 0, self.group.place, self.device)
        counts = torch.zeros(num_experts, dtype=torch.int64, device=self.device)
        layer = LayerExperts(maps, self.exchange, counts, drafts)
        self.layers.append(layer)
        return layer


class Wire:
    """Rows as bytes: slots int32 [k], weights fp32 [k], then codes and scales, or values.

    quantize  send ACT8: the receiver gets what `round_trip` would have given, bit for bit
    """

    def __init__(self, quantize: bool) -> None:
        self.quantize = quantize

    def pack(self, x: Tensor, slots: Tensor, weight: Tensor) -> Tensor:
        """Return [T, W] uint8."""
        parts = [slots.to(torch.int32).view(torch.uint8), weight.contiguous().view(torch.uint8)]
        if self.quantize:
            codes, scales = act8(x)
            parts += [codes.view(torch.uint8), scales]
        else:
            parts.append(x.contiguous().view(torch.uint8))
        width = sum(part.shape[1] for part in parts)
        parts.append(parts[0].new_zeros((x.shape[0], -width % _ALIGN)))
        return torch.cat(parts, dim=1)

    def empty(self, like: Tensor, num_active: int) -> Tensor:
        """Return a row [1, W] that no expert wants."""
        slots = torch.full((1, num_active), -1, device=like.device)
        weight = torch.zeros(1, num_active, device=like.device)
        return self.pack(like.new_zeros(1, like.shape[1]), slots, weight)

    def width(self, num_columns: int, num_active: int, dtype: torch.dtype) -> int:
        """Return the bytes of a row."""
        value = num_columns + num_columns // 32 if self.quantize else num_columns * dtype.itemsize
        return -(-(value + 8 * num_active) // _ALIGN) * _ALIGN

    def meta(self, wire: Tensor, num_active: int) -> tuple[Tensor, Tensor]:
        """Return slots [U, k] int64 and weights [U, k] fp32 of rows."""
        middle, end = 4 * num_active, 8 * num_active
        slots = wire[:, :middle].contiguous().view(torch.int32)
        return slots.long(), wire[:, middle:end].contiguous().view(torch.float32)

    def rows(self, wire: Tensor, like: Tensor, num_active: int) -> Tensor:
        """Return the values [U, C] of rows, in the dtype of `like` [T, C]."""
        begin, columns = 8 * num_active, like.shape[1]
        if not self.quantize:
            data = wire[:, begin : begin + columns * like.element_size()].contiguous()
            return data.view(like.dtype)
        middle = begin + columns
        codes = wire[:, begin:middle].contiguous()
        scales = wire[:, middle : middle + columns // 32].contiguous()
        return repeat_groups(decode_e4m3(codes), decode_ue8m0(scales)).to(like.dtype)


class _Sorted(NamedTuple):
    """Received wire rows U, expanded to one for each choice and sorted by slot.

    place  [U, k] where a choice's row stands among the sorted ones, -1 = not of this rank
    """

    place: Tensor
    received: Received


def _sort(wire: Wire, data: Tensor, like: Tensor, k: int, place: int, num_local: int) -> _Sorted:
    """Expand and sort received wire rows [U, W]; nothing here waits for a device."""
    slots, weights = wire.meta(data, k)
    groups = group_choices(slots - place * num_local, weights, num_local)
    rows, weights = groups.rows, groups.weights
    if data.device.type == "cpu":  # elsewhere a look at the count would wait for the device
        count = int(groups.offsets[-1])
        rows, weights = rows[:count], weights[:count]
    values = wire.rows(data, like, k)
    return _Sorted(groups.place, Received(values, rows, weights, groups.offsets))


def _destinations(slots: Tensor, num_local: int, size: int) -> tuple[Tensor, Tensor]:
    """Return the rank of each choice [T, k], and which rows each rank needs [T, size]."""
    ranks = torch.where(slots < 0, -1, slots // num_local)
    needed = torch.zeros(slots.shape[0], size + 1, dtype=torch.bool, device=slots.device)
    needed.scatter_(1, torch.where(ranks < 0, size, ranks), True)
    return ranks, needed[:, :size]


class BackEnd:
    """What the back ends share: the group, and rows as bytes."""

    flows = False

    def __init__(self, group: Group, quantize: bool) -> None:
        self.group = group
        self.wire = Wire(quantize)
        self.most_rows = 0

    def begin(self, most_rows: int) -> None:
        """Note how many rows the fullest rank has."""
        self.most_rows = most_rows

    def check(self) -> None:
        """Do nothing: a collective that breaks raises by itself."""


class _Spread:
    """A dispatch by exact counts."""

    def __init__(self, owner: Exact, x: Tensor, slots: Tensor, weight: Tensor, n: int) -> None:
        group, self._owner = owner.group, owner
        self.x, self.slots, self.num_local = x, slots, n
        self.ranks, needed = _destinations(slots, n, group.size)
        counts = needed.sum(0)
        incoming = torch.empty_like(counts)
        counted = group.all_to_all(incoming, counts)
        rows = needed.T.nonzero()[:, 1]
        outgoing = owner.wire.pack(x, slots, weight)[rows]
        counted.wait()
        self.given, self.taken = counts.tolist(), incoming.tolist()
        self._data = outgoing.new_empty((sum(self.taken), outgoing.shape[1]))
        self._work: Waitable = group.all_to_all(self._data, outgoing, self.taken, self.given)
        self.sorted: _Sorted | None = None

    def wait(self) -> Received:
        self._work.wait()
        group = self._owner.group
        k = self.slots.shape[1]
        self.sorted = _sort(self._owner.wire, self._data, self.x, k, group.place, self.num_local)
        del self._data
        return self.sorted.received


class Exact(BackEnd):
    """Exact counts: they travel first, then uneven pieces; over gloo on a CPU, over NCCL on GPUs,
    where the host waits for the counts.
    """

    def dispatch(self, x: Tensor, slots: Tensor, weight: Tensor, num_local: int) -> _Spread:
        """Start sending rows."""
        return _Spread(self, x, slots, weight, num_local)

    def combine(self, pending: Pending, outputs: Tensor) -> Tensor:
        """Return every choice's output row to its source."""
        assert isinstance(pending, _Spread) and pending.sorted is not None
        group, place = self.group, pending.sorted.place
        held = place >= 0
        back = outputs[place[held]]  # row by row as they came, choice by choice
        ends = torch.tensor([0, *pending.taken]).cumsum(0).tolist()
        sums = [0, *held.sum(1).cumsum(0).tolist()]
        given = [sums[end] - sums[begin] for begin, end in pairwise(ends)]
        flat = pending.ranks.flatten()
        taken = [int((flat == rank).sum()) for rank in range(group.size)]
        arrived = outputs.new_empty((sum(taken), outputs.shape[1]))
        group.all_to_all(arrived, back, taken, given).wait()
        terms = outputs.new_zeros((*pending.slots.shape, pending.x.shape[1]))
        wanted = torch.nonzero(flat >= 0).flatten()
        terms.flatten(0, 1)[wanted[torch.argsort(flat[wanted], stable=True)]] = arrived
        return terms


def _spread(outputs: Tensor, place: Tensor) -> Tensor:
    """Return the rows of all choices [U, k, C]; zeros for those of other ranks."""
    if not outputs.shape[0]:
        return outputs.new_zeros((*place.shape, outputs.shape[1]))
    return outputs[place.clamp(min=0)].masked_fill((place < 0).unsqueeze(2), 0.0)


class _Slotted:
    """A dispatch of at most `capacity` rows to each rank, in as many passes as that takes."""

    def __init__(self, owner: Fixed, x: Tensor, slots: Tensor, weight: Tensor, n: int) -> None:
        group, self._owner = owner.group, owner
        self.x, self.slots, self.num_local = x, slots, n
        self.ranks, needed = _destinations(slots, n, group.size)
        self.place = torch.cumsum(needed, 0) - 1  # of a row among those for a rank
        self.capacity, self.passes = owner.plan(needed)
        room = self.capacity * self.passes
        wire = owner.wire.pack(x, slots, weight)
        first = torch.arange(group.size, device=x.device) * room
        target = torch.where(needed, first + self.place, group.size * room).flatten()
        outgoing = owner.wire.empty(x, slots.shape[1]).repeat(group.size * room + 1, 1)
        outgoing[target] = wire.repeat_interleave(group.size, 0)  # the last row takes what nobody
        outgoing = outgoing[:-1]  # wants
        shape = (group.size, self.passes, self.capacity, outgoing.shape[1])
        outgoing = outgoing.view(shape).transpose(0, 1).contiguous()
        self._data = torch.empty_like(outgoing)
        self._work = [
            group.all_to_all(into, out) for into, out in zip(self._data, outgoing, strict=True)
        ]
        self.sorted: _Sorted | None = None

    def wait(self) -> Received:
        for work in self._work:
            work.wait()
        data = self._data.flatten(0, 2)
        place, k = self._owner.group.place, self.slots.shape[1]
        self.sorted = _sort(self._owner.wire, data, self.x, k, place, self.num_local)
        del self._data
        return self.sorted.received


class Fixed(BackEnd):
    """Equal pieces of so many rows that all fit: no counts travel, and shapes depend on `begin`
    alone.

    factor  0 makes the capacity the rows of the fullest rank, which nothing exceeds. Above, it is
            that many times what even routing sends to a rank; then the fullest pair is agreed on in
            every layer, the host waits for it, and what is too much goes in further passes.
    """

    def __init__(self, group: Group, quantize: bool, factor: float = 0.0) -> None:
        super().__init__(group, quantize)
        self.factor = factor

    def plan(self, needed: Tensor) -> tuple[int, int]:
        """Return the rows of a piece, and in how many pieces rows go to each rank."""
        if not self.factor:
            return max(1, self.most_rows), 1
        capacity = max(1, min(self.most_rows, int(self.factor * self.most_rows / self.group.size)))
        most = needed.sum(0).amax().to(torch.int32).view(1)
        fullest = int(self.group.all_reduce(most, largest=True))
        return capacity, max(1, -(-fullest // capacity))

    def dispatch(self, x: Tensor, slots: Tensor, weight: Tensor, num_local: int) -> _Slotted:
        """Start sending rows."""
        return _Slotted(self, x, slots, weight, num_local)

    def combine(self, pending: Pending, outputs: Tensor) -> Tensor:
        """Return every choice's output row to its source."""
        assert isinstance(pending, _Slotted) and pending.sorted is not None
        group, k, columns = self.group, pending.slots.shape[1], pending.x.shape[1]
        back = _spread(outputs, pending.sorted.place)
        back = back.view(pending.passes, group.size, pending.capacity, k, columns)
        arrived = torch.empty_like(back)
        for work in [group.all_to_all(i, o) for i, o in zip(arrived, back, strict=True)]:
            work.wait()
        rank = pending.ranks.clamp(min=0)
        place = pending.place.gather(1, rank).clamp(min=0)
        turn, within = place // pending.capacity, place % pending.capacity
        at = (turn * group.size + rank) * pending.capacity + within
        choice = torch.arange(k, device=at.device)
        terms = arrived.view(-1, k, columns)[at, choice]
        return terms.masked_fill((pending.ranks < 0).unsqueeze(2), 0.0)


class _All:
    """A dispatch to everybody."""

    def __init__(self, owner: Gathered, x: Tensor, slots: Tensor, weight: Tensor, n: int) -> None:
        self._owner = owner
        self.x, self.slots, self.num_local = x, slots, n
        wire = owner.wire.pack(x, slots, weight)
        missing = max(1, owner.most_rows) - x.shape[0]
        empty = owner.wire.empty(x, slots.shape[1])
        self._data = owner.group.all_gather(torch.cat([wire, empty.expand(missing, -1)]))
        self.sorted: _Sorted | None = None

    def wait(self) -> Received:
        data = self._data.flatten(0, 1)
        place, k = self._owner.group.place, self.slots.shape[1]
        self.sorted = _sort(self._owner.wire, data, self.x, k, place, self.num_local)
        del self._data
        return self.sorted.received


class Gathered(BackEnd):
    """All rows to all ranks, and a sum over ranks of rows of which one rank has each.

    The sum adds bit patterns as integers: all but one are zero, so it is exact.
    """

    def dispatch(self, x: Tensor, slots: Tensor, weight: Tensor, num_local: int) -> _All:
        """Gather everybody's rows."""
        return _All(self, x, slots, weight, num_local)

    def combine(self, pending: Pending, outputs: Tensor) -> Tensor:
        """Return every choice's output row to its source."""
        assert isinstance(pending, _All) and pending.sorted is not None
        group = self.group
        num_rows, k = pending.slots.shape
        most = max(1, self.most_rows)
        back = _spread(outputs, pending.sorted.place)
        words = back.view(torch.int32).view(group.size * most, -1)
        mine = words.new_empty((most, words.shape[1]))
        group.sum_scatter(mine, words).wait()
        return mine[:num_rows].view(outputs.dtype).view(num_rows, k, pending.x.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """What back ends with buffers of their own have to know.

    capacity  most rows of a rank in a step
    columns   values of a row, of `dtype`
    active    most choices of a row
    experts   most of a layer, copies included
    """

    capacity: int
    columns: int
    active: int
    experts: int
    dtype: torch.dtype


def make_exchange(
    name: str,
    group: Group,
    quantize: bool,
    factor: float = 0.0,
    shape: RowShape | None = None,
    store: Store | None = None,
    device: torch.device | None = None,
    timeout_s: float = 120.0,
) -> ExpertExchange:
    """Return a back end by its name in `parallel.backend`; every rank of the group calls it.

    name                  auto is symm where it can run, on GPUs of one host, and else exact
    shape, store, device  for those with buffers of their own
    timeout_s             how long kernels wait for another rank
    Raises ConfigError for other names and UnsupportedError where a back end cannot run.
    """
    on_card = device is not None and device.type == "cuda"
    if name == "auto" and on_card and shape is not None and store is not None:
        try:
            return make_exchange("symm", group, quantize, factor, shape, store, device, timeout_s)
        except UnsupportedError as error:
            _log.info("%s", error)
    if name in ("auto", "exact"):
        return Exact(group, quantize)
    if name == "fixed":
        return Fixed(group, quantize, factor)
    if name == "gathered":
        return Gathered(group, quantize)
    if name not in ("symm", "deepep"):
        raise ConfigError(
            f"parallel.backend: found {name!r}, expected auto, exact, fixed, gathered, symm or "
            "deepep"
        )
    if not on_card or shape is None or store is None or device is None:
        raise UnsupportedError(
            f"parallel.backend {name} needs GPUs: take exact, fixed or gathered on a CPU"
        )
    if name == "deepep":
        from deepinfer.parallel.deepep import DeepEp

        return DeepEp(group, shape)
    from deepinfer.parallel.symm import symmetric

    return symmetric(group, shape, quantize, store, device, timeout_s)
