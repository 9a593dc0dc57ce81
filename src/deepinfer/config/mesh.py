"""Ranks of a cluster as arithmetic: who holds which experts and which Engram rows (pure).

Ranks are numbered so that the context ranks of one replica are neighbours, and so are the ranks of
one expert group and of one Engram group. Nothing here talks to a process.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.errors import ConfigError

__all__ = ["Mesh", "num_slots", "split_evenly"]


def split_evenly(count: int, parts: int, part: int) -> range:
    """Return one of `parts` contiguous runs of ceil(count / parts) items; the last may be short."""
    size = -(-count // parts)
    return range(min(part * size, count), min((part + 1) * size, count))


def num_slots(num_experts: int, ranks: int, redundant: int = 0) -> int:
    """Return the physical experts of a layer: at least `redundant` more than logical ones, and a
    multiple of the ranks.
    """
    if num_experts < 1 or ranks < 1 or redundant < 0:
        raise ConfigError(
            f"{num_experts} experts with {redundant} copies on {ranks} ranks: experts and ranks "
            "must be at least 1 and copies not negative"
        )
    return -(-(num_experts + redundant) // ranks) * ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """Sizes of the four parallel axes.

    data     attention replicas, each with its own requests and caches
    context  ranks that share the prefill of one prompt
    expert   ranks that share one copy of the experts; divides data * context
    engram   ranks that share one copy of the Engram tables; divides data * context or is a multiple
             of it
    Raises ConfigError when a size is below 1 or does not fit.
    """

    data: int = 1
    context: int = 1
    expert: int = 1
    engram: int = 1

    def __post_init__(self) -> None:
        """Check the sizes."""
        sizes = {"data": self.data, "context": self.context, "expert": self.expert,
                 "engram": self.engram}  # fmt: skip
        problems = [
            f"parallel.{name}: found {size}, expected an integer >= 1"
            for name, size in sizes.items()
            if isinstance(size, bool) or not isinstance(size, int) or size < 1
        ]
        if not problems:
            attention = self.data * self.context
            if attention % self.expert:
                problems.append(
                    f"parallel.expert: found {self.expert}, expected a divisor of parallel.data * "
                    f"parallel.context ({attention})"
                )
            if attention % self.engram and self.engram % attention:
                problems.append(
                    f"parallel.engram: found {self.engram}, expected a divisor or a multiple of "
                    f"parallel.data * parallel.context ({attention})"
                )
        if problems:
            raise ConfigError("the parallel sizes do not fit together", problems)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return max(self.data * self.context, self.engram)

    def data_rank(self, rank: int) -> int:
        """Return which replica a rank belongs to."""
        self._check(rank)
        return rank // self.context % self.data

    def context_rank(self, rank: int) -> int:
        """Return a rank's place inside its replica."""
        self._check(rank)
        return rank % self.context

    def expert_rank(self, rank: int) -> int:
        """Return a rank's place inside its expert group."""
        self._check(rank)
        return rank % self.expert

    def engram_rank(self, rank: int) -> int:
        """Return a rank's place inside its Engram group."""
        self._check(rank)
        return rank % self.engram

    def expert_range(self, rank: int, num_experts: int) -> range:
        """Return the logical experts that a rank holds before any rebalancing.

        Raises ConfigError when `expert` does not divide their number.
        """
        place = self.expert_rank(rank)
        if num_experts % self.expert:
            raise ConfigError(
                f"parallel.expert: found {self.expert}, expected a divisor of the "
                f"{num_experts} experts"
            )
        return split_evenly(num_experts, self.expert, place)

    def engram_rows(self, rank: int, rows: int) -> range:
        """Return the rows of one Engram table that a rank holds."""
        return split_evenly(rows, self.engram, self.engram_rank(rank))

    def _check(self, rank: int) -> None:
        """Raise ConfigError when there is no such rank."""
        if not 0 <= rank < self.world:
            raise ConfigError(
                f"rank {rank} does not exist; this mesh has ranks 0 to {self.world - 1}"
            )
