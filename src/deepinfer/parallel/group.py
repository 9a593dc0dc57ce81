"""Ranks: this rank's place in the mesh, and a Group for every axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch.distributed.distributed_c10d import Store

from deepinfer.config.mesh import Mesh
from deepinfer.parallel.comm import Group

__all__ = ["Ranks"]

_IDLE_S: Final = 30 * 24 * 3600.0
"""How long control groups wait: others may have nothing to do. Death is noticed elsewhere."""


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """One rank among all.

    world            all ranks, on the host: words, messages, votes
    context_control  the ranks of this replica, on the host: plans
    expert_control   the ranks of the expert group, on the host: statistics, hashes of plans
    context, expert, engram
                     data of the axes: over NCCL on GPUs, used by the device queue's thread
    store            what all processes reach; keys of this module begin with the group's name
    more             groups that parts of the engine have added
    """

    mesh: Mesh
    rank: int
    device: torch.device
    store: Store
    world: Group
    context_control: Group
    expert_control: Group
    context: Group
    expert: Group
    engram: Group
    more: list[Group] = field(default_factory=list)

    @classmethod
    def connect(
        cls, mesh: Mesh, rank: int, device: torch.device, store: Store, timeout_s: float
    ) -> Ranks:
        """Meet all other ranks; every rank calls it with the same mesh.

        timeout_s  of data collectives, and of this meeting
        Raises GroupBroken when somebody does not come.
        """

        def group(name: str, members: Sequence[int], on_device: bool) -> Group:
            if on_device:
                return Group.connect(name, members, rank, store, timeout_s, device)
            return Group.connect(name, members, rank, store, timeout_s, idle_s=_IDLE_S)

        return cls(
            mesh=mesh,
            rank=rank,
            device=device,
            store=store,
            world=group("world", range(mesh.world), False),
            context_control=group("context control", mesh.context_group(rank), False),
            expert_control=group("expert control", mesh.expert_group(rank), False),
            context=group("context", mesh.context_group(rank), True),
            expert=group("expert", mesh.expert_group(rank), True),
            engram=group("engram", mesh.engram_group(rank), True),
        )

    def add(
        self, name: str, members: Sequence[int], timeout_s: float, on_device: bool = False
    ) -> Group:
        """Meet the members for a group of their own, which ends with the others."""
        device = self.device if on_device else None
        group = Group.connect(name, members, self.rank, self.store, timeout_s, device)
        self.more.append(group)
        return group

    @property
    def groups(self) -> tuple[Group, ...]:
        """Every group."""
        return (
            self.world,
            self.context_control,
            self.expert_control,
            self.context,
            self.expert,
            self.engram,
            *self.more,
        )

    @property
    def leads(self) -> bool:
        """Whether this rank has the front: requests and completions."""
        return self.rank == 0

    @property
    def schedules(self) -> bool:
        """Whether this rank has a scheduler: one rank of each replica has."""
        return self.mesh.context_rank(self.rank) == 0

    @property
    def in_step(self) -> bool:
        """Whether ranks compute together, so that their steps must be of one kind."""
        return max(self.expert.size, self.context.size, self.engram.size) > 1

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the collectives called so far, by group and name."""
        return {group.name: dict(group.counts) for group in self.groups if group.counts}

    def abort(self) -> None:
        """End every collective under way."""
        for group in self.groups:
            group.abort()

    def close(self) -> None:
        """Let go of all connections."""
        for group in reversed(self.groups):
            group.close()
