"""Stepping back by length alone: after any verification the caches are those of a fresh prefill."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest
import torch
from tests.model.pair import MODES, Bench, Pair
from torch import Tensor

from deepinfer.cache.live import live_shapes, read_live
from deepinfer.model.reference import Numerics

PairOf = Callable[[str, Numerics], Pair]
GARBAGE = 0xFF
Parts = Mapping[str, Tensor]


class Fresh:
    """Live cache parts of prefills of the first tokens, computed once a length."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._known: dict[int, Parts] = {}

    def at(self, length: int) -> Parts:
        """The parts after one prefill of `length` tokens into caches full of NaN."""
        if length not in self._known:
            bench = Bench(self._pair.fast, 1, 320, 32, fill=GARBAGE)
            bench.feed([(0, self._pair.ids[:length])])
            self._known[length] = live(bench, 0)
        return self._known[length]


@pytest.fixture(scope="module")
def fresh_of(pair_of: PairOf) -> Callable[[str, Numerics], Fresh]:
    """Fresh prefills of a checkpoint, kept for the module."""
    known: dict[tuple[str, Numerics], Fresh] = {}

    def get(name: str, mode: Numerics) -> Fresh:
        return known.setdefault((name, mode), Fresh(pair_of(name, mode)))

    return get


def live(bench: Bench, i: int) -> Parts:
    """All that later tokens of a sequence may read."""
    row = bench.rows[i]
    return read_live(bench.caches, row.slot, row.blocks, row.length)


def assert_same(got: Parts, want: Parts, told: object) -> None:
    """Byte for byte."""
    assert got.keys() == want.keys()
    wrong = [
        name
        for name, part in got.items()
        if not torch.equal(part.contiguous().view(torch.uint8), want[name].view(torch.uint8))
    ]
    assert not wrong, (told, wrong)


def verify(bench: Bench, pair: Pair, chosen: list[tuple[int, int, int]]) -> None:
    """Run one step of (sequence, rows, accepted rows), check the logits of the accepted, step back.

    Rows behind the accepted ones hold wrong tokens, each differing from the right one.
    """
    vocab = pair.config.vocab_size
    parts = []
    for i, rows, accepted in chosen:
        at = bench.rows[i].length
        ids = pair.ids[at : at + rows]
        parts.append((i, ids[:accepted] + [(t + 1 + i) % vocab for t in ids[accepted:]]))
    starts = [bench.rows[i].length for i, _, _ in chosen]
    for (i, _, accepted), at, logits in zip(chosen, starts, bench.feed(parts, True), strict=True):
        want = pair.expected["logits"][at : at + accepted]
        assert torch.equal(logits[:accepted], want), (at, accepted)
        bench.rows[i].length = at + accepted


# Lengths at which rings wrap, blocks begin, groups of two are split or the window fills.
STARTS = {"alpha": (64, 133), "beta": (1, 2, 47, 53, 96)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_every_pattern(
    pair_of: PairOf, fresh_of: Callable[[str, Numerics], Fresh], name: str, mode: Numerics
) -> None:
    """All numbers of rows and of accepted rows, from every kind of start, side by side."""
    pair, fresh = pair_of(name, mode), fresh_of(name, mode)
    room = Bench(pair.fast, 1, 32, 32).layout.max_rollback
    patterns = [(rows, kept) for rows in range(1, room + 2) for kept in range(1, rows + 1)]
    for start in STARTS[name]:
        bench = Bench(pair.fast, len(patterns), 256, 32, fill=GARBAGE)
        for row in bench.rows:  # prefilled once, then copied: the same bits, much faster
            row.length = start
        first = bench.rows[0]
        first.length = 0
        bench.feed([(0, pair.ids[:start])])
        for row in bench.rows[1:]:
            bench.caches.slots[row.slot] = bench.caches.slots[first.slot]
            bench.caches.blocks[row.blocks] = bench.caches.blocks[first.blocks]
        verify(bench, pair, [(i, rows, kept) for i, (rows, kept) in enumerate(patterns)])
        for i, pattern in enumerate(patterns):
            assert_same(live(bench, i), fresh.at(start + pattern[1]), (start, pattern))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_patterns_in_a_row(
    pair_of: PairOf,
    fresh_of: Callable[[str, Numerics], Fresh],
    name: str,
    mode: Numerics,
    seed: int,
) -> None:
    """Random verifications one after the other, several sequences together."""
    pair, fresh = pair_of(name, mode), fresh_of(name, mode)
    rng = random.Random(seed)
    bench = Bench(pair.fast, 4, 320, 32, fill=GARBAGE, dense_cache=1 << 28)
    room = bench.layout.max_rollback
    starts = [rng.randrange(1, 150) for _ in bench.rows]
    bench.feed([(i, pair.ids[:start]) for i, start in enumerate(starts)])
    for _ in range(16):
        chosen = []
        for i in rng.sample(range(4), rng.randint(1, 4)):
            rows = rng.randint(1, room + 1)
            chosen.append((i, rows, rng.randint(1, rows)))
        verify(bench, pair, chosen)
    for i, row in enumerate(bench.rows):
        assert_same(live(bench, i), fresh.at(row.length), (starts[i], row.length))


@pytest.mark.parametrize("mode", MODES)
def test_the_whole_depth_one_by_one(
    pair_of: PairOf, fresh_of: Callable[[str, Numerics], Fresh], mode: Numerics
) -> None:
    """Wrong tokens decoded one a step may be taken back together, down to the prompt."""
    pair, fresh = pair_of("beta", mode), fresh_of("beta", mode)
    for start in (1, 48, 53, 95):
        bench = Bench(pair.fast, 1, 256, 32, fill=GARBAGE)
        bench.feed([(0, pair.ids[:start])])
        for j in range(bench.layout.max_rollback):
            bench.feed([(0, [(pair.ids[start + j] + 1) % pair.config.vocab_size])], decode=True)
        bench.rows[0].length = start
        assert_same(live(bench, 0), fresh.at(start), start)


def test_a_ring_without_room_would_be_noticed(pair_of: PairOf) -> None:
    """One row more than the rings have room for destroys what the comparison looks at."""
    pair = pair_of("beta", "official")
    bench = Bench(pair.fast, 1, 256, 32, max_rollback=3)
    bench.feed([(0, pair.ids[:100])])
    before = live(bench, 0)
    bench.feed([(0, [1, 2, 3, 4])], decode=False)
    bench.rows[0].length = 100
    after = live(bench, 0)
    assert not torch.equal(before["window.0"], after["window.0"])


def test_parts_cover_everything(pair_of: PairOf) -> None:
    """Every cache of the layout has a part, of the announced shape."""
    pair = pair_of("alpha", "official")
    bench = Bench(pair.fast, 1, 256, 32)
    bench.feed([(0, pair.ids[:133])])
    parts, layout = live(bench, 0), bench.layout
    assert {n: (p.dtype, tuple(p.shape)) for n, p in parts.items()} == live_shapes(layout, 133)
    kinds = [name.partition(".")[0] for name in parts]
    assert kinds.count("window") == len(layout.windows)
    assert kinds.count("main") + kinds.count("index") == len(layout.parts)
    assert kinds.count("tail") == len(layout.tails) and kinds.count("engram") == 1
    assert all(parts[f"tail.{layer_id}"].shape[0] == 1 for layer_id, _ in layout.tails)
