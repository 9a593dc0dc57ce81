"""Which copies of which experts each rank holds: loads in, a placement out (pure).

A step waits in every layer for the rank with the most rows, so a plan is judged by the sum of these
peaks over steps and layers. Everything that decides is integer arithmetic on summed counts, ties go
to the lower index: ranks that see the same counts make the same plan, and `Placement.digest` shows
it. Moving the weights is the part of `migrate.py` and `live.py`.

Source: the published balancer's two policies (sum-greedy, optionally inside nodes; step vectors),
with copies of an expert kept on distinct ranks, shrinkage towards the window's mean, exchanges
behind the greedy placement (for the peaks seen, then for even loads), and a gate on steps that the
plan has not seen.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepinfer.config.mesh import num_slots
from deepinfer.errors import ConfigError

__all__ = [
    "Gain",
    "LoadWindow",
    "Placement",
    "adapt",
    "balancedness",
    "choose_slots",
    "initial_placement",
    "judge",
    "logical_counts",
    "plan_by_steps",
    "plan_by_totals",
    "rank_loads",
    "refine",
    "token_keys",
]

Ints = NDArray[np.int64]

UNIT: Final = 720720
"""Loads are counts times this, the least number that 1 to 16 copies divide."""

_SHRINK: Final = 8
_MOST_TRUST: Final = 4  # of few steps; one more for every 16 of many
_LOOKED_AT: Final = 256
_FEW_SLOTS: Final = 64  # of a layer: other copies are tried behind the greedy ones
_TRIED: Final = 6  # experts that give a copy, and that take one, and rounds
_EVENED: Final = 8  # ranks that are tried as givers before evening out ends
_EVEN_BITS: Final = 20  # of a load, so that sums of products stay far from overflow


class Placement:
    """Which logical expert each physical slot holds.

    slots      [layers, P] int32; rank r owns slots [r * P / N, (r + 1) * P / N)
    counts     [layers, E] copies of each expert, at least 1
    physical   [layers, E, most copies] int32 slots of each expert, ascending, padded with -1
    digest     64 bits of the whole as hex, equal on ranks whose plans are equal

    Copies of one expert stand on distinct ranks. Raises ConfigError naming what does not hold. The
    array is copied and frozen.
    """

    def __init__(self, slots: ArrayLike, num_experts: int, num_ranks: int) -> None:
        self.slots = np.array(slots, np.int32)
        self.num_experts = num_experts
        self.num_ranks = num_ranks
        if self.slots.ndim != 2 or num_ranks < 1 or self.slots.shape[1] % num_ranks:
            raise ConfigError(
                f"a placement needs slots [layers, P] with P a multiple of the {num_ranks} ranks, "
                f"found shape {self.slots.shape}"
            )
        if self.slots.size and not 0 <= self.slots.min() <= self.slots.max() < num_experts:
            raise ConfigError(f"a placement names an expert that is not below {num_experts}")
        problems: list[str] = []
        for layer, held in enumerate(self.by_rank):
            missing = np.setdiff1d(np.arange(num_experts), held)
            if missing.size:
                problems.append(f"layer {layer}: no copy of experts {missing[:8].tolist()}")
            ordered = np.sort(held, axis=1)
            twice = np.nonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))[0]
            if twice.size:
                problems.append(f"layer {layer}: an expert twice on ranks {twice[:8].tolist()}")
        if problems:
            raise ConfigError("the placement of experts does not hold", problems)
        self.slots.setflags(write=False)

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return int(self.slots.shape[0])

    @property
    def num_slots(self) -> int:
        """The number of physical experts of a layer."""
        return int(self.slots.shape[1])

    @property
    def slots_per_rank(self) -> int:
        """The number of slots of a rank."""
        return self.num_slots // self.num_ranks

    @property
    def by_rank(self) -> NDArray[np.int32]:
        """The experts of each rank [layers, ranks, slots of a rank]."""
        return self.slots.reshape(self.slots.shape[0], self.num_ranks, -1)

    @cached_property
    def counts(self) -> Ints:
        """The copies of each expert [layers, E]."""
        return np.stack([np.bincount(row, minlength=self.num_experts) for row in self.slots])

    @cached_property
    def physical(self) -> NDArray[np.int32]:
        """The slots of each expert [layers, E, most copies], ascending, padded with -1."""
        found = np.full((*self.counts.shape, int(self.counts.max())), -1, np.int32)
        for layer, row in enumerate(self.slots):
            order = np.argsort(row, kind="stable")
            first = np.cumsum(self.counts[layer]) - self.counts[layer]
            found[layer, row[order], np.arange(row.size) - first[row[order]]] = order
        return found

    @cached_property
    def digest(self) -> str:
        """16 hex digits of everything that the placement says."""
        shape = np.array([self.num_experts, self.num_ranks, *self.slots.shape], "<i8")
        data = shape.tobytes() + self.slots.astype("<i4").tobytes()
        return hashlib.blake2b(data, digest_size=8).hexdigest()

    def __eq__(self, other: object) -> bool:
        """Return whether both hold the same in the same slots."""
        if not isinstance(other, Placement):
            return NotImplemented
        same = (self.num_experts, self.num_ranks) == (other.num_experts, other.num_ranks)
        return same and np.array_equal(self.slots, other.slots)

    def __hash__(self) -> int:
        """Return a hash that equal placements share."""
        return hash(self.digest)

    def __repr__(self) -> str:
        """Return the sizes and the digest."""
        return (
            f"Placement({self.num_layers} layers, {self.num_experts} experts in {self.num_slots} "
            f"slots of {self.num_ranks} ranks, {self.digest})"
        )


def initial_placement(
    num_layers: int, num_experts: int, num_ranks: int, redundant: int = 0
) -> Placement:
    """Return the placement before anything is known: expert i in slot i, then experts 0, 1, 2, ...

    redundant  copies wished for beyond one each; rounded up so that ranks hold equally many
    """
    size = _checked(num_experts, num_ranks, num_slots(num_experts, num_ranks, redundant), 1)
    row = np.arange(size) % num_experts
    return Placement(np.tile(row, (num_layers, 1)), num_experts, num_ranks)


class LoadWindow:
    """The loads of the last steps, oldest first out.

    A step's counts are [layers, E]: rows that each logical expert took on all ranks together. Keep
    one window for prefill steps and one for decode steps, their loads differ.
    """

    def __init__(self, num_steps: int, num_layers: int, num_experts: int) -> None:
        if num_steps < 1:
            raise ConfigError(f"a window of {num_steps} steps; it must hold at least one")
        self._ring = np.zeros((num_steps, num_layers, num_experts), np.int64)
        self._added = 0

    def add(self, counts: NDArray[np.integer]) -> None:
        """Take the counts of one step in."""
        if counts.shape != self._ring.shape[1:] or counts.min(initial=0) < 0:
            raise ConfigError(
                f"counts of a step must be [layers, experts] = {self._ring.shape[1:]} and not "
                f"negative, found shape {counts.shape}"
            )
        self._ring[self._added % len(self._ring)] = counts
        self._added += 1

    @property
    def full(self) -> bool:
        """Whether as many steps have been seen as the window holds."""
        return self._added >= len(self._ring)

    def loads(self) -> Ints:
        """Return the steps in the window [S, layers, E], oldest first, as a copy."""
        if not self.full:
            return self._ring[: self._added].copy()
        return np.roll(self._ring, -(self._added % len(self._ring)), axis=0)

    def split(self) -> tuple[Ints, Ints]:
        """Return the steps to plan with and those to judge by, the newest quarter."""
        loads = self.loads()
        cut = len(loads) - len(loads) // 4
        return loads[:cut], loads[cut:]


def logical_counts(placement: Placement, slot_counts: NDArray[np.integer]) -> Ints:
    """Sum rows counted per physical slot [layers, P] to rows per logical expert [layers, E]."""
    found = np.zeros((placement.num_layers, placement.num_experts), np.int64)
    layers = np.arange(placement.num_layers)[:, None]
    np.add.at(found, (layers, placement.slots), slot_counts.astype(np.int64))
    return found


def rank_loads(placement: Placement, loads: NDArray[np.integer]) -> Ints:
    """Return rows of each rank [S, layers, N] for loads [S, layers, E], in units of 1 / UNIT.

    The rows of an expert are taken to spread evenly over its copies.
    """
    each = loads.astype(np.int64) * UNIT // placement.counts
    held = placement.by_rank
    layers = np.arange(placement.num_layers)[:, None, None]
    return np.asarray(each[:, layers, held].sum(axis=-1), np.int64)


def balancedness(placement: Placement, loads: NDArray[np.integer]) -> float:
    """Return mean over most loaded rank, both summed over steps and layers: 1 is perfect."""
    found = rank_loads(placement, loads)
    peak = int(found.max(axis=-1).sum())
    return 1.0 if peak == 0 else int(found.sum()) / (peak * placement.num_ranks)


def token_keys(sequence_key: int, positions: NDArray[np.integer]) -> NDArray[np.uint64]:
    """Return a number for each token of a sequence that depends on nothing but these two.

    sequence_key  the request's seed, for instance; taken modulo 2**64
    """
    base = np.array([sequence_key & (2**64 - 1)], np.uint64)
    return _mix(_mix(base) ^ positions.astype(np.uint64))


def choose_slots(
    placement: Placement,
    layer: int,
    chosen: NDArray[np.integer],
    keys: NDArray[np.uint64],
) -> NDArray[np.int32]:
    """Return the slot that serves each choice [T, K] of a logical expert; -1 stays -1.

    A token takes the copy that its key and the expert say. Its place in the batch, its rank and the
    other tokens have no part in it, so a token goes the same way alone and in any batch. All copies
    hold the same bytes: which one serves changes no bit, as long as the terms of a token are summed
    at home in the order of its choices.
    """
    logical = np.maximum(chosen, 0).astype(np.int64)
    mixed = _mix(keys[:, None] ^ _mix(logical.astype(np.uint64)))
    copy = (mixed >> np.uint64(33)) % placement.counts[layer][logical].astype(np.uint64)
    slots = placement.physical[layer][logical, copy.astype(np.int64)]
    return np.where(chosen < 0, np.int32(-1), slots)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scatter 64-bit numbers (the finalizer of splitmix64)."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def plan_by_totals(
    loads: NDArray[np.integer], num_ranks: int, slots: int, nodes: int = 1
) -> Placement:
    """Plan with the sum of loads [S, layers, E] over the steps.

    The expert with the most load a copy gets the next copy; then the heaviest slot goes to the
    lightest rank. With several nodes each expert first gets a node, and all its copies stay there.
    Raises ConfigError when sizes do not fit.
    """
    num_experts = loads.shape[2]
    _checked(num_experts, num_ranks, slots, nodes)
    ranks, share = num_ranks // nodes, slots // nodes
    plans = []
    for total in loads.astype(np.int64).sum(axis=0):
        held: list[list[int]] = []
        for members in _divide(total, nodes):
            weights = total[members] * UNIT
            counts = _copies_by_totals(weights, share, ranks)
            local = _place(weights[None] // counts, counts, ranks, 0)
            held.extend([int(members[e]) for e in rank] for rank in local)
        plans.append(_ordered(held))
    return Placement(np.stack(plans), num_experts, num_ranks)


def plan_by_steps(
    loads: NDArray[np.integer],
    num_ranks: int,
    slots: int,
    *,
    trust: int | None = None,
    exchanges: int = 64,
    evenings: int = 400,
) -> Placement:
    """Plan with the loads of every step [S, layers, E]: experts busy at once go apart.

    trust      0 to 8: how far the difference of a step from the window's mean is believed, in
               eighths; 8 follows the window exactly, which few steps do not deserve. None: what
               steps differ by beyond chance, at least 1 and at most 4, or 8 of 128 steps
    exchanges  most exchanges of two slots behind the greedy placement, for the sum of peaks
    evenings   most exchanges behind these, for the sum of squares: a step that nobody has seen has
               its peak on any rank, not only on that which had it before
    Copies are given where they lower the sum of peaks the most; in layers of at most 64 slots a few
    other choices are tried to their end, the sum of peaks deciding. Raises ConfigError when sizes
    do not fit.
    """
    num_experts = loads.shape[2]
    _checked(num_experts, num_ranks, slots, 1)
    plans = []
    for layer in range(loads.shape[1]):
        weights = _weights(loads[:, layer], trust)

        def placed(counts: Ints, weights: Ints = weights) -> tuple[list[list[int]], int]:
            each = weights // counts
            held = _even_out(_place(each, counts, num_ranks, exchanges), each, evenings)
            return held, int(np.stack([each[:, row].sum(axis=1) for row in held]).max(axis=0).sum())

        counts = _copies_by_steps(weights, slots, num_ranks)
        held, peaks = placed(counts)
        total = weights.sum(axis=0)
        for _ in range(_TRIED if slots <= _FEW_SLOTS else 0):
            others = [(*placed(other), other) for other in _other_copies(total, counts, num_ranks)]
            better = min(others, key=lambda found: found[1], default=None)
            if better is None or better[1] >= peaks:
                break
            held, peaks, counts = better
        plans.append(_ordered(held))
    return Placement(np.stack(plans), num_experts, num_ranks)


def _other_copies(total: Ints, counts: Ints, num_ranks: int) -> list[Ints]:
    """Return choices next to `counts` [E]: one copy of an idle expert goes to a busy one."""
    spare = np.where(counts > 1, total // np.maximum(counts - 1, 1), np.iinfo(np.int64).max)
    busy = np.where(counts < num_ranks, total // counts, -1)
    found = []
    for giver in np.argsort(spare, kind="stable")[:_TRIED].tolist():
        for taker in np.argsort(-busy, kind="stable")[:_TRIED].tolist():
            if giver != taker and counts[giver] > 1 and counts[taker] < num_ranks:
                other = counts.copy()
                other[giver] -= 1
                other[taker] += 1
                found.append(other)
    return found


def refine(
    now: Placement, loads: NDArray[np.integer], *, trust: int | None = None, exchanges: int = 8
) -> Placement:
    """Improve a placement by a few exchanges of experts between ranks, copies staying as many.

    Moves at most two experts an exchange and layer where a plan made anew moves most of them; see
    `plan_by_steps` for loads [S, layers, E] and `trust`. A layer where nothing helps stays as is.
    """
    layers = []
    for layer, held in enumerate(now.by_rank):
        each = _weights(loads[:, layer], trust) // now.counts[layer]
        has = np.zeros((now.num_ranks, now.num_experts), bool)
        np.put_along_axis(has, held.astype(np.int64), True, axis=1)
        load = np.asarray(each[:, held].sum(axis=2).T, np.int64).copy()
        before = has.copy()
        for _ in range(exchanges):
            if not _exchange(load, has, each):
                break
        row = held.copy()
        for rank in np.nonzero((has != before).any(axis=1))[0].tolist():
            row[rank, ~has[rank][row[rank]]] = np.nonzero(has[rank] & ~before[rank])[0]
        layers.append(row.ravel())
    return Placement(np.stack(layers), now.num_experts, now.num_ranks)


def adapt(now: Placement, loads: NDArray[np.integer], *, trust: int | None = None) -> Placement:
    """Plan from a placement in use: copies as loads ask for, what else moves only where it helps.

    Between `refine` and a plan made anew: copies are taken from busy ranks and given to idle ones,
    then experts are exchanged, an eighth of the slots at most. For loads [S, layers, E] and `trust`
    see `plan_by_steps`.
    """
    layers = []
    for layer, held in enumerate(now.by_rank):
        weights = _weights(loads[:, layer], trust)
        counts = _copies_by_steps(weights, now.num_slots, now.num_ranks)
        each = weights // counts
        before = np.zeros((now.num_ranks, now.num_experts), bool)
        np.put_along_axis(before, held.astype(np.int64), True, axis=1)
        has = _recopied(before, counts, each, now.slots_per_rank)
        load = has.astype(np.int64) @ each.T
        for _ in range(now.num_slots // 32):
            if not _exchange(load, has, each):
                break
        after = _even_out([np.flatnonzero(row).tolist() for row in has], each, now.num_slots // 32)
        row = held.copy()
        for rank, experts in enumerate(after):
            stay = np.isin(row[rank], experts)
            row[rank, ~stay] = np.setdiff1d(experts, row[rank])
        layers.append(row.ravel())
    return Placement(np.stack(layers), now.num_experts, now.num_ranks)


def _recopied(before: NDArray[np.bool_], counts: Ints, each: Ints, room: int) -> NDArray[np.bool_]:
    """Return who holds what [N, E] with `counts` copies of each, most of it as before."""
    has = before.copy()
    load = has.astype(np.int64) @ each.T
    for expert in np.argsort(-each.sum(axis=0), kind="stable").tolist():
        for _ in range(int(has[:, expert].sum()) - int(counts[expert])):
            holders = np.flatnonzero(has[:, expert])
            rank = int(holders[int(load[holders].sum(axis=1).argmax())])
            has[rank, expert] = False
            load[rank] -= each[:, expert]
    held = has.sum(axis=1)
    for expert in np.argsort(-each.sum(axis=0), kind="stable").tolist():
        while has[:, expert].sum() < counts[expert]:
            able = np.flatnonzero((held < room) & ~has[:, expert])
            if not able.size:
                _make_room(load, has, held, each, expert, room)
                continue
            rank = int(able[int(load[able].sum(axis=1).argmin())])
            load[rank] += each[:, expert]
            has[rank, expert] = True
            held[rank] += 1
    return has


def _trust(loads: Ints) -> int:
    """Return how far steps of a layer [S, E] differ beyond what drawing rows by chance brings."""
    steps = len(loads)
    total = loads.sum(axis=0)
    spread = int((steps * (loads * loads).sum(axis=0) - total * total).sum())
    chance = int(total.sum()) * (steps - 1)
    if spread <= chance:
        return 1
    most = min(_SHRINK, max(_MOST_TRUST, steps // 16))
    return min(max((2 * _SHRINK * (spread - chance) + spread) // (2 * spread), 1), most)


def _weights(loads: NDArray[np.integer], trust: int | None) -> Ints:
    """Return loads [S, E] of a layer in units, drawn towards their mean over the steps."""
    trust = _trust(loads.astype(np.int64)) if trust is None else trust
    if not 0 <= trust <= _SHRINK:
        raise ConfigError(f"trust must be between 0 and {_SHRINK}, found {trust}")
    weights = loads.astype(np.int64) * UNIT
    mean = weights.sum(axis=0) // max(len(weights), 1)
    return np.asarray(mean + (weights - mean) * trust // _SHRINK, np.int64)


def _checked(num_experts: int, num_ranks: int, slots: int, nodes: int) -> int:
    """Return `slots`, or raise ConfigError naming everything that does not fit."""
    problems = []
    if nodes < 1 or num_ranks < 1 or num_ranks % max(nodes, 1):
        problems.append(f"{num_ranks} ranks do not divide into {nodes} nodes")
    elif slots % num_ranks:
        problems.append(f"{slots} slots do not divide over {num_ranks} ranks")
    elif slots // nodes < -(-num_experts // nodes):
        problems.append(f"{slots} slots are too few for {num_experts} experts on {nodes} nodes")
    elif slots // num_ranks > num_experts // nodes:
        problems.append(
            f"{slots // num_ranks} slots a rank are too many for {num_experts // nodes} experts a "
            "node: copies of an expert stand on distinct ranks"
        )
    if problems:
        raise ConfigError("experts, slots and ranks do not fit together", problems)
    return slots


def _divide(total: Ints, nodes: int) -> list[Ints]:
    """Give each expert to the lightest node with room; returns the experts of each, ascending."""
    if nodes == 1:
        return [np.arange(len(total))]
    few, more = divmod(len(total), nodes)
    room = [few + 1 if node < more else few for node in range(nodes)]
    held: list[list[int]] = [[] for _ in range(nodes)]
    load = [0] * nodes
    for expert in np.argsort(-total, kind="stable").tolist():
        node = min((n for n in range(nodes) if len(held[n]) < room[n]), key=lambda n: (load[n], n))
        held[node].append(expert)
        load[node] += int(total[expert])
    return [np.array(sorted(experts)) for experts in held]


def _copies_by_totals(weights: Ints, slots: int, num_ranks: int) -> Ints:
    """Return copies of each expert; the most load a copy is served first."""
    counts = np.ones(len(weights), np.int64)
    for _ in range(slots - len(weights)):
        each = np.where(counts < num_ranks, weights // counts, -1)
        counts[int(each.argmax())] += 1
    return counts


def _copies_by_steps(weights: Ints, slots: int, num_ranks: int) -> Ints:
    """Return copies of each expert; what lowers the sum over steps of the busiest slot goes first.

    Only the busiest expert of a step can lower its peak, down to the second. Equal gains go to the
    expert with the most load a copy, then to the lower number.
    """
    num_steps, num_experts = weights.shape
    counts = np.ones(num_experts, np.int64)
    total = weights.sum(axis=0)
    each = weights.copy()
    steps = np.arange(num_steps)
    for _ in range(slots - num_experts):
        gain = np.zeros(num_experts, np.int64)
        if num_experts > 1 and num_steps:
            two = np.partition(each, num_experts - 2, axis=1)[:, -2:]
            top = each.argmax(axis=1)
            lower = np.maximum(two[:, 0], weights[steps, top] // (counts[top] + 1))
            np.add.at(gain, top, two[:, 1] - lower)
        open_ = counts < num_ranks
        best = int(np.lexsort((np.arange(num_experts), -(total // counts), -gain, ~open_))[0])
        counts[best] += 1
        each[:, best] = weights[:, best] // counts[best]
    return counts


def _place(each: Ints, counts: Ints, num_ranks: int, exchanges: int) -> list[list[int]]:
    """Give the copies to ranks, equally many to each, an expert at most once to each.

    each  [S, E] load of one copy in every step. Returns the experts of each rank.
    """
    num_steps = len(each)
    room = int(counts.sum()) // num_ranks
    load = np.zeros((num_ranks, num_steps), np.int64)
    has = np.zeros((num_ranks, len(counts)), bool)
    held = np.zeros(num_ranks, np.int64)
    peak = np.zeros(num_steps, np.int64)
    for expert in np.argsort(-each.sum(axis=0), kind="stable").tolist():
        vector = each[:, expert]
        for _ in range(int(counts[expert])):
            able = np.nonzero((held < room) & ~has[:, expert])[0]
            if not able.size:
                _make_room(load, has, held, each, expert, room)
                continue
            after = load[able] + vector
            total = after.sum(axis=1)
            rank = int(able[int((np.maximum(peak, after).sum(axis=1) + total).argmin())])
            load[rank] += vector
            has[rank, expert] = True
            held[rank] += 1
            peak = np.maximum(peak, load[rank])
    for _ in range(exchanges):
        if not _exchange(load, has, each):
            break
    return [np.nonzero(row)[0].tolist() for row in has]


def _make_room(
    load: Ints, has: NDArray[np.bool_], held: Ints, each: Ints, expert: int, room: int
) -> None:
    """Place a copy of `expert` although every rank with room holds one already.

    A full rank without it gives one of its experts to the rank with room: of the pairs that can,
    the one that leaves the lower load. There always is one, for the full rank holds more experts.
    """
    open_rank = int(np.nonzero(held < room)[0][0])
    total = each.sum(axis=0)
    best: tuple[int, int, int] | None = None
    for rank in np.nonzero(~has[:, expert])[0].tolist():
        for moved in np.nonzero(has[rank] & ~has[open_rank])[0].tolist():
            giver = int(load[rank].sum() - total[moved] + total[expert])
            taker = int(load[open_rank].sum() + total[moved])
            best = min(best or (max(giver, taker), rank, moved), (max(giver, taker), rank, moved))
    assert best is not None, (expert, room)
    _, rank, moved = best
    has[rank, moved], has[open_rank, moved], has[rank, expert] = False, True, True
    load[rank] += each[:, expert] - each[:, moved]
    load[open_rank] += each[:, moved]
    held[open_rank] += 1


def _exchange(load: Ints, has: NDArray[np.bool_], each: Ints) -> bool:
    """Exchange two experts of the most loaded rank and another where that lowers the cost most.

    The cost is the sum of peaks plus the sum of the most loaded rank; of all exchanges those are
    looked at whose larger sum is least. Returns whether the cost fell.
    """
    total, heavy = load.sum(axis=1), each.sum(axis=0)
    worst = int(total.argmax())
    able = ~has & has[worst]  # [N, E] what the worst rank can give to each
    able[worst] = False
    rank, give = np.nonzero(able)
    pair, take = np.nonzero((has & ~has[worst])[rank])
    rank, give = rank[pair], give[pair]
    moved = heavy[give] - heavy[take]
    sums = np.maximum(total[worst] - moved, total[rank] + moved)
    best = np.argsort(sums, kind="stable")[:_LOOKED_AT]
    if not best.size:
        return False
    rank, give, take, sums = rank[best], give[best], take[best], sums[best]
    vectors = each[:, give].T - each[:, take].T
    here, there = load[worst] - vectors, load[rank] + vectors
    rest = _without(np.concatenate([load, total[:, None]], axis=1), worst, rank)
    cost = np.maximum(np.maximum(here, there), rest[:, :-1]).sum(axis=1)
    cost += np.maximum(sums, rest[:, -1])
    least = int(cost.argmin())
    if cost[least] >= load.max(axis=0).sum() + total[worst]:
        return False
    a, b, other = int(give[least]), int(take[least]), int(rank[least])
    load[worst], load[other] = here[least], there[least]
    has[worst, a], has[worst, b], has[other, b], has[other, a] = False, True, False, True
    return True


def _even_out(held: list[list[int]], each: Ints, rounds: int) -> list[list[int]]:
    """Exchange two experts of two ranks while that lowers the sum of squared loads.

    held  experts of each rank; each  [S, E] load of one copy. One exchange a round, of the rank
    with the largest sum of squares that can better itself. What an exchange changes is read off
    products of loads: no round looks at the steps again.
    """
    num_ranks, num_experts = len(held), each.shape[1]
    small = each >> max(0, int(each.max(initial=0)).bit_length() - _EVEN_BITS)
    has = np.zeros((num_ranks, num_experts), bool)
    for row, experts in zip(has, held, strict=True):
        row[experts] = True
    load = has.astype(np.int64) @ small.T
    gram = small.T @ small
    cross, own = load @ small, np.diagonal(gram)
    squares = (load * load).sum(axis=1)
    for _ in range(rounds):
        for giver in np.argsort(-squares, kind="stable")[:_EVENED].tolist():
            give = np.flatnonzero(has[giver])[:, None]
            rank, take = np.nonzero(has & ~has[giver])
            change = cross[rank, give] - cross[rank, take] - cross[giver, give]
            change += cross[giver, take] + own[give] + own[take] - 2 * gram[give, take]
            change[has[rank, give]] = 0
            best = int(change.argmin()) if change.size else 0
            if change.size and change.flat[best] < 0:
                break
        else:
            break
        line, column = divmod(best, change.shape[1])
        a, b, other = int(give[line, 0]), int(take[column]), int(rank[column])
        moved = small[:, a] - small[:, b]
        load[giver] -= moved
        load[other] += moved
        cross[giver] -= gram[a] - gram[b]
        cross[other] += gram[a] - gram[b]
        for one in (giver, other):
            squares[one] = (load[one] * load[one]).sum()
        has[giver, a], has[giver, b], has[other, b], has[other, a] = False, True, False, True
    return [np.flatnonzero(row).tolist() for row in has]


def _without(values: Ints, first: int, second: Ints) -> Ints:
    """Return the largest of each column of values [N, S] that is in neither row, [C, S]."""
    most = np.argsort(-values, axis=0, kind="stable")[:3]
    found = np.zeros((len(second), values.shape[1]), np.int64)
    for rows in most[::-1]:
        top = values[rows, np.arange(values.shape[1])]
        found = np.where((rows != first) & (rows != second[:, None]), top, found)
    return found


def _ordered(held: list[list[int]]) -> NDArray[np.int32]:
    """Return the slots of a layer, each rank's experts ascending."""
    return np.array([expert for rank in held for expert in sorted(rank)], np.int32)


@dataclass(frozen=True, slots=True)
class Gain:
    """What a plan is worth on steps that it was not made from.

    rows_now, rows_planned  rows of the busiest rank, summed over layers, a step
    worth_it                whether the rows saved in what remains pay for moving
    """

    rows_now: float
    rows_planned: float
    worth_it: bool


def judge(
    now: Placement,
    planned: Placement,
    unseen: NDArray[np.integer],
    *,
    remaining_steps: int,
    migration_rows: int,
) -> Gain:
    """Compare two placements on unseen loads [S, layers, E].

    migration_rows  the time of moving as rows that an expert could have computed in it; the ranks
                    must agree on it. What is saved has to be 1.5 times as much.
    """
    before = int(rank_loads(now, unseen).max(axis=-1).sum())
    after = int(rank_loads(planned, unseen).max(axis=-1).sum())
    steps = len(unseen)
    saved = (before - after) * remaining_steps * 2
    paid = migration_rows * UNIT * steps * 3
    scale = UNIT * max(steps, 1)
    return Gain(before / scale, after / scale, steps > 0 and saved > paid and after < before)
