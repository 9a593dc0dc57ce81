"""Ranks of a cluster as arithmetic: who holds which experts and which Engram rows (pure).

Ranks are numbered so that the context ranks of one replica are neighbours, and so are the ranks of
one expert group and of one Engram group. Ranks of equal context rank in one engine form a data
group. With more Engram shards than attention ranks several engines share one set of tables. Nothing
here talks to a process.
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

    @classmethod
    def fit(cls, *, data: int = 0, context: int = 1, expert: int = 1, engram: int = 0) -> Mesh:
        """Return a mesh with the sizes left at 0 filled in.

        data    as many replicas as the expert group takes: expert // context, at least 1
        engram  one shard for each attention rank
        """
        if data == 0:
            data = max(1, expert // context) if context > 0 else 1
        return cls(
            data=data, context=context, expert=expert, engram=engram or max(1, data * context)
        )

    @property
    def world(self) -> int:
        """The number of ranks."""
        return max(self.data * self.context, self.engram)

    @property
    def engine_size(self) -> int:
        """The number of ranks that step together: data * context."""
        return self.data * self.context

    def data_group(self, rank: int) -> range:
        """Return the ranks of the same engine and context rank, which vote on a step's kind."""
        self._check(rank)
        first = rank - rank % self.engine_size
        return range(first + rank % self.context, first + self.engine_size, self.context)

    def context_group(self, rank: int) -> range:
        """Return the ranks that share a prompt's prefill with this one."""
        return self._neighbours(rank, self.context)

    def expert_group(self, rank: int) -> range:
        """Return the ranks that share one copy of the experts with this one."""
        return self._neighbours(rank, self.expert)

    def engram_group(self, rank: int) -> range:
        """Return the ranks that share one copy of the Engram tables with this one."""
        return self._neighbours(rank, self.engram)

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
        """Return the logical experts that a rank holds without redundant copies.

        Raises ConfigError when `expert` does not divide their number; `num_slots` rounds up.
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

    def engram_owner(self, row: int, rows: int) -> int:
        """Return the place inside an Engram group that holds a row."""
        if not 0 <= row < rows:
            raise ConfigError(f"row {row} does not exist; the table has rows 0 to {rows - 1}")
        return row // -(-rows // self.engram)

    def _neighbours(self, rank: int, size: int) -> range:
        """Return the aligned run of `size` ranks around a rank."""
        self._check(rank)
        return range(rank - rank % size, rank - rank % size + size)

    def _check(self, rank: int) -> None:
        """Raise ConfigError when there is no such rank."""
        if not 0 <= rank < self.world:
            raise ConfigError(
                f"rank {rank} does not exist; this mesh has ranks 0 to {self.world - 1}"
            )
