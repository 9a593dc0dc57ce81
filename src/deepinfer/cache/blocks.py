"""BlockPool: which fixed runs of cached positions are in use, and by how many.

Pure bookkeeping of ids; the bytes live in `cache/tensors.py`. Block 0 is never handed out: padding
reads and writes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

__all__ = ["BlockPool"]


class BlockPool:
    """Reference-counted block ids 1..num_blocks-1, the last freed handed out first."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, num_blocks
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(1, num_blocks))
        self._counts = [0] * num_blocks

    @property
    def capacity(self) -> int:
        """Blocks that can ever be in use at once."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    def count(self, block: int) -> int:
        """How often a block is held."""
        return self._counts[block]

    def allocate(self, count: int) -> list[int]:
        """Return `count` block ids, each now held once. The caller has checked `num_free`."""
        assert 0 <= count <= len(self._free), (count, len(self._free))
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            assert self._counts[block] == 0, (block, self._counts[block])
            self._counts[block] = 1
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """Hold blocks that are in use once more."""
        for block in blocks:
            assert self._counts[block] > 0, block
            self._counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Let go of blocks once; those that nobody holds go to the front of the free list: memory
        that was touched is used again before more is."""
        for block in blocks:
            assert self._counts[block] > 0, block
            self._counts[block] -= 1
            if self._counts[block] == 0:
                self._free.appendleft(block)

    def check(self) -> None:
        """Assert that every block is either free or held, and none is both."""
        held = sum(count > 0 for count in self._counts)
        assert held + len(self._free) == self.capacity, (held, len(self._free), self.capacity)
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert all(self._counts[block] == 0 for block in self._free), "a held block is free"
        assert self._counts[0] == 0 and 0 not in self._free, "block 0 is in use"
