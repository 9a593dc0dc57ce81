"""From one placement of experts to another: the fewest copies of weights, in stages (pure).

A stage says which ranks receive which experts into spare memory while all slots go on serving; when
it is over the new maps are installed at once, and what was evicted becomes the spare memory of the
next stage. Every stage leaves a whole placement, so that a run may stop between two of them for as
long as it likes. `live.py` carries stages out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import ConfigError
from deepinfer.parallel.placement import Placement

__all__ = ["Migration", "Move", "Stage", "apply_stage", "assign", "plan_migration", "relabel"]

Ints = NDArray[np.int64]


class Move(NamedTuple):
    """One expert's weights, from a slot that serves it to the spare memory of another rank.

    source  slot that holds the expert before the stage
    target  slot that holds it afterwards
    """

    layer: int
    expert: int
    source: int
    target: int


Stage = tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class Migration:
    """The way from `before` to `after`.

    after   what was asked for with every rank's slots in another order: experts that stay on a rank
            stay in their slot
    stages  what is copied, in order
    """

    before: Placement
    after: Placement
    stages: tuple[Stage, ...]

    @property
    def num_moves(self) -> int:
        """The number of experts copied."""
        return sum(map(len, self.stages))

    def received(self) -> Ints:
        """Return how many experts each rank receives in all [N]."""
        targets = [move.target for stage in self.stages for move in stage]
        ranks = np.array(targets, np.int64) // self.before.slots_per_rank
        return np.bincount(ranks, minlength=self.before.num_ranks)


def apply_stage(placement: Placement, stage: Sequence[Move]) -> Placement:
    """Return the placement after a stage.

    Raises ConfigError when a source does not hold its expert or an expert would lose its last copy.
    """
    slots = placement.slots.copy()
    for move in stage:
        if placement.slots[move.layer, move.source] != move.expert:
            raise ConfigError(f"{move}: the source holds another expert")
        slots[move.layer, move.target] = move.expert
    return Placement(slots, placement.num_experts, placement.num_ranks)


def assign(value: Ints) -> Ints:
    """Return for each row of a square matrix its own column, the sum of values being largest.

    Exact (shortest augmenting paths, n**3), and the same for the same matrix.
    """
    size = len(value)
    cost = value.max(initial=0) - value.astype(np.int64)
    far = 1 << 60
    row_price, column_price = np.zeros(size, np.int64), np.zeros(size, np.int64)
    row_of = np.full(size, -1)
    for row in range(size):
        least, via = np.full(size, far), np.full(size, -1)
        done = np.zeros(size, bool)
        column, at = -1, row
        while True:
            reduced = cost[at] - row_price[at] - column_price
            closer = ~done & (reduced < least)
            least[closer], via[closer] = reduced[closer], column
            column = int(np.where(done, far, least).argmin())
            step = int(least[column])
            row_price[row] += step
            row_price[row_of[done]] += step
            column_price[done] -= step
            least[~done] -= step
            done[column] = True
            at = int(row_of[column])
            if at < 0:
                break
        while column >= 0:
            before = int(via[column])
            row_of[column] = row if before < 0 else row_of[before]
            column = before
    found = np.empty(size, np.int64)
    found[row_of] = np.arange(size)
    return found


def relabel(before: Placement, wanted: Placement, nodes: int = 1) -> Placement:
    """Return `wanted` with its ranks renamed so that most experts stay on the rank they are on.

    Which rank of a domain holds which set of experts changes no load. Ranks keep their node, and so
    do nodes their number. Raises ConfigError when the placements differ in size.
    """
    _check_same(before, wanted)
    if nodes < 1 or before.num_ranks % nodes:
        raise ConfigError(f"{before.num_ranks} ranks do not divide into {nodes} nodes")
    ranks = before.num_ranks // nodes
    rows = []
    for old, new in zip(_held(before), _held(wanted), strict=True):
        order: list[int] = []
        for first in range(0, before.num_ranks, ranks):
            inside = slice(first, first + ranks)
            common = old[inside].astype(np.int64) @ new[inside].astype(np.int64).T
            order.extend((assign(common) + first).tolist())
        rows.append(order)
    slots = np.stack([held[row] for held, row in zip(wanted.by_rank, rows, strict=True)])
    return Placement(slots.reshape(wanted.slots.shape), wanted.num_experts, wanted.num_ranks)


def plan_migration(before: Placement, wanted: Placement, spare: int = 1) -> Migration:
    """Plan the copies that lead to `wanted`, at most `spare` received by each rank in a stage.

    As few copies as there are pairs of rank and expert that are new: no expert takes a detour.
    Each is read from the rank that has sent the least in the stage, of those that hold it before.
    Raises ConfigError when the placements differ in size or there is no spare memory.
    """
    _check_same(before, wanted)
    if spare < 1:
        raise ConfigError("moving experts needs spare memory for at least one expert a rank")
    layers = [
        _Layer(before, wanted, layer)
        for layer in range(before.num_layers)
        if not np.array_equal(before.slots[layer], wanted.slots[layer])
    ]
    stages: list[Stage] = []
    while any(layer.open for layer in layers):
        room, sent = [spare] * before.num_ranks, [0] * before.num_ranks
        stage: list[Move] = []
        for layer in layers:
            stage.extend(layer.advance(room, sent))
        assert stage, "a move or a cycle of moves is always possible"
        stages.append(tuple(stage))
    slots = before.slots.copy()
    for layer in layers:
        slots[layer.number] = layer.slots
    after = Placement(slots, before.num_experts, before.num_ranks)
    return Migration(before, after, tuple(stages))


class _Layer:
    """One layer on its way.

    slots  what each slot holds after the stages so far
    come   experts that each rank still has to receive, ascending
    go     slots of each rank whose experts leave, ascending
    """

    def __init__(self, before: Placement, wanted: Placement, number: int) -> None:
        self.number = number
        self.size = before.slots_per_rank
        self.slots: list[int] = before.slots[number].tolist()
        self.copies: list[int] = before.counts[number].tolist()
        self.come: list[list[int]] = []
        self.go: list[list[int]] = []
        for rank, new in enumerate(wanted.by_rank[number].tolist()):
            old = self.slots[rank * self.size : (rank + 1) * self.size]
            self.come.append(sorted(set(new) - set(old)))
            self.go.append([rank * self.size + i for i, e in enumerate(old) if e not in set(new)])

    @property
    def open(self) -> bool:
        """Whether anything is left to do."""
        return any(self.come)

    def advance(self, room: list[int], sent: list[int]) -> list[Move]:
        """Return moves for this stage; takes their memory from `room`, counts them in `sent`."""
        held: dict[int, list[int]] = {}
        for slot, expert in enumerate(self.slots):
            held.setdefault(expert, []).append(slot)
        moves: list[Move] = []

        def move(rank: int, expert: int, target: int) -> None:
            source = min(held[expert], key=lambda slot: (sent[slot // self.size], slot))
            sent[source // self.size] += 1
            room[rank] -= 1
            self.copies[self.slots[target]] -= 1
            self.copies[expert] += 1
            self.slots[target] = expert
            self.come[rank].remove(expert)
            self.go[rank].remove(target)
            moves.append(Move(self.number, expert, source, target))

        while True:
            single = self._single(room)
            steps = [single] if single else self._cycle(room)
            if not steps:
                return moves
            for step in steps:
                move(*step)

    def _single(self, room: list[int]) -> tuple[int, int, int] | None:
        """Return rank, expert and slot of a move that evicts no last copy."""
        for rank, coming in enumerate(self.come):
            if coming and room[rank]:
                for slot in self.go[rank]:
                    if self.copies[self.slots[slot]] > 1:
                        return rank, min(coming, key=lambda e: (self.copies[e], e)), slot
        return None

    def _cycle(self, room: list[int]) -> list[tuple[int, int, int]]:
        """Return moves in a ring, each evicting the last copy of what the next rank receives.

        Where no single move is possible every expert that leaves a rank is a last copy, so another
        rank waits for it: following these comes round.
        """
        ends: set[int] = set()
        for start in range(len(self.come)):
            path: list[tuple[int, int]] = []  # rank, slot whose expert the next one receives
            ranks: list[int] = []
            rank = start
            while rank not in ranks and rank not in ends:
                following = self._follow(rank, room, ends)
                if following is None:
                    ends.add(rank)
                    if not path:
                        break
                    rank, _ = path.pop()
                    ranks.pop()
                    continue
                slot, after = following
                path.append((rank, slot))
                ranks.append(rank)
                rank = after
            if rank in ranks:
                ring = path[ranks.index(rank) :]
                return [
                    (here, self.slots[ring[i - 1][1]], slot) for i, (here, slot) in enumerate(ring)
                ]
        return []

    def _follow(self, rank: int, room: list[int], ends: set[int]) -> tuple[int, int] | None:
        """Return a slot of the rank and the rank that receives its expert, dead ends left out."""
        if not room[rank]:
            return None
        for slot in self.go[rank]:
            for other, coming in enumerate(self.come):
                if room[other] and other not in ends and self.slots[slot] in coming:
                    return slot, other
        return None


def _held(placement: Placement) -> NDArray[np.bool_]:
    """Return which rank holds which expert [layers, N, E]."""
    held = np.zeros((placement.num_layers, placement.num_ranks, placement.num_experts), bool)
    np.put_along_axis(held, placement.by_rank.astype(np.int64), True, axis=2)
    return held


def _check_same(before: Placement, wanted: Placement) -> None:
    sizes = [
        (plan.num_layers, plan.num_experts, plan.num_slots, plan.num_ranks)
        for plan in (before, wanted)
    ]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            "placements of other sizes cannot lead into one another: layers, experts, slots and "
            f"ranks are {sizes[0]} and {sizes[1]}"
        )
