"""The fast model has the reference's bits, however a sequence is fed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from tests.model.pair import MODES, Pair, assert_rows_equal, new_session, rows_of
from torch import Tensor

from deepinfer.model.reference import Numerics

PairOf = Callable[[str, Numerics], Pair]
CHECKPOINTS = ("alpha", "beta")

# Around every boundary of both checkpoints: groups of two, top-k (16, 12), candidates (64, 24),
# windows (128, 48) and their rings (134, 53), pages (128).
LENGTHS = (1, 2, 3, 12, 13, 16, 17, 24, 25, 33, 48, 49, 64, 65, 128, 129, 134, 135)
LONG_LENGTHS = (11, 15, 23, 31, 32, 47, 52, 53, 54, 63, 127, 133, 200, 255, 256, 257, 301, 383, 385,
                511, 512, 513, 599)  # fmt: skip
CHUNKS = {  # chunk -> length
    3: 80,
    7: 202,
    64: 600,
}


@pytest.fixture(params=[(c, m) for c in CHECKPOINTS for m in MODES], ids=lambda p: f"{p[0]}-{p[1]}")
def pair(request: pytest.FixtureRequest, pair_of: PairOf) -> Pair:
    """Each checkpoint in each arithmetic."""
    return pair_of(*request.param)


def prefill(pair: Pair, length: int, chunk: int | None, tokens_per_block: int = 128) -> None:
    """Feed the first tokens and compare every traced value."""
    trace: dict[str, Tensor] = {}
    new_session(pair, tokens_per_block, length).prefill(pair.ids[:length], chunk, trace)
    assert_rows_equal(trace, pair.expected)


def decode(pair: Pair, prompt: int, length: int, tokens_per_block: int = 128) -> None:
    """Feed a prompt at once (unless it is 0) and the rest token by token."""
    session = new_session(pair, tokens_per_block, length)
    if prompt:
        session.prefill(pair.ids[:prompt])
    for position in range(prompt, length):
        trace: dict[str, Tensor] = {}
        trace["logits"] = session.decode(pair.ids[position], trace)[None]
        assert_rows_equal(trace, pair.expected, position)


def test_values_are_alive(pair: Pair) -> None:
    """The comparison is not one of zeros: logits vary, limits bind, experts take turns."""
    expected = pair.expected
    assert bool(expected["logits"].isfinite().all()) and float(expected["logits"].std()) > 0.05
    assert len(torch.unique(expected["route_idx"])) == pair.config.n_routed_experts
    rejected = expected["idx_topk"][:, -1]
    assert bool((rejected >= 0).all()) and int(rejected[0].max() - rejected[0].min()) > 20
    assert not bool(expected["cand_blocks"][-1].all())


def test_prefill_at_once(pair: Pair) -> None:
    """One chunk, at every length around a boundary."""
    for length in LENGTHS:
        prefill(pair, length, None)


@pytest.mark.slow
def test_long_prefill_at_once(pair: Pair) -> None:
    """The same for more and longer lengths."""
    for length in LONG_LENGTHS:
        prefill(pair, length, None)


def test_longest_prefill_at_once(pair: Pair) -> None:
    """600 tokens in one chunk."""
    prefill(pair, 600, None)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_prefill_in_chunks(pair: Pair, chunk: int) -> None:
    """Several chunks; the last one is shorter."""
    prefill(pair, CHUNKS[chunk], chunk)


def test_prefill_row_by_row(pair: Pair) -> None:
    """Chunks of one token through the prefill path, from the start and around the windows."""
    session, start = new_session(pair), 0
    for stop, chunk in ((28, 1), (46, 18), (50, 1), (126, 76), (136, 1)):
        trace: dict[str, Tensor] = {}
        session.prefill(pair.ids[start:stop], chunk, trace)
        assert_rows_equal(trace, pair.expected, start)
        start = stop


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7, 13, 33, 100, 127, 129])
def test_long_prefill_in_chunks(pair: Pair, chunk: int) -> None:
    """600 tokens in chunks of any size."""
    prefill(pair, 600, chunk)


@pytest.mark.parametrize(("prompt", "length"), [(0, 27), (1, 4), (46, 54), (125, 137), (255, 258)])
def test_decode(pair: Pair, prompt: int, length: int) -> None:
    """Token by token from the start, and behind prompts."""
    decode(pair, prompt, length)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [0, 127, 301])
def test_long_decode(pair: Pair, prompt: int) -> None:
    """Up to 600 tokens."""
    decode(pair, prompt, 600)


@pytest.mark.parametrize("tokens_per_block", [2, 16, 256])
def test_block_sizes(pair: Pair, tokens_per_block: int) -> None:
    """Other sizes of a cache block change nothing."""
    prefill(pair, 140, 41, tokens_per_block)
    decode(pair, 61, 65, tokens_per_block)


@pytest.mark.parametrize("pieces", [(1, 2, 3, 4, 5, 50, 1, 1, 70, 3), (64, 1, 64, 1, 2, 3)])
def test_mixed_paths(pair: Pair, pieces: Sequence[int]) -> None:
    """Prefill and decode steps may alternate; single tokens go through decode here."""
    session, start = new_session(pair), 0
    for piece in pieces:
        ids = pair.ids[start : start + piece]
        trace: dict[str, Tensor] = {}
        if piece == 1:
            trace["logits"] = session.decode(ids[0], trace)[None]
        else:
            session.prefill(ids, None, trace)
        assert_rows_equal(trace, pair.expected, start)
        start += piece


@pytest.mark.parametrize("position", [0, 1, 46, 47, 48, 127, 128, 140])
def test_drafts(pair: Pair, position: int) -> None:
    """A draft block has the bits of the reference's on the same features."""
    session = new_session(pair)
    session.prefill(pair.ids[: position + 1], 60)
    expected = pair.reference.draft(pair.expected["main_hidden"], position, pair.ids[position + 1])
    for got, want in zip(session.draft(pair.ids[position + 1]), expected, strict=True):
        assert torch.equal(got, want)


def test_causality(pair: Pair) -> None:
    """Other tokens from some position on change no bit before it, and every logit from it on."""
    cut, length = 77, 150
    other = [*pair.ids[:cut], *reversed(pair.ids[cut:length])]
    assert other[cut] != pair.ids[cut]
    trace: dict[str, Tensor] = {}
    new_session(pair).prefill(other, 50, trace)
    assert_rows_equal(rows_of(trace, 0, cut), pair.expected)
    changed = (trace["logits"] != pair.expected["logits"][:length]).any(-1)
    assert bool(changed[cut:].all())


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_recorded_windows_differ_in_roundings_only(name: str, pair_of: PairOf) -> None:
    """In strict arithmetic the recorded slot layout agrees too, to fp32 accuracy."""
    pair = pair_of(name, "noq")
    logits = pair.reference.forward(pair.ids[:30], window_slots="recorded")
    assert float((logits - pair.expected["logits"][:30]).abs().max()) < 1e-4
