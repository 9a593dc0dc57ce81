"""BlockPool: no block is lost, given twice or freed under a holder."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.cache.blocks import BlockPool


def test_last_freed_is_first_reused_and_block_0_stays() -> None:
    pool = BlockPool(5)
    first = pool.allocate(4)
    assert first == [1, 2, 3, 4] and pool.num_free == 0
    pool.release([3])
    pool.release([1])
    assert pool.allocate(2) == [1, 3]


def test_misuse_is_an_assertion() -> None:
    pool = BlockPool(3)
    with pytest.raises(AssertionError):
        pool.allocate(3)
    with pytest.raises(AssertionError):
        pool.release([1])
    with pytest.raises(AssertionError):
        pool.retain([1])


@settings(max_examples=60, deadline=None)
@given(
    num_blocks=st.integers(2, 12),
    moves=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=40),
)
def test_any_use(num_blocks: int, moves: list[tuple[int, int]]) -> None:
    pool = BlockPool(num_blocks)
    held: list[list[int]] = []
    for move, n in moves:
        if move == 0 and n <= pool.num_free:
            held.append(pool.allocate(n))
        elif move == 1 and held:
            pool.release(held.pop(n % len(held)))
        elif move == 2 and held:
            shared = held[n % len(held)]
            pool.retain(shared)
            held.append(list(shared))
        pool.check()
        in_use = {block for table in held for block in table}
        assert pool.num_free == pool.capacity - len(in_use)
    for table in held:
        pool.release(table)
    assert pool.num_free == pool.capacity
