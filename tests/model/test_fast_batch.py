"""Sequences side by side: a row has the bits it has alone, and nothing leaks between sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.model.pair import MODES, Bench, Pair, random_ids
from torch import Tensor

from deepinfer.model.reference import Numerics

PairOf = Callable[[str, Numerics], Pair]
GARBAGE = 0xFF  # NaN in every format: fp32, e4m3 codes and scales, ue8m0 scales


@pytest.fixture(
    params=[(c, m) for c in ("alpha", "beta") for m in MODES], ids=lambda p: f"{p[0]}-{p[1]}"
)
def pair(request: pytest.FixtureRequest, pair_of: PairOf) -> Pair:
    """Each checkpoint in each arithmetic."""
    return pair_of(*request.param)


def expected_logits(pair: Pair, start: int, count: int) -> Tensor:
    """The reference's logits of some rows."""
    return pair.expected["logits"][start : start + count]


def others(pair: Pair, seed: int) -> list[int]:
    """Tokens of a sequence that only keeps the tested ones company."""
    return random_ids(pair.config, 400, seed)


def test_prefill_of_many(pair: Pair) -> None:
    """Chunks of all sizes at all starts in one step, in any order; half the rows are others'."""
    bench = Bench(pair.fast, 8, 300, fill=GARBAGE)
    strangers = [others(pair, seed) for seed in range(4)]
    plans = (
        [(0, 1), (4, 9), (1, 130), (5, 33), (2, 64)],
        [(2, 7), (0, 1), (6, 77), (3, 128), (1, 2), (4, 1)],
        [(7, 3), (3, 5), (1, 90), (2, 1), (5, 130), (0, 31)],
        [(0, 100), (1, 1), (2, 62), (3, 3), (6, 1), (7, 1)],
    )
    for plan in plans:
        starts = {i: bench.rows[i].length for i, _ in plan}
        parts = [
            (i, (pair.ids if i < 4 else strangers[i - 4])[starts[i] : starts[i] + count])
            for i, count in plan
        ]
        for (i, count), logits in zip(plan, bench.feed(parts), strict=True):
            if i < 4:
                assert torch.equal(logits, expected_logits(pair, starts[i], count)), (plan, i)


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 20])
def test_decode_batches(pair: Pair, size: int) -> None:
    """Decode batches of every size, lengths apart, in changing order."""
    bench = Bench(pair.fast, size, 144, 32, fill=GARBAGE)
    lengths = [1, 127, 63, 16, 47, 2, 128, 15, 48, 33, 130, 5, 24, 64, 3, 99, 12, 49, 17, 129]
    bench.feed([(i, pair.ids[: lengths[i]]) for i in range(size)])
    order = list(range(size))
    for step in range(3):
        order = order[1:] + order[:1] if step % 2 else order[::-1]
        starts = [bench.rows[i].length for i in order]
        parts = [(i, [pair.ids[at]]) for i, at in zip(order, starts, strict=True)]
        logits = bench.feed(parts, decode=True)
        for at, row in zip(starts, logits, strict=True):
            assert torch.equal(row, expected_logits(pair, at, 1)), (step, at)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_schedule(pair_of: PairOf, mode: Numerics, data: st.DataObject) -> None:
    """Prefill and decode steps over any sequences in any order, with several rows in decode."""
    pair = pair_of("beta", mode)
    bench = Bench(pair.fast, 4, 200, data.draw(st.sampled_from([2, 16, 128])), fill=GARBAGE)
    for _ in range(data.draw(st.integers(2, 6))):
        decode = data.draw(st.booleans())
        most = bench.layout.max_rollback + 1 if decode else 70
        chosen = data.draw(st.permutations(range(4)))[: data.draw(st.integers(1, 4))]
        plan = [(i, min(data.draw(st.integers(1, most)), 200 - bench.rows[i].length))
                for i in chosen]  # fmt: skip
        plan = [(i, count) for i, count in plan if count > 0]
        if not plan:
            continue
        starts = [bench.rows[i].length for i, _ in plan]
        parts = [(i, pair.ids[at : at + n]) for (i, n), at in zip(plan, starts, strict=True)]
        for at, logits in zip(starts, bench.feed(parts, decode), strict=True):
            assert torch.equal(logits, expected_logits(pair, at, logits.shape[0]))


def test_drafts_of_many(pair: Pair) -> None:
    """Draft blocks of many sequences at once have the bits of each alone."""
    lengths = [1, 48, 130, 7, 129, 33]
    bench = Bench(pair.fast, len(lengths), 256, fill=GARBAGE)
    bench.feed([(i, pair.ids[:length]) for i, length in enumerate(lengths)])
    order = [3, 0, 5, 2, 4, 1]
    got = bench.draft([(i, pair.ids[lengths[i]]) for i in order])
    features = pair.expected["main_hidden"]
    for row, i in enumerate(order):
        want = pair.reference.draft(features, lengths[i] - 1, pair.ids[lengths[i]])
        for actual, expected in zip(got, want, strict=True):
            assert torch.equal(actual[row], expected), lengths[i]


def wrong_rows(pair: Pair, bench: Bench, rng: Iterator[int], first: int, wrong: int) -> None:
    """Feed `first` right tokens, then `wrong` wrong ones, and step back behind the right ones."""
    row = bench.rows[0]
    start = row.length
    vocab = pair.config.vocab_size
    right = pair.ids[start : start + first]
    bad = [(pair.ids[start + first + j] + 1 + next(rng) % (vocab - 1)) % vocab
           for j in range(wrong)]  # fmt: skip
    logits = bench.feed([(0, right + bad)], decode=True)[0]
    assert torch.equal(logits[:first], expected_logits(pair, start, first)), (start, first, wrong)
    row.length = start + first


@pytest.mark.parametrize("prompt", [1, 45, 126, 133])
def test_rollback(pair: Pair, prompt: int) -> None:
    """Verification with every number of accepted and rejected rows leaves plain decoding's bits."""
    bench = Bench(pair.fast, 1, 400, 32, fill=GARBAGE)
    bench.feed([(0, pair.ids[:prompt])])
    most = bench.layout.max_rollback
    rng = iter(range(10**9))
    for wrong in range(1, most + 1):
        wrong_rows(pair, bench, rng, most + 1 - wrong, wrong)
    # Rejected rows right before a chunk, a single row and a draft.
    wrong_rows(pair, bench, rng, 1, most)
    start = bench.rows[0].length
    logits = bench.feed([(0, pair.ids[start : start + 5])])[0]
    assert torch.equal(logits, expected_logits(pair, start, 5))
    wrong_rows(pair, bench, rng, 2, most - 1)
    position = bench.rows[0].length - 1
    draft = bench.draft([(0, pair.ids[position + 1])])
    features = pair.expected["main_hidden"]
    want = pair.reference.draft(features, position, pair.ids[position + 1])
    for actual, expected in zip(draft, want, strict=True):
        assert torch.equal(actual[0], expected)


def test_steps_back_in_a_row(pair: Pair) -> None:
    """Rows may be taken back one step after the other, as far as max_rollback in total."""
    bench = Bench(pair.fast, 1, 200, 32, fill=GARBAGE)
    start = 130
    bench.feed([(0, pair.ids[:start])])
    wrong = [(i + 1) % pair.config.vocab_size for i in pair.ids[start:]]
    for j in range(bench.layout.max_rollback):
        bench.feed([(0, [wrong[j]])], decode=True)
    bench.rows[0].length = start
    for at in range(start, start + 10):
        logits = bench.feed([(0, [pair.ids[at]])], decode=True)[0]
        assert torch.equal(logits, expected_logits(pair, at, 1)), at


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_rollback(pair_of: PairOf, mode: Numerics, data: st.DataObject) -> None:
    """Two sequences verify any numbers of rows in one step, for any room to step back."""
    pair = pair_of("beta", mode)
    room = data.draw(st.integers(1, 7), label="max_rollback")
    bench = Bench(pair.fast, 2, 200, 16, fill=GARBAGE, max_rollback=room)
    starts = [data.draw(st.integers(1, 100)) for _ in range(2)]
    bench.feed([(i, pair.ids[:start]) for i, start in enumerate(starts)])
    vocab = pair.config.vocab_size
    for _ in range(data.draw(st.integers(1, 8))):
        parts, kept = [], []
        for i in data.draw(st.permutations(range(2))):
            at = bench.rows[i].length
            rows = data.draw(st.integers(1, room + 1))
            right = data.draw(st.integers(1, rows))
            ids = pair.ids[at : at + right]
            bad = data.draw(st.lists(st.integers(0, vocab - 1), min_size=rows - right,
                                     max_size=rows - right))  # fmt: skip
            parts.append((i, ids + bad))
            kept.append((i, at, right))
        for (i, at, right), logits in zip(kept, bench.feed(parts, decode=True), strict=True):
            assert torch.equal(logits[:right], expected_logits(pair, at, right))
            bench.rows[i].length = at + right


def test_reuse_of_slots_and_blocks(pair: Pair) -> None:
    """A sequence in another one's slot and blocks starts afresh."""
    bench = Bench(pair.fast, 1, 200)
    bench.feed([(0, others(pair, 9)[:197])])
    for length in (1, 40, 135):
        bench.rows[0].length = 0
        logits = bench.feed([(0, pair.ids[:length])])[0]
        assert torch.equal(logits, expected_logits(pair, 0, length))
        step = bench.feed([(0, [pair.ids[length]])], decode=True)[0]
        assert torch.equal(step, expected_logits(pair, length, 1))


def test_garbage_in_the_pools(pair: Pair) -> None:
    """Bytes that nobody wrote are never read, decoded copies included."""
    bench = Bench(pair.fast, 2, 300, fill=GARBAGE, dense_cache=1 << 28)
    start = 0
    for chunk in (1, 2, 60, 67, 3):
        logits = bench.feed([(1, pair.ids[start : start + chunk])])[0]
        assert torch.equal(logits, expected_logits(pair, start, chunk)), start
        start += chunk
    for _ in range(3):
        logits = bench.feed([(1, [pair.ids[start]])], decode=True)[0]
        assert torch.equal(logits, expected_logits(pair, start, 1)), start
        start += 1


@pytest.mark.parametrize("decode", [False, True])
def test_a_broken_sequence_stays_alone(pair: Pair, decode: bool) -> None:
    """One sequence whose caches hold NaN does not touch its neighbours in a step."""
    bench = Bench(pair.fast, 4, 300)
    lengths = [150, 3, 20, 140]  # the sick one has no absent slots, its neighbours have
    bench.feed([(i, pair.ids[:n]) for i, n in enumerate(lengths)])
    sick = bench.rows[0]
    bench.caches.blocks[sick.blocks] = GARBAGE
    bench.caches.slots[sick.slot] = GARBAGE
    if bench.caches.engram_tail is not None:
        bench.caches.engram_tail[sick.slot] = 0  # ids, not numbers that can be NaN
    count = 1 if decode else 20
    for order in ([0, 1, 2, 3], [1, 0, 2, 3], [3, 2, 1, 0]):
        starts = [bench.rows[i].length for i in order]
        parts = [(i, pair.ids[at : at + count]) for i, at in zip(order, starts, strict=True)]
        for i, at, logits in zip(order, starts, bench.feed(parts, decode), strict=True):
            if i:
                assert torch.equal(logits, expected_logits(pair, at, count)), (order, i)
            else:
                assert bool(logits.isnan().any())


def test_drafts_beside_a_broken_sequence(pair: Pair) -> None:
    """Draft blocks of the neighbours keep their bits."""
    lengths = [150, 3, 20]
    bench = Bench(pair.fast, 3, 300)
    bench.feed([(i, pair.ids[:n]) for i, n in enumerate(lengths)])
    want = [bench.draft([(i, 7)]) for i in range(3)]
    bench.caches.slots[bench.rows[0].slot] = GARBAGE
    got = bench.draft([(i, 7) for i in range(3)])
    for i in (1, 2):
        for actual, expected in zip(got, want[i], strict=True):
            assert torch.equal(actual[i], expected[0])
    assert bool(got[1][0].isnan().any())


@pytest.mark.parametrize("mode", MODES)
def test_later_damage_does_not_reach_back(pair_of: PairOf, mode: Numerics) -> None:
    """A token whose embedding is NaN changes no bit of the rows before it in its chunk."""
    pair = pair_of("beta", mode)
    bad = pair.config.image_token_id
    embed = pair.fast.embed
    pair.fast.embed = embed.clone()
    pair.fast.embed[bad] = float("nan")
    try:
        logits = Bench(pair.fast, 1, 300).feed([(0, [*pair.ids[:75], bad, *pair.ids[76:130]])])[0]
    finally:
        pair.fast.embed = embed
    assert torch.equal(logits[:75], expected_logits(pair, 0, 75))
    assert bool(logits[75].isnan().all())
