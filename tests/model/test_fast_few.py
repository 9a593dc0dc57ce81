"""Decode steps of few rows on kept buffers: the bits of the reference and of the single ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tests.model.pair import Bench, Pair

from deepinfer.model.fast import model
from deepinfer.model.reference import Numerics

PairOf = Callable[[str, Numerics], Pair]
DENSE = 1 << 28
LENGTHS = (1, 127, 63, 16, 47, 2, 128, 15, 48, 33, 130, 5, 24, 64, 3, 99, 12)


@pytest.fixture
def pair(pair_of: PairOf) -> Pair:
    """The packaged checkpoint in official arithmetic, the one that fits."""
    return pair_of("alpha", "official")


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every step, whether it ran here."""
    seen: list[bool] = []
    fits = model.fits

    def spy(*args: object) -> bool:
        seen.append(fits(*args))  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr(model, "fits", spy)
    return seen


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Threads of the library."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("size", "threads"),
    [(1, 1), (2, 1), (3, 1), (8, 1), (16, 1), (17, 1), (1, 2), (5, 2)],
    indirect=["threads"],
)
def test_equal_to_reference(pair: Pair, used: list[bool], threads: int, size: int) -> None:
    """Batches in changing order: logits, which also read what earlier steps have stored."""
    bench = Bench(pair.fast, size, 160, 32, fill=0xFF, dense_cache=DENSE)
    bench.feed([(i, pair.ids[: LENGTHS[i]]) for i in range(size)])
    order = list(range(size))
    for step in range(4):
        order = order[1:] + order[:1] if step % 2 else order[::-1]
        starts = [bench.rows[i].length for i in order]
        parts = [(i, [pair.ids[at]]) for i, at in zip(order, starts, strict=True)]
        logits = bench.feed(parts, decode=True)
        for at, row in zip(starts, logits, strict=True):
            assert torch.equal(row, pair.expected["logits"][at : at + 1]), (step, at)
    assert used == [False] + [size <= 16] * 4


def test_several_rows_of_a_sequence(pair: Pair, used: list[bool]) -> None:
    """Verification steps of up to 6 rows leave what decoding one by one leaves."""
    benches = [Bench(pair.fast, 2, 320, dense_cache=DENSE) for _ in range(2)]
    for bench in benches:
        bench.feed([(0, pair.ids[:125]), (1, pair.ids[:7])])
    many, single = benches
    for count in (6, 5, 1, 4):
        at = [row.length for row in many.rows]
        got = many.feed([(i, pair.ids[a : a + count]) for i, a in enumerate(at)], decode=True)
        for i, a in enumerate(at):
            assert torch.equal(got[i], pair.expected["logits"][a : a + count]), (count, i)
        for step in range(count):
            single.feed([(i, [pair.ids[a + step]]) for i, a in enumerate(at)], decode=True)
    assert all(used[2:])
    assert torch.equal(many.caches.blocks, single.caches.blocks)
    assert torch.equal(many.caches.slots, single.caches.slots)


def test_leaves_the_caches_of_the_single_ops(
    pair: Pair, used: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored bytes and decoded copies are the same, whichever way a step ran."""
    benches = []
    for few in (True, False):
        if not few:
            monkeypatch.setattr(model, "fits", lambda *_: False)
        bench = Bench(pair.fast, 3, 200, dense_cache=DENSE)
        bench.feed([(i, pair.ids[i : 20 + 60 * i]) for i in range(3)])
        for step in range(12):
            bench.feed([(i, [pair.ids[300 + step + i]]) for i in range(3)], decode=True)
        benches.append(bench.caches)
    assert used == [False] + [True] * 12
    few_caches, plain = benches
    assert torch.equal(few_caches.blocks, plain.blocks)
    assert torch.equal(few_caches.slots, plain.slots)
    for a, b in zip(few_caches.windows, plain.windows, strict=True):
        assert a.twice is not None and b.twice is not None and torch.equal(a.twice, b.twice)


def test_a_damaged_sequence_stays_alone(pair: Pair) -> None:
    """Entries that are not finite reach only the rows that see them."""
    bench = Bench(pair.fast, 3, 200, dense_cache=DENSE)
    bench.feed([(i, pair.ids[:50]) for i in range(3)])
    for cache in bench.caches.windows:
        assert cache.twice is not None
        cache.twice[bench.rows[1].slot] = float("nan")
    logits = bench.feed([(i, [pair.ids[50]]) for i in range(3)], decode=True)
    assert not logits[1].isfinite().any()
    for i in (0, 2):
        assert torch.equal(logits[i], pair.expected["logits"][50:51])
    again = bench.feed([(0, [pair.ids[51]])], decode=True)  # in the buffers of one row
    assert torch.equal(again[0], pair.expected["logits"][51:52])


def test_other_arithmetic_and_traces_do_not_fit(pair_of: PairOf, used: list[bool]) -> None:
    strict = Bench(pair_of("alpha", "noq").fast, 1, 150, dense_cache=DENSE)
    strict.feed([(0, [3, 4])])
    strict.feed([(0, [5])], decode=True)
    official = Bench(pair_of("alpha", "official").fast, 1, 150, dense_cache=DENSE)
    official.feed([(0, [3, 4])])
    official.feed([(0, [5])], decode=True, trace={})
    assert not any(used)
