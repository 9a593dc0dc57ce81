"""SlotPool: slot 0 is never given, and a slot is given to one at a time."""

from __future__ import annotations

import pytest

from deepinfer.cache.slots import SlotPool


def test_slots() -> None:
    pool = SlotPool(4)
    assert [pool.acquire() for _ in range(3)] == [1, 2, 3]
    assert pool.num_free == 0
    with pytest.raises(AssertionError):
        pool.acquire()
    pool.release(2)
    pool.check()
    with pytest.raises(AssertionError):
        pool.release(2)
    assert pool.acquire() == 2
    pool.check()
