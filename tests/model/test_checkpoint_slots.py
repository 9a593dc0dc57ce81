"""Saving rings and tails at an inner boundary of a chunk, and going on from them elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.model.pair import MODES, Bench, Pair
from tests.model.test_rollback import assert_same

from deepinfer.cache.live import copy_slot, read_live
from deepinfer.model.reference import Numerics

PairOf = Callable[[str, Numerics], Pair]
GARBAGE = 0xFF


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_saved_in_passing(pair_of: PairOf, name: str, mode: Numerics) -> None:
    """A slot saved inside, at the end or across chunks equals a prefill that stops there."""
    pair = pair_of(name, mode)
    for cuts, end in (([200], 64), ([200], 192), ([192, 200], 192), ([50, 180, 200], 160)):
        bench = Bench(pair.fast, 3, 320, 32, fill=GARBAGE, dense_cache=1 << 28)
        mine, saved, fresh = bench.rows
        for cut in cuts:
            saves = {}
            if bench.rows[0].length < end <= cut:
                copy_slot(bench.caches, mine.slot, saved.slot)
                saves = {0: [(end, saved.slot)]}
            bench.feed([(0, pair.ids[mine.length : cut])], saves=saves)
        bench.feed([(2, pair.ids[:end])])
        want = read_live(bench.caches, fresh.slot, fresh.blocks, end)
        assert_same(read_live(bench.caches, saved.slot, mine.blocks, end), want, (cuts, end))

        # Another sequence goes on from there in a slot of its own, on the same blocks.
        copy_slot(bench.caches, saved.slot, fresh.slot)
        shared = end // 32
        fresh.blocks[:shared], fresh.length = mine.blocks[:shared], end
        logits = bench.feed([(2, pair.ids[end:230])])[0]
        assert torch.equal(logits, pair.expected["logits"][end:230])
        step = bench.feed([(2, pair.ids[230:234])], decode=True)[0]
        assert torch.equal(step, pair.expected["logits"][230:234])


def test_two_boundaries_in_one_chunk(pair_of: PairOf) -> None:
    """One chunk fills several slots, beside another sequence."""
    pair = pair_of("beta", "official")
    bench = Bench(pair.fast, 6, 320, 32, fill=GARBAGE)
    rows = bench.rows
    saves = {0: [(32, rows[2].slot), (128, rows[3].slot)]}
    bench.feed([(1, pair.ids[:70]), (0, pair.ids[:150])], saves=saves)
    for place, end in ((2, 32), (3, 128)):
        bench.feed([(place + 2, pair.ids[:end])])
        fresh = rows[place + 2]
        want = read_live(bench.caches, fresh.slot, fresh.blocks, end)
        assert_same(read_live(bench.caches, rows[place].slot, rows[0].blocks, end), want, end)
