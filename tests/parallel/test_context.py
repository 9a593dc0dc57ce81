"""Index maps of shared prefill steps against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from deepinfer.parallel.context import borders, exchange_of, mirror_pieces, split_rows

RANKS = st.sampled_from([1, 2, 3, 4, 8])
STEPS = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 120)), min_size=1, max_size=6)


@given(st.integers(0, 500), st.integers(1, 400), RANKS, st.sampled_from([1, 2, 4]))
def test_pieces_cover_the_rows_in_order_and_never_tear_a_group(
    start: int, count: int, ranks: int, align: int
) -> None:
    pieces = mirror_pieces(start, count, ranks, align)
    assert len(pieces) == 2 * ranks
    assert [row for a, b in pieces for row in range(a, b)] == list(range(start, start + count))
    assert all(a % align == 0 for a, b in pieces if a != start and a < b)
    longest = max(b - a for a, b in pieces)
    assert longest <= -(-(count + align - 1) // (2 * ranks)) + align - 1


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_mirrored_positions_cost_every_rank_the_same(ranks: int) -> None:
    """Any cost that is affine in the position; contiguous runs would reach 2 - 1 / C."""
    for start, count in ((0, 4096), (1024, 2048)):
        owner = split_rows([start], [count], ranks)
        at = np.arange(start, start + count)
        loads = np.bincount(owner, weights=at.astype(float))
        assert loads.max() / loads.mean() == pytest.approx(1, abs=1e-3)
        halves = np.bincount(np.arange(count) // (count // ranks), weights=at.astype(float))
        assert halves.max() / halves.mean() > 1.1


@given(STEPS, RANKS, st.sampled_from([1, 2]))
def test_every_row_has_one_owner_and_groups_stay_together(
    step: list[tuple[int, int]], ranks: int, align: int
) -> None:
    starts, counts = [s for s, _ in step], [c for _, c in step]
    owner = split_rows(starts, counts, ranks, align)
    assert len(owner) == sum(counts) and owner.min() >= 0 and owner.max() < ranks
    at = 0
    for start, count in step:
        for row in range(1, count):
            if (start + row) % align:
                assert owner[at + row] == owner[at + row - 1]
        at += count


def test_many_short_sequences_spread_over_ranks() -> None:
    for ranks in (2, 4, 8):
        owner = split_rows([7] * 64, [2] * 64, ranks, 2)
        assert (np.bincount(owner, minlength=ranks) == 128 // ranks).all()
        mixed = split_rows([0, 0, *[3] * 40], [900, 500, *[5] * 40], ranks, 2)
        counts = np.bincount(mixed, minlength=ranks)
        assert counts.max() <= 1.05 * counts.mean()


@given(STEPS, RANKS, st.integers(1, 40), st.integers(0, 50))
def test_borders_are_what_windows_of_others_and_rings_need(
    step: list[tuple[int, int]], ranks: int, window: int, kept: int
) -> None:
    starts, counts = [s for s, _ in step], [c for _, c in step]
    owner = split_rows(starts, counts, ranks, 2)
    want = np.zeros(len(owner), bool)
    first = 0
    for count in counts:
        for row in range(count):
            for seen in range(max(0, row - window + 1), row + 1):
                if owner[first + seen] != owner[first + row]:
                    want[first + seen] = True
            want[first + row] |= row >= count - kept
        first += count
    np.testing.assert_array_equal(borders(owner, counts, window, kept), want)


@given(STEPS, RANKS, st.integers(0, 2**31))
def test_an_exchange_puts_the_items_of_all_ranks_in_order(
    step: list[tuple[int, int]], ranks: int, seed: int
) -> None:
    """Some rows, in any order and some twice, as every rank would see them after an all-gather."""
    owner = split_rows([s for s, _ in step], [c for _, c in step], ranks, 2)
    rng = np.random.default_rng(seed)
    items = rng.integers(0, len(owner), rng.integers(0, 2 * len(owner)))
    values = rng.integers(0, 1 << 30, len(owner))
    sent: list[NDArray[np.int64]] = []
    found = []
    for rank in range(ranks):
        rows = np.flatnonzero(owner == rank)
        local = np.full(len(owner), -1)
        local[rows] = np.arange(len(rows))
        exchange = exchange_of(owner[items], local[items], ranks, rank)
        padded = np.full(exchange.most, -1)
        padded[: len(exchange.send)] = values[rows][exchange.send]
        sent.append(padded)
        found.append(exchange.index)
    everyone = np.concatenate(sent)
    for index in found:
        np.testing.assert_array_equal(everyone[index], values[items])
