"""SlotPool: which per-sequence state slots are taken.

A slot holds what a sequence carries besides its blocks: window rings, compressor and Engram tails.
Pure bookkeeping; slot 0 is never handed out: padding reads and writes it. A fresh slot is not
cleared: nothing reads before what it wrote itself.
"""

from __future__ import annotations

from collections import deque

__all__ = ["SlotPool"]


class SlotPool:
    """Slot ids 1..num_slots-1, the last freed handed out first."""

    def __init__(self, num_slots: int) -> None:
        assert num_slots >= 2, num_slots
        self.num_slots = num_slots
        self._free: deque[int] = deque(range(1, num_slots))
        self._taken = [False] * num_slots

    @property
    def num_free(self) -> int:
        """Slots that can be acquired now."""
        return len(self._free)

    def acquire(self) -> int:
        """Return a slot. The caller has checked `num_free`."""
        assert self._free, "no slot is free"
        slot = self._free.popleft()
        self._taken[slot] = True
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back."""
        assert self._taken[slot], slot
        self._taken[slot] = False
        self._free.appendleft(slot)

    def check(self) -> None:
        """Assert that every slot is either free or taken, and none is both."""
        assert sum(self._taken) + len(self._free) == self.num_slots - 1, (
            sum(self._taken),
            len(self._free),
        )
        assert not any(self._taken[slot] for slot in self._free), "a taken slot is free"
