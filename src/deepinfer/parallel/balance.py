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

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import ConfigError
from deepinfer.parallel.placement import UNIT, Ints, Placement, checked_slots, rank_loads

__all__ = [
    "Gain",
    "LoadWindow",
    "adapt",
    "judge",
    "plan_by_steps",
    "plan_by_totals",
    "refine",
]

_SHRINK: Final = 8
_MOST_TRUST: Final = 4  # of few steps; one more for every 16 of many
_LOOKED_AT: Final = 256
_FEW_SLOTS: Final = 64  # of a layer: other copies are tried behind the greedy ones
_TRIED: Final = 6  # experts that give a copy, and that take one, and rounds
_EVENED: Final = 8  # ranks that are tried as givers before evening out ends
_EVEN_BITS: Final = 20  # of a load, so that sums of products stay far from overflow


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


def plan_by_totals(
    loads: NDArray[np.integer], num_ranks: int, slots: int, nodes: int = 1
) -> Placement:
    """Plan with the sum of loads [S, layers, E] over the steps.

    The expert with the most load a copy gets the next copy; then the heaviest slot goes to the
    lightest rank. With several nodes each expert first gets a node, and all its copies stay there.
    Raises ConfigError when sizes do not fit.
    """
    num_experts = loads.shape[2]
    checked_slots(num_experts, num_ranks, slots, nodes)
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
    checked_slots(num_experts, num_ranks, slots, 1)
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
