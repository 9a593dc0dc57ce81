"""A placement: which logical expert each physical slot holds, and what loads make of it (pure).

Who makes placements from loads is `balance.py`, who moves weights `migrate.py` and `live.py`. All
decisions are integer arithmetic, so that ranks that hold the same slots agree on everything.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepinfer.config.mesh import num_slots
from deepinfer.errors import ConfigError

__all__ = [
    "UNIT",
    "Ints",
    "Placement",
    "balancedness",
    "checked_slots",
    "choose_slots",
    "initial_placement",
    "logical_counts",
    "rank_loads",
    "token_keys",
]

Ints = NDArray[np.int64]

UNIT: Final = 720720
"""Loads are counts times this, the least number that 1 to 16 copies divide."""


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
    size = checked_slots(num_experts, num_ranks, num_slots(num_experts, num_ranks, redundant), 1)
    row = np.arange(size) % num_experts
    return Placement(np.tile(row, (num_layers, 1)), num_experts, num_ranks)


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


def checked_slots(num_experts: int, num_ranks: int, slots: int, nodes: int) -> int:
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
