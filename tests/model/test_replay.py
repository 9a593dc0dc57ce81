"""Bounded replay: mask is the reference's definition, compact is mask on every kept row."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from tests.model.pair import MODES, Bench, Pair
from tests.model.test_rollback import assert_same, live
from torch import Tensor

from deepinfer.model.fast.inputs import ReplayMode
from deepinfer.model.reference import Numerics

PairOf = Callable[[str, Numerics], Pair]
GARBAGE = 0xFF


def expected(pair: Pair, length: int, floor: int) -> Tensor:
    """The reference's logits of rows `floor`.., windows laid out in full."""
    ids = pair.ids[:length]
    return pair.reference.forward(ids, window_slots="full", replay_start=floor)[floor:]


def prefill(
    bench: Bench, pair: Pair, length: int, floor: int, mode: ReplayMode, cuts: list[int], i: int = 0
) -> Tensor:
    """Prefill in chunks that end at `cuts` and `length`; returns the logits of rows `floor`.."""
    logits = []
    for end in [*cuts, length]:
        start = bench.rows[i].length
        got = bench.feed([(i, pair.ids[start:end])], replay=mode, floors={i: floor})[0]
        logits.append(got if mode == "compact" else got[max(0, floor - start) :])
    return torch.cat(logits)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "keep"), [("alpha", 134), ("beta", 53)])
def test_both_modes_are_the_reference(
    pair_of: PairOf, name: str, mode: Numerics, keep: int
) -> None:
    """In one chunk and in many, with ends anywhere around the first kept row; then decoding."""
    pair = pair_of(name, mode)
    length = keep + 97
    floor = length - keep
    want = expected(pair, length, floor)
    chunked: list[list[int]] = [[], [floor - 1, floor + 1], [31, 64, floor + 40]]
    chunked = chunked[2:] if name == "alpha" else chunked
    caches = []
    for cuts in chunked:
        for replay in ("mask", "compact"):
            bench = Bench(pair.fast, 1, 400, 32, fill=GARBAGE)
            got = prefill(bench, pair, length, floor, replay, cuts)
            assert torch.equal(got, want), (cuts, replay)
            caches.append(live(bench, 0))
            assert_same(caches[-1], caches[0], (cuts, replay))
    # The rest of the sequence sees no floor: decoding goes on from equal caches.
    for replay in ("mask", "compact"):
        bench = Bench(pair.fast, 1, 400, 32, fill=GARBAGE)
        prefill(bench, pair, length, floor, replay, [])
        steps = [bench.feed([(0, [pair.ids[length + j]])], decode=True)[0] for j in range(3)]
        kept = pair.reference.forward(
            pair.ids[: length + 3], window_slots="full", replay_start=floor
        )
        assert torch.equal(torch.cat(steps), kept[length:])


@pytest.mark.parametrize("mode", MODES)
def test_many_sequences_in_a_step(pair_of: PairOf, mode: Numerics, seed: int) -> None:
    """Sequences before, across and behind their first kept row share steps; some have no floor."""
    pair = pair_of("beta", mode)
    rng = random.Random(seed)
    lengths = [180, 60, 201, 54, 130]
    floors = {i: max(0, n - 53) for i, n in enumerate(lengths)} | {4: 0}
    bench = Bench(pair.fast, 5, 300, 32, fill=GARBAGE)
    got: dict[int, list[Tensor]] = {i: [] for i in range(5)}
    while any(bench.rows[i].length < n for i, n in enumerate(lengths)):
        left = [i for i, n in enumerate(lengths) if bench.rows[i].length < n]
        parts = []
        for i in rng.sample(left, rng.randint(1, len(left))):
            at = bench.rows[i].length
            parts.append((i, pair.ids[at : min(lengths[i], at + rng.randint(1, 90))]))
        for (i, _), logits in zip(
            parts, bench.feed(parts, replay="compact", floors=floors), strict=True
        ):
            got[i].append(logits)
    for i, n in enumerate(lengths):
        assert torch.equal(torch.cat(got[i]), expected(pair, n, floors[i])), i


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_exact_bound(pair_of: PairOf, name: str) -> None:
    """W + (L - 1)(W - 1) kept tokens give the last row of a full pass, one token less does not."""
    pair = pair_of(name, "noq")
    config = pair.config
    num_decoder = config.num_hidden_layers - config.first_decoder_layer
    window = config.sliding_window
    bound = window + (num_decoder - 1) * (window - 1)
    length = bound + 60
    exact = pair.expected["logits"][length - 1]
    for keep, equal in ((bound, True), (bound - 1, False), (window, False)):
        bench = Bench(pair.fast, 1, 600, 32, fill=GARBAGE)
        got = prefill(bench, pair, length, length - keep, "compact", [])
        assert torch.equal(got[-1], exact) is equal, keep


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_drafts_behind_a_kept_suffix(pair_of: PairOf, name: str, mode: Numerics) -> None:
    """Draft blocks see the same features in both modes, also when a tap lies in the encoder."""
    pair = pair_of(name, mode)
    length = pair.config.sliding_window + 110
    floor = 104
    drafts = []
    for replay in ("mask", "compact"):
        bench = Bench(pair.fast, 1, 400, 32, fill=GARBAGE)
        prefill(bench, pair, length, floor, replay, [99, 140])
        drafts.append(bench.draft([(0, 7)]))
    for one, other in zip(*drafts, strict=True):
        assert torch.equal(one, other)


def test_a_short_prompt_is_whole(pair_of: PairOf) -> None:
    """Without positions to drop the step is the ordinary one."""
    pair = pair_of("beta", "official")
    for replay in ("mask", "compact"):
        bench = Bench(pair.fast, 1, 100, 32)
        got = bench.feed([(0, pair.ids[:50])], replay=replay, floors={0: 0})[0]
        assert torch.equal(got, pair.expected["logits"][:50])
